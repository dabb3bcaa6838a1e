"""Planned step time and memory of a benchmark's training step, compared with the measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bessemer.model.config import ModelConfig
from bessemer.plan import local_plan
from bessemer.recipe import Recipe
from bessemer.report.data import RunData
from bessemer.report.planned import against_measured, rows
from bessemer.train.device import Device
from bessemer.train.recompute import base_bytes, blocks_recomputed, memory_of


def plan_of(recipe: Recipe, config: ModelConfig, device: Device) -> dict[str, Any]:
    """Return the planned step time and memory of a resolved recipe.

    Call it before the model is built: on a CPU the memory the process already holds is part of the plan.
    """
    train, layout = recipe.train, recipe.parallel
    recomputed = blocks_recomputed(train, layout, config, device)
    memory = memory_of(train, layout, config, device, recomputed, base_bytes(train, layout, device))
    peak = local_plan.peak_rate(device)
    return local_plan.make_plan(recipe, config, device=device.name, peak=peak, memory=memory, step_seconds=None)


def beside(plan: dict[str, Any], seconds: Sequence[float], peak_bytes: float | None) -> dict[str, Any]:
    """Return planned and measured step time and memory, with the error of the plan. `seconds` are those of the steps."""
    data = RunData("benchmark", plan=plan, peak_memory=peak_bytes)
    return against_measured(data, np.array(seconds, dtype=float))


def print_beside(name: str, told: dict[str, Any]) -> None:
    """Print the comparison of `beside` under a name."""
    basis = told.get("step_seconds", {}).get("from")
    print(f"{name}: planned against measured" + (f" (step: {basis})" if basis else ""))
    for row, text in rows(told).items():
        print(f"  {row:<7} {text}")
