"""Timing of training steps of a recipe's model on this device, with random tokens, before its run starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from time import perf_counter

import numpy as np

from bessemer.model.config import ModelConfig
from bessemer.model.transformer import build_model
from bessemer.recipe import ResolvedRecipe
from bessemer.train import device as devices
from bessemer.train.device import Device, synchronize
from bessemer.train.engine import concurrent_micro_batches
from bessemer.train.trainer import Trainer

WARMUP_STEPS, TIMED_STEPS = 3, 20
UNSEEN_BYTES = 50_000_000  # how far a peak that was just reset may be above the resident memory
Typical = Callable[[Iterable[float]], float]  # reduces repeated measurements to one number


def step_seconds(
    recipe: ResolvedRecipe, config: ModelConfig, device: Device, budget_seconds: float, recomputed: int | None = None,
    typical: Typical = median, shows_peak: bool = False,
) -> float:  # fmt: skip
    """Return the seconds of a training step of a resolved recipe.

    Args:
        recipe: The resolved recipe.
        config: Its model.
        device: The device.
        budget_seconds: The time after which no further step is timed; at most TIMED_STEPS are.
        recomputed: The number of blocks to recompute, as planned; None lets the trainer choose.
        typical: A function such as `median` that reduces the seconds of the timed steps to one number.
        shows_peak: Run two successive forward and backward passes at the end, so that the memory peaks as in a whole step.
    """
    trainer = _build_trainer(recipe, config, device, recomputed)
    seconds = typical(_time_steps(trainer, budget_seconds))
    rows, rounds = _rows_and_rounds(trainer)
    if shows_peak and rounds > 1:  # gradients of the first round are held during the second; more rounds need no more
        trainer.forward_backward(trainer.task.synthetic_batch(np.random.default_rng(0), 2 * rows, config))
    return seconds


def measure_step(
    recipe: ResolvedRecipe, config: ModelConfig, device: Device, budget_seconds: float, recomputed: int
) -> tuple[float, int | None]:
    """Return the seconds of a training step, and the bytes that it needs in addition to what this process holds.

    The bytes are from the peak of resident memory on a CPU. They are None on a GPU, or if the system records no peak. The
    arguments are those of `step_seconds`.
    """
    devices.release_unused(device)
    devices.reset_peak_resident()
    before = devices.resident_bytes()
    can_measure = not device.is_cuda and devices.peak_resident_bytes() - before < UNSEEN_BYTES
    seconds = step_seconds(recipe, config, device, budget_seconds, recomputed, median, can_measure)
    return seconds, devices.peak_resident_bytes() - before if can_measure else None


def _build_trainer(recipe: ResolvedRecipe, config: ModelConfig, device: Device, recomputed: int | None) -> Trainer:
    return Trainer(recipe, build_model(config, recipe.run.seed), device, 0, 1, recomputed=recomputed)


def _rows_and_rounds(trainer: Trainer) -> tuple[int, float]:
    """Return how many sequences a trainer computes at a time, and how many such rounds a step has."""
    train, length = trainer.settings, trainer.model.config.sequence_length
    device = trainer.device
    rows = train.micro_batch * concurrent_micro_batches(train, length, device.torch_device, device.compile)
    return rows, train.global_batch_tokens // length / rows


def _time_steps(trainer: Trainer, budget: float) -> list[float]:
    """Return the seconds of each timed step, after a warm-up.

    One micro-batch (or two, if they run together) and one update are timed and scaled to the whole step. The first step may
    compile kernels, so its time does not count against the budget.
    """
    device, (rows, rounds) = trainer.device, _rows_and_rounds(trainer)
    batch = trainer.task.synthetic_batch(np.random.default_rng(0), rows, trainer.model.config)
    ends, seconds = list[float](), list[float]()
    while len(seconds) < WARMUP_STEPS + TIMED_STEPS and (len(ends) < 2 or ends[-1] - ends[0] <= budget):
        began = perf_counter()
        norm = trainer.forward_backward(batch).grad_norm
        synchronize(device)
        between = perf_counter()
        trainer.update(0, norm)
        synchronize(device)
        ends.append(perf_counter())
        seconds.append(rounds * (between - began) + ends[-1] - between)
    return seconds[min(WARMUP_STEPS, len(seconds) // 2) :]
