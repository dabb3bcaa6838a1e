"""Time a run's own work on this device before it begins: training steps, validation and saving, of the real model with
random tokens, or, of one that is too slow or too large for it, of its first layers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
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
from bessemer.terminal import counted, warn
from bessemer.train import device as devices
from bessemer.train import optimizer as optimizers
from bessemer.train.device import PATIENCE, Device, busy_note, is_steady, synchronize, warn_of_busy
from bessemer.train.engine import MicroBatch, concurrent_micro_batches
from bessemer.train.precision import Precision, has_units
from bessemer.train.trainer import Trainer

WARMUP_STEPS, WARMUP_SHARE = 3, 0.5  # untimed steps, unless they take this share of the budget
MAX_STEPS, ENOUGH_STEPS = 40, 5  # timed at most, and of a run of fewer steps than that
SCORED_SHARE = 0.1  # of the budget, for validation
SAVED_BYTES = 32_000_000  # of a checkpoint that is written to time it; larger ones are scaled up
Typical = Callable[[Iterable[float]], float]  # of repeated measurements
MIN_STEP_GAIN = 1.1  # of a step, from which bf16 is the better choice on a CPU
CLEAR_LEAD, FEW_TURNS = 6, 3  # turns by which one must win; that are timed whatever they take
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
    recipe: Recipe, config: ModelConfig, among: Sequence[Device], budget_seconds: float, typical: Typical = median
) -> float:
    """Return the seconds of a whole training step of a resolved recipe, on the fastest of the devices.

    It is measured for about `budget_seconds`, and up to PATIENCE times as long until repeats agree; a warning says where they
    do not.
    """
    turns, started = list[list[float]](), perf_counter()
    for turn in _step_turns([_built_trainer(recipe, config, device, None) for device in among], budget_seconds):
        turns.append(turn)
        spent, columns = perf_counter() - started, list(zip(*turns, strict=True))
        is_agreed = all(map(is_steady, columns))
        if (is_agreed and (len(turns) >= MAX_STEPS or spent > budget_seconds)) or spent > PATIENCE * budget_seconds:
            break
    if not is_agreed and budget_seconds:
        warn_of_busy()
    return min(typical(seconds) for seconds in columns)


def time_run(
    recipe: Recipe, config: ModelConfig, device: Device, budget_seconds: float, recomputed: int, folder: Path
) -> RunTiming:
    """Time a resolved recipe's step, validation and saving for about `budget_seconds`; recomputed: layers, as planned;
    folder: on whose disk a checkpoint is written and removed."""
    trainer = _built_trainer(recipe, config, device, recomputed)
    max_steps = _worth_timing(recipe)
    seconds = _timed_steps([trainer], (1.0 - SCORED_SHARE) * budget_seconds, max_steps)[0]
    scored = _timed_validation(trainer, SCORED_SHARE * budget_seconds, max_steps)
    return RunTiming(seconds, scored, _timed_saving(trainer, folder), config.layers)


def time_layers(
    recipe: Recipe, config: ModelConfig, device: Device, budget_seconds: float, recomputed: int, folder: Path
) -> RunTiming:
    """The same for a model too large to time whole: models of FEW_LAYERS layers and all the rest are timed in turns, and
    what a layer takes is scaled by the FLOPs of all of them. Saving is scaled by bytes."""
    few = [replace(config, layers=layers) for layers in FEW_LAYERS]
    again = [one.layers if recomputed == config.layers else 0 for one in few]
    trainers = [_built_trainer(recipe, one, device, number) for one, number in zip(few, again, strict=True)]
    max_steps = _worth_timing(recipe)
    seconds = _timed_steps(trainers, (1.0 - SCORED_SHARE) * budget_seconds, max_steps)
    scored = [
        _timed_validation(trainer, SCORED_SHARE * budget_seconds / len(trainers), max_steps) for trainer in trainers
    ]
    low, high = (hardware_flops(recipe.train, one, number) for one, number in zip(few, again, strict=True))
    scale = (hardware_flops(recipe.train, config, recomputed) - low) / (high - low)
    step, scored_token = (first + scale * max(second - first, 0.0) for first, second in (seconds, scored))
    saving = _timed_saving(trainers[-1], folder) * config.parameters / few[-1].parameters
    return RunTiming(step, scored_token, saving, FEW_LAYERS[-1])


def faster_precision(recipe: Recipe, config: ModelConfig, budget_seconds: float) -> tuple[str, str]:
    """Return bf16 or fp32, in which a CPU trains a resolved recipe faster, and the reason as a sentence.

    A CPU without units for bf16 takes fp32, untimed. With units, steps of the model are timed in both in turns, until one wins
    CLEAR_LEAD turns more than the other, for about `budget_seconds`, or PATIENCE times as long while turns contradict each
    other; 0: untimed, bf16.
    """
    if not has_units("bf16"):
        return "fp32", "this CPU has no units for bf16"
    if not budget_seconds:
        return "bf16", "this CPU has units for it"
    both = [devices.choose(recipe.train.changed(precision=name)) for name in ("fp32", "bf16")]
    lead, turns, started = 0, list[list[float]](), perf_counter()
    for wide, narrow in _step_turns([_built_trainer(recipe, config, one, None) for one in both], budget_seconds):
        lead += 1 if wide > MIN_STEP_GAIN * narrow else -1
        turns.append([wide, narrow])
        is_clear = abs(lead) >= CLEAR_LEAD or abs(lead) == len(turns)
        patience = budget_seconds * (1.0 if is_clear else PATIENCE)
        if abs(lead) >= CLEAR_LEAD or (len(turns) >= FEW_TURNS and perf_counter() - started > patience):
            break
    if not is_clear:
        warn(
            f"train.precision: {(len(turns) - abs(lead)) // 2} of {len(turns)} timed steps contradict the others; "
            f"{busy_note() or 'other work may run on this machine'}. Set train.precision where the choice matters"
        )
    wide, narrow = (median(seconds) for seconds in zip(*turns, strict=True))
    why = (
        f"a step takes {wide:.3g} s in fp32 and {narrow:.3g} s in bf16, in the median of {counted(len(turns), 'turn')}"
    )
    return "bf16" if lead > 0 else "fp32", why


def warn_of_slow(precision: Precision, advice: str) -> None:
    """Warn where a CPU has no units for the chosen precision of 16 bits."""
    if precision.autocast is not None and not has_units(precision.name):
        warn(f"train.precision = {precision.name}: this CPU has no units for it, it is slower than fp32; {advice}")


def _built_trainer(recipe: Recipe, config: ModelConfig, device: Device, recomputed: int | None) -> Trainer:
    return Trainer(recipe, build_model(config, recipe.run.seed), device, 0, 1, recomputed=recomputed)


def _worth_timing(recipe: Recipe) -> int:
    """Steps that are timed at most: to time more than the run has takes longer than the run."""
    if recipe.train.minutes is not None or recipe.train.steps is None:
        return MAX_STEPS
    return min(MAX_STEPS, max(ENOUGH_STEPS, recipe.train.steps))


def _step_turns(trainers: Sequence[Trainer], budget: float) -> Iterator[list[float]]:
    """Yield the seconds of a step of each model, its micro-batches and one update, turn by turn without end. One micro-batch (or
    two, where they run together) and one update are timed, so that a step of many micro-batches is known from a few. Models
    take turns, and change their order, so that other work on the machine slows all of them down. The first turns are not
    yielded."""
    train, device, config = trainers[0].settings, trainers[0].device, trainers[0].model.config
    batch_tokens, micro = train.global_batch_tokens, train.micro_batch
    assert batch_tokens is not None and micro is not None, "the recipe is resolved"
    together = concurrent_micro_batches(train, config.sequence_length, device.torch_device, device.compile)
    num_timed = batch_tokens // config.sequence_length // micro / together
    batch = trainers[0].task.made_up(np.random.default_rng(0), micro * together, config)
    started = perf_counter()
    for turn in count():
        is_warm = turn >= WARMUP_STEPS or (turn and perf_counter() - started > WARMUP_SHARE * budget)
        seconds = [0.0] * len(trainers)
        for number in range(len(trainers))[:: -1 if turn % 2 else 1]:
            began = perf_counter()
            norm = trainers[number].forward_backward(batch).grad_norm
            synchronize(device)
            between = perf_counter()
            trainers[number].update(0, norm)
            synchronize(device)
            seconds[number] = num_timed * (between - began) + perf_counter() - between
        if is_warm:
            yield seconds


def _timed_steps(trainers: Sequence[Trainer], budget: float, max_steps: int) -> list[float]:
    """Return the median seconds of a step of each model, measured for about `budget` seconds."""
    turns, started = list[list[float]](), perf_counter()
    for turn in _step_turns(trainers, budget):
        turns.append(turn)
        if len(turns) >= max_steps or perf_counter() - started > budget:
            break
    return [median(seconds) for seconds in zip(*turns, strict=True)]


@torch.no_grad()
def _timed_validation(trainer: Trainer, budget: float, max_steps: int) -> float:
    """Seconds a token of validation: the forward pass of a micro-batch and its loss."""
    rows, config = trainer.settings.micro_batch or 1, trainer.model.config
    batch = trainer.task.made_up(np.random.default_rng(0), rows, config)
    micro_batch = MicroBatch.of(batch)
    seconds: list[float] = []
    started = perf_counter()
    while not seconds or (perf_counter() - started < budget and len(seconds) < max_steps):
        began = perf_counter()
        trainer.engine.score(micro_batch)
        synchronize(trainer.device)
        seconds.append(perf_counter() - began)
    return median(seconds) / (rows * config.sequence_length)


def _timed_saving(trainer: Trainer, folder: Path) -> float:
    """Seconds of a checkpoint; 0 where the folder's disk cannot be written."""
    whole = {
        "model": {name: parameter.detach() for name, parameter in owned_parameters(trainer.model)},
        "optimizer": optimizers.state_tensors(trainer.model, trainer.optimizer),
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
