"""Time a run's own work on this device before it begins: training steps, validation and saving, of the real model with
random tokens, or, of one that is too slow or too large for it, of its first layers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

from bessemer.checkpoint.protocol import save
from bessemer.errors import BessemerError
from bessemer.layout.flops import hardware_flops
from bessemer.model.config import ModelConfig
from bessemer.model.kernels import linear_kernel, matmul_kernel
from bessemer.model.transformer import build_model
from bessemer.parallel.tied import owned_parameters
from bessemer.recipe import Recipe
from bessemer.terminal import warn
from bessemer.train import device as devices
from bessemer.train import optimizer as optimizers
from bessemer.train.device import Device, synchronize
from bessemer.train.engine import MicroBatch, concurrent_micro_batches
from bessemer.train.precision import Precision
from bessemer.train.trainer import Trainer

WARMUP_STEPS, WARMUP_SHARE = 3, 0.5  # untimed steps, unless they take this share of the budget
MAX_STEPS, ENOUGH_STEPS = 40, 5  # timed at most, and of a run of fewer steps than that
SCORED_SHARE = 0.1  # of the budget, for validation
SAVED_BYTES = 32_000_000  # of a checkpoint that is written to time it; larger ones are scaled up
Typical = Callable[[Iterable[float]], float]  # of repeated measurements
MIN_MATMUL_GAIN, MIN_STEP_GAIN = 1.5, 1.1  # from which bf16 may be, and is, the better choice on a CPU
# Rows and edges of matmuls that are timed, at most: larger ones say no more. Small ones come first, since a CPU without units for
# bf16 would take minutes for the last; it is known by HOPELESS_GAIN.
MATMUL_SIZES, MATMUL_TURNS, HOPELESS_GAIN = ((64, 256), (128, 512), (256, 1024), (512, 2048)), 4, 0.5
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
    return _timed_steps([_built_trainer(recipe, config, device, None)], budget_seconds, typical)[0]


def time_run(
    recipe: Recipe, config: ModelConfig, device: Device, budget_seconds: float, recomputed: int, folder: Path
) -> RunTiming:
    """Time a resolved recipe's step, validation and saving for about `budget_seconds`; recomputed: layers, as planned;
    folder: on whose disk a checkpoint is written and removed."""
    trainer = _built_trainer(recipe, config, device, recomputed)
    max_steps = _worth_timing(recipe)
    seconds = _timed_steps([trainer], (1.0 - SCORED_SHARE) * budget_seconds, max_steps=max_steps)[0]
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
    seconds = _timed_steps(trainers, (1.0 - SCORED_SHARE) * budget_seconds, max_steps=max_steps)
    scored = [
        _timed_validation(trainer, SCORED_SHARE * budget_seconds / len(trainers), max_steps) for trainer in trainers
    ]
    low, high = (hardware_flops(recipe.train, one, number) for one, number in zip(few, again, strict=True))
    scale = (hardware_flops(recipe.train, config, recomputed) - low) / (high - low)
    step, scored_token = (first + scale * max(second - first, 0.0) for first, second in (seconds, scored))
    saving = _timed_saving(trainers[-1], folder) * config.parameters / few[-1].parameters
    return RunTiming(step, scored_token, saving, FEW_LAYERS[-1])


def faster_precision(recipe: Recipe, config: ModelConfig, budget_seconds: float) -> tuple[str, str]:
    """bf16 or fp32, in which a CPU trains a resolved recipe faster, and why, in a sentence.

    Its matmuls are timed first: bf16 is out of the question where the CPU has no units for it. Then steps of both in turns,
    since what is between the matmuls gains less; budget_seconds: for them, 0: the matmuls decide.
    """
    gain = matmul_gain(recipe, config)
    matmuls = f"this CPU's matmuls of these shapes are {_times(gain)} in bf16"
    if gain < MIN_MATMUL_GAIN:
        return "fp32", matmuls + (", too little for what else a step does in it" if gain >= 1.0 else "")
    if not budget_seconds:
        return "bf16", matmuls
    both = [devices.choose(recipe.train.changed(precision=name)) for name in ("fp32", "bf16")]
    trainers = [_built_trainer(recipe, config, one, None) for one in both]
    wide, narrow = _timed_steps(trainers, budget_seconds, typical=min)
    name = "bf16" if wide > MIN_STEP_GAIN * narrow else "fp32"
    return name, f"a step takes {wide:.3g} s in fp32 and {narrow:.3g} s in bf16; {matmuls}"


def _times(gain: float) -> str:
    return f"{gain:.1f} times as fast" if gain >= 1.0 else f"{1 / gain:.1f} times slower"


def matmul_gain(recipe: Recipe, config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> float:
    """How many times as fast a CPU computes the matmuls of a block of `dtype` as in fp32, backward pass included: the best
    of a few turns of each."""
    up = config.mlp_width * (2 if config.gated else 1)
    shapes = ((config.width, config.heads * config.head_dim), (config.width, up), (config.mlp_width, config.width))
    return _matmul_gain((recipe.train.micro_batch or 1) * config.sequence_length, shapes, dtype)


@cache
def _matmul_gain(rows: int, shapes: tuple[tuple[int, int], ...], dtype: torch.dtype) -> float:
    """Of (rows, inner) by (inner, outer) for each of the shapes."""
    gain, before = 1.0, None
    for most_rows, edge in MATMUL_SIZES:
        sizes = min(rows, most_rows), tuple((min(inner, edge), min(outer, edge)) for inner, outer in shapes)
        if gain < HOPELESS_GAIN or sizes == before:
            break
        gain, before = _timed_gain(*sizes, dtype), sizes
    return gain


def _timed_gain(rows: int, shapes: tuple[tuple[int, int], ...], low: torch.dtype) -> float:
    seconds = {torch.float32: float("inf"), low: float("inf")}
    generator, factors = torch.Generator().manual_seed(0), []
    for inner, outer in shapes:
        sizes = (rows, inner), (outer, inner), (rows, outer)
        factors.append([torch.randn(size, generator=generator) for size in sizes])
    for _ in range(MATMUL_TURNS):
        for dtype in seconds:
            taken = 0.0
            for x, weight, gradient in ([one.to(dtype) for one in three] for three in factors):
                began = perf_counter()
                linear_kernel(x, weight)
                matmul_kernel(gradient, weight)
                torch.mm(gradient.T, x)
                taken += perf_counter() - began
            seconds[dtype] = min(seconds[dtype], taken)
    return seconds[torch.float32] / seconds[low]


def warn_of_slow(precision: Precision, recipe: Recipe, config: ModelConfig, advice: str) -> None:
    """Warn where a CPU has no units for a precision of 16 bits, which is chosen. Its matmuls are timed for that."""
    if precision.autocast is not None and (gain := matmul_gain(recipe, config, precision.autocast)) < 1.0:
        warn(
            f"train.precision = {precision.name}: this CPU has no units for it, its matmuls are {1 / gain:.1f} times slower than "
            f"in fp32; {advice}"
        )


def _built_trainer(recipe: Recipe, config: ModelConfig, device: Device, recomputed: int | None) -> Trainer:
    return Trainer(recipe, build_model(config, recipe.run.seed), device, 0, 1, recomputed=recomputed)


def _worth_timing(recipe: Recipe) -> int:
    """Steps that are timed at most: to time more than the run has takes longer than the run."""
    if recipe.train.minutes is not None or recipe.train.steps is None:
        return MAX_STEPS
    return min(MAX_STEPS, WARMUP_STEPS + max(ENOUGH_STEPS, recipe.train.steps))


def _timed_steps(
    trainers: Sequence[Trainer], budget: float, typical: Typical = median, max_steps: int | None = None
) -> list[float]:
    """Seconds of a step of each model: its micro-batches and one update. One micro-batch (or two, where they run together)
    and one update are timed (`typical` of them), so that a step of many micro-batches is known from a few. Several models
    take turns, so that other work on the machine slows all of them down."""
    train, device, config = trainers[0].settings, trainers[0].device, trainers[0].model.config
    batch_tokens, micro = train.global_batch_tokens, train.micro_batch
    assert batch_tokens is not None and micro is not None, "the recipe is resolved"
    together = concurrent_micro_batches(train, config.sequence_length, device.torch_device, device.compile)
    batch = trainers[0].task.made_up(np.random.default_rng(0), micro * together, config)
    gradients: list[list[float]] = [[] for _ in trainers]
    updates: list[list[float]] = [[] for _ in trainers]
    started = perf_counter()
    for turn in range(max_steps or MAX_STEPS):
        is_warm = turn >= WARMUP_STEPS or (turn and perf_counter() - started > WARMUP_SHARE * budget)
        for number, trainer in enumerate(trainers):
            began = perf_counter()
            norm = trainer.forward_backward(batch).grad_norm
            synchronize(device)
            between = perf_counter()
            trainer.update(0, norm)
            synchronize(device)
            if is_warm:
                gradients[number].append(between - began)
                updates[number].append(perf_counter() - between)
        if gradients[0] and perf_counter() - started > budget:
            break
    count = batch_tokens // config.sequence_length // micro / together
    return [typical(each) * count + typical(updated) for each, updated in zip(gradients, updates, strict=True)]


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
