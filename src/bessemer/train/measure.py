"""Time a run's own work on this device before it begins: training steps, validation and saving, of the real model with
random tokens, or, of one that is too slow or too large for it, of its first layers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

from bessemer.checkpoint.protocol import save
from bessemer.errors import BessemerError
from bessemer.layout.flops import hardware_flops
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import build_model
from bessemer.parallel.tied import owned_parameters
from bessemer.recipe import Recipe
from bessemer.train import optimizer as optimizers
from bessemer.train.device import Device, synchronize
from bessemer.train.engine import MicroBatch, concurrent_micro_batches
from bessemer.train.step import TrainStep

WARMUP_STEPS, WARMUP_SHARE = 3, 0.5  # untimed steps, unless they take this share of the budget
MAX_STEPS = 40
SCORED_SHARE = 0.1  # of the budget, for validation
SAVED_BYTES = 32_000_000  # of a checkpoint that is written to time it; larger ones are scaled up
Typical = Callable[[Iterable[float]], float]  # of repeated measurements
FEW_LAYERS = (1, 3)  # the models whose difference is what a layer takes


@dataclass(frozen=True)
class RunTiming:
    """Measured seconds on one device: step: of a training step; scored_token: of validation, by token; saving: of a
    checkpoint, 0 where none could be written; layers: of the largest model timed, fewer than the run's where the step was
    scaled up."""

    step: float
    scored_token: float
    saving: float
    layers: int


def step_seconds(
    recipe: Recipe, config: ModelConfig, device: Device, budget_seconds: float, typical: Typical = median
) -> float:
    """Seconds of a whole training step of a resolved recipe, measured for about `budget_seconds`."""
    return _timed_steps([_model_step(recipe, config, device, None)], budget_seconds, typical)[0]


def time_run(
    recipe: Recipe, config: ModelConfig, device: Device, budget_seconds: float, recomputed: int, folder: Path
) -> RunTiming:
    """Time a resolved recipe's step, validation and saving for about `budget_seconds`; recomputed: layers, as planned;
    folder: on whose disk a checkpoint is written and removed."""
    step = _model_step(recipe, config, device, recomputed)
    seconds = _timed_steps([step], (1.0 - SCORED_SHARE) * budget_seconds)[0]
    scored = _timed_validation(step, SCORED_SHARE * budget_seconds)
    return RunTiming(seconds, scored, _timed_saving(step, folder), config.layers)


def time_layers(
    recipe: Recipe, config: ModelConfig, device: Device, budget_seconds: float, recomputed: int, folder: Path
) -> RunTiming:
    """The same for a model too large to time whole: models of FEW_LAYERS layers and all the rest are timed in turns, and
    what a layer takes is scaled by the FLOPs of all of them. Saving is scaled by bytes."""
    few = [replace(config, layers=layers) for layers in FEW_LAYERS]
    again = [one.layers if recomputed == config.layers else 0 for one in few]
    steps = [_model_step(recipe, one, device, number) for one, number in zip(few, again, strict=True)]
    seconds = _timed_steps(steps, (1.0 - SCORED_SHARE) * budget_seconds)
    scored = [_timed_validation(step, SCORED_SHARE * budget_seconds / len(steps)) for step in steps]
    low, high = (hardware_flops(recipe.train, one, number) for one, number in zip(few, again, strict=True))
    scale = (hardware_flops(recipe.train, config, recomputed) - low) / (high - low)
    step, scored_token = (first + scale * max(second - first, 0.0) for first, second in (seconds, scored))
    saving = _timed_saving(steps[-1], folder) * config.parameters / few[-1].parameters
    return RunTiming(step, scored_token, saving, FEW_LAYERS[-1])


def _model_step(recipe: Recipe, config: ModelConfig, device: Device, recomputed: int | None) -> TrainStep:
    return TrainStep(recipe, build_model(config, recipe.run.seed), device, 0, 1, recomputed=recomputed)


def _timed_steps(steps: Sequence[TrainStep], budget: float, typical: Typical = median) -> list[float]:
    """Seconds of a step of each model: its micro-batches and one update. One micro-batch (or two, where they run together)
    and one update are timed (`typical` of them), so that a step of many micro-batches is known from a few. Several models
    take turns, so that other work on the machine slows all of them down."""
    train, device, config = steps[0].settings, steps[0].device, steps[0].model.config
    batch_tokens, micro = train.global_batch_tokens, train.micro_batch
    assert batch_tokens is not None and micro is not None, "the recipe is resolved"
    together = concurrent_micro_batches(train, config.sequence_length, device.torch_device, device.compile)
    batch = steps[0].task.made_up(np.random.default_rng(0), micro * together, config)
    gradients: list[list[float]] = [[] for _ in steps]
    updates: list[list[float]] = [[] for _ in steps]
    started = perf_counter()
    for turn in range(MAX_STEPS):
        is_warm = turn >= WARMUP_STEPS or (turn and perf_counter() - started > WARMUP_SHARE * budget)
        for number, step in enumerate(steps):
            began = perf_counter()
            norm = step.gradients(batch).grad_norm
            synchronize(device)
            between = perf_counter()
            step.update(0, norm)
            synchronize(device)
            if is_warm:
                gradients[number].append(between - began)
                updates[number].append(perf_counter() - between)
        if gradients[0] and perf_counter() - started > budget:
            break
    count = batch_tokens // config.sequence_length // micro / together
    return [typical(each) * count + typical(updated) for each, updated in zip(gradients, updates, strict=True)]


@torch.no_grad()
def _timed_validation(step: TrainStep, budget: float) -> float:
    """Seconds a token of validation: the forward pass of a micro-batch and its loss."""
    rows, config = step.settings.micro_batch or 1, step.model.config
    batch = step.task.made_up(np.random.default_rng(0), rows, config)
    micro_batch = MicroBatch(torch.from_numpy(batch.inputs), torch.from_numpy(batch.wanted), None)
    seconds: list[float] = []
    started = perf_counter()
    while not seconds or (perf_counter() - started < budget and len(seconds) < MAX_STEPS):
        began = perf_counter()
        step.engine.score(micro_batch)
        synchronize(step.device)
        seconds.append(perf_counter() - began)
    return median(seconds) / (rows * config.sequence_length)


def _timed_saving(step: TrainStep, folder: Path) -> float:
    """Seconds of a checkpoint; 0 where the folder's disk cannot be written."""
    whole = {
        "model": {name: parameter.detach() for name, parameter in owned_parameters(step.model)},
        "optimizer": optimizers.state_tensors(step.model, step.optimizer),
    }
    total, taken = sum(tensor.nbytes for part in whole.values() for tensor in part.values()), 0
    for part in whole.values():
        for name in list(part):
            if taken > SAVED_BYTES:
                del part[name]
            else:
                taken += part[name].nbytes
    there = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".bessemer-", dir=there) as place:
            began = perf_counter()
            save(Path(place), 1, whole, {}, keep=1)
            return (perf_counter() - began) * total / max(taken, 1)
    except (BessemerError, OSError):
        return 0.0
