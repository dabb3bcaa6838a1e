"""Time training steps of a recipe's model on this device, with random tokens, before its run begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from statistics import median
from time import perf_counter

import numpy as np

from bessemer.common.console import warn
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import build_model
from bessemer.recipe import ResolvedRecipe
from bessemer.train import device as devices
from bessemer.train.device import Device, synchronize
from bessemer.train.engine import concurrent_micro_batches
from bessemer.train.precision import Precision, has_units
from bessemer.train.trainer import Trainer

WARMUP_STEPS, WARMUP_SHARE = 3, 0.5  # untimed steps, unless they take this share of the budget
TIMED_STEPS = 20
PRECISION_STEPS = 8  # timed in each precision
MIN_STEP_GAIN = 1.1  # of a step, from which bf16 is the better choice on a CPU
UNSEEN_BYTES = 50_000_000  # by which a peak that was just reset may be above what is resident
Typical = Callable[[Iterable[float]], float]  # of repeated measurements


def step_seconds(
    recipe: ResolvedRecipe, config: ModelConfig, among: Sequence[Device], budget_seconds: float, recomputed: int | None = None,
    typical: Typical = median, shows_peak: bool = False,
) -> float:  # fmt: skip
    """Return the seconds of a training step of a resolved recipe, on the fastest of the devices.

    Args:
        budget_seconds: Time after which no further step is timed; TIMED_STEPS at most are.
        recomputed: Layers to recompute, as planned; None leaves the choice to the trainer.
        typical: Reduces the timed steps to one number.
        shows_peak: Ends with micro-batches in a row, so that the memory has the peak of a whole step.
    """
    trainers = [_built_trainer(recipe, config, device, recomputed) for device in among]
    seconds = min(map(typical, _timed_steps(trainers, budget_seconds, TIMED_STEPS)))
    rows, rounds = _rows_and_rounds(trainers[0])
    if shows_peak and rounds > 1:  # the gradients of the first are held while the second is computed; more take no more
        trainers[0].forward_backward(trainers[0].task.made_up(np.random.default_rng(0), 2 * rows, config))
    return seconds


def measured_step(
    recipe: ResolvedRecipe, config: ModelConfig, device: Device, budget_seconds: float, recomputed: int
) -> tuple[float, int | None]:
    """Return the seconds of a training step and the bytes of memory that it takes beyond what this process holds.

    The bytes are of the peak of resident memory on a CPU; None on a GPU, and where the system keeps no such peak. Arguments are
    those of `step_seconds`.
    """
    devices.release_unused(device)
    devices.reset_peak_resident()
    before = devices.resident_bytes()
    can_measure = not device.is_cuda and devices.peak_resident_bytes() - before < UNSEEN_BYTES
    seconds = step_seconds(recipe, config, [device], budget_seconds, recomputed, median, can_measure)
    return seconds, devices.peak_resident_bytes() - before if can_measure else None


def faster_precision(recipe: ResolvedRecipe, config: ModelConfig, budget_seconds: float) -> tuple[str, str]:
    """Return bf16 or fp32, in which a CPU trains a resolved recipe faster, and the reason as a sentence.

    A CPU without units for bf16 takes fp32, untimed. With units, steps of the model are timed in both for about `budget_seconds`;
    0: untimed, bf16.
    """
    if not has_units("bf16"):
        return "fp32", "this CPU has no units for bf16"
    if not budget_seconds:
        return "bf16", "this CPU has units for it"
    both = [devices.choose(recipe.train.changed(precision=name)) for name in ("fp32", "bf16")]
    trainers = [_built_trainer(recipe, config, device, None) for device in both]
    wide, narrow = map(median, _timed_steps(trainers, budget_seconds, PRECISION_STEPS))
    why = f"a step takes {wide:.3g} s in fp32 and {narrow:.3g} s in bf16"
    return "bf16" if wide > MIN_STEP_GAIN * narrow else "fp32", why


def warn_of_slow(precision: Precision, advice: str) -> None:
    """Warn where a CPU has no units for the chosen precision of 16 bits."""
    if precision.autocast is not None and not has_units(precision.name):
        warn(f"train.precision = {precision.name}: this CPU has no units for it, it is slower than fp32; {advice}")


def _built_trainer(recipe: ResolvedRecipe, config: ModelConfig, device: Device, recomputed: int | None) -> Trainer:
    return Trainer(recipe, build_model(config, recipe.run.seed), device, 0, 1, recomputed=recomputed)


def _rows_and_rounds(trainer: Trainer) -> tuple[int, float]:
    """Sequences that a trainer computes at a time, and how often it does so in a step."""
    train, length = trainer.settings, trainer.model.config.sequence_length
    device = trainer.device
    rows = train.micro_batch * concurrent_micro_batches(train, length, device.torch_device, device.compile)
    return rows, train.global_batch_tokens // length / rows


def _timed_steps(trainers: Sequence[Trainer], budget: float, max_steps: int) -> list[tuple[float, ...]]:
    """Return the seconds of each timed step of each model, after a warm-up.

    One micro-batch (or two, where they run together) and one update are timed and scaled to the whole step. Models take turns in
    changing order, so that other work on the machine slows all of them down.
    """
    device, (rows, rounds) = trainers[0].device, _rows_and_rounds(trainers[0])
    batch = trainers[0].task.made_up(np.random.default_rng(0), rows, trainers[0].model.config)
    started, turns = perf_counter(), list[list[float]]()
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
            seconds[number] = rounds * (between - began) + perf_counter() - between
        if is_warm:
            turns.append(seconds)
            if len(turns) >= max_steps or perf_counter() - started > budget:
                break
    return list(zip(*turns, strict=True))
