"""How long a step takes on this device: measured once, before a run, on the real model with made-up tokens."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np

from bessemer.model.config import ModelConfig
from bessemer.model.transformer import build_model
from bessemer.recipe import Recipe
from bessemer.train.accumulate import micro_batches_together
from bessemer.train.device import Device, synchronize
from bessemer.train.step import TrainStep

WARMUP_STEPS = 3
MAX_STEPS = 40


def step_seconds(
    recipe: Recipe, config: ModelConfig, device: Device, budget_seconds: float, recomputed: int | None = None
) -> float:
    """Seconds of a whole training step of a resolved recipe, measured for about `budget_seconds`; recomputed: blocks, as planned.

    A step is its micro-batches and one update; one micro-batch (or two, where they run together) and one update are timed
    (medians), so that a step of many micro-batches is known from a few.
    """
    batch_tokens, micro = recipe.train.global_batch_tokens, recipe.train.micro_batch
    assert batch_tokens is not None and micro is not None, "the recipe is resolved"
    step = TrainStep(recipe, build_model(config, recipe.run.seed), device, 0, 1, recomputed=recomputed)
    together = micro_batches_together(recipe, device.place, device.compile)
    batch = step.task.made_up(np.random.default_rng(0), micro * together, config)
    gradients: list[float] = []
    updates: list[float] = []
    started = perf_counter()
    for number in range(MAX_STEPS):
        began = perf_counter()
        norm = step.gradients(batch).grad_norm
        synchronize(device)
        between = perf_counter()
        step.update(0, norm)
        synchronize(device)
        if number >= WARMUP_STEPS:
            gradients.append(between - began)
            updates.append(perf_counter() - between)
        if gradients and perf_counter() - started > budget_seconds:
            break
    return median(gradients) * (batch_tokens // config.sequence_length // micro) / together + median(updates)
