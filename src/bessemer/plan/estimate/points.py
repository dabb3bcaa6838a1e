"""What a run measured of itself, read from its folder: the steady time of a step and the peak of memory, with their spread."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

from bessemer.errors import InputError
from bessemer.run import RunFolder, read_steps

START_SHARE, START_STEPS = 0.1, 3  # steps left out at the start: caches, the allocator and the kernel's choices settle
FEWEST = 3  # steps that a median is taken of
# Of a step's time carried from one model to another of the same machine: both timed here, or by their FLOPs alone, with the
# share of the peak taken to stay.
TIMED_ERROR, FLOPS_ERROR = 0.1, 0.3


@dataclass(frozen=True)
class MeasuredRun:
    """seconds: median of a steady step of the full batch; spread: interquartile range as a share of it; steps: that it is of;
    batch_tokens: of such a step; memory: peak bytes of the fullest process, None where it was not recorded; since: step of the
    resume after which the steps are; planned_memory: what that process planned when it began, all that it held then included."""

    seconds: float
    spread: float
    steps: int
    batch_tokens: int
    memory: float | None
    since: int = 0
    planned_memory: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.batch_tokens / self.seconds


def of_run(run: RunFolder) -> MeasuredRun:
    """What the metrics of a run say. Raises InputError for a folder without enough steps in it."""
    rows = read_steps(run.metrics)
    found = measured(rows)
    if found is None:
        there = f"{run.metrics} holds too few steps" if rows else f"{run.metrics} is not there"
        raise InputError(
            f"{run.path}: nothing to calibrate with: {there}; train {FEWEST + START_STEPS} steps or more first"
        )
    return found


def measured(rows: list[dict[str, Any]]) -> MeasuredRun | None:
    """The same from the lines of metrics.jsonl; None when there are too few steps.

    Steps of a batch that is still growing, and those at the start, are left out; so are those before the last resume, which
    another process took, perhaps of another size, where there are enough after it.
    """
    resumed = [number for number, row in enumerate(rows) if row.get("kind") == "resumed"]
    if resumed and (since := measured(rows[resumed[-1] + 1 :])) is not None:
        return replace(since, since=rows[resumed[-1]].get("step", 0))
    trained = (row for row in rows if row.get("kind") == "train")
    steps = [row for row in trained if _positive(row, "step_seconds") and _positive(row, "tokens_per_second")]
    if not steps:
        return None
    sizes = [round(row["step_seconds"] * row["tokens_per_second"]) for row in steps]
    full = max(sizes)
    seconds = [row["step_seconds"] for row, size in zip(steps, sizes, strict=True) if size >= 0.999 * full]
    skipped = min(max(START_STEPS, int(START_SHARE * len(seconds))), max(len(seconds) - FEWEST, 0))
    seconds = seconds[skipped:]
    if len(seconds) < FEWEST:
        return None
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    planned = [row["planned"] for row in rows if row.get("kind") == "memory" and _positive(row, "planned")]
    found = MeasuredRun(median(seconds), (high - low) / middle, len(seconds), full, peak_memory(rows))
    return replace(found, planned_memory=planned[-1]) if planned else found


def peak_memory(rows: Iterable[dict[str, Any]]) -> float | None:
    """Peak bytes of the fullest process since the last resume after which any were logged: earlier ones had another base."""
    memory = PeakMemory()
    for row in rows:
        memory.add(row)
    return memory.peak


class PeakMemory:
    """The same line by line."""

    def __init__(self) -> None:
        self.peak: float | None = None
        self._has_resumed = False

    def add(self, row: dict[str, Any]) -> None:
        """Count a line of metrics.jsonl."""
        kind = row.get("kind")
        self._has_resumed = self._has_resumed or kind == "resumed"
        name = {"train": "memory_bytes", "memory": "measured"}.get(kind or "", "")
        if _positive(row, name):
            self.peak = row[name] if self.peak is None or self._has_resumed else max(self.peak, row[name])
            self._has_resumed = False


def _positive(row: dict[str, Any], name: str) -> bool:
    value = row.get(name)
    return isinstance(value, int | float) and value > 0


def scaled_by_run(
    plan: dict[str, Any], batch_tokens: int, run_plan: dict[str, Any], run_batch_tokens: int, run: MeasuredRun
) -> dict[str, Any]:
    """A plan with the step's time times what a run took over its own plan.

    plan, run_plan: of the recipe in hand and of the run's, made the same way; batch_tokens, run_batch_tokens: of their steps.
    Where the step of one of them was not timed, the run's FLOP/s are carried over.
    """
    if all(one["step_seconds_from"].startswith("measured") for one in (plan, run_plan)):
        ratio, error = run.seconds / run_plan["step_seconds"], TIMED_ERROR
        basis = f"{plan['step_seconds_from']}, scaled by a run"
    else:
        flops = plan["flops_per_token"] * batch_tokens / (run_plan["flops_per_token"] * run_batch_tokens)
        ratio, error = run.seconds * flops / plan["step_seconds"], FLOPS_ERROR
        basis = "a run's FLOP/s"
    seconds, error = ratio * plan["step_seconds"], math.hypot(error, run.spread / 2)
    # A process that built the tokens before it trained held more from the start than one that plans.
    memory = None if run.memory is None else run.memory / (run.planned_memory or run_plan["memory_bytes"]["total"])
    return {
        **plan,
        "step_seconds": seconds, "seconds": plan["seconds"] * ratio, "tokens_per_second": plan["tokens_per_second"] / ratio,
        "mfu": plan["mfu"] / ratio, "step_seconds_from": basis,
        "step_interval": [seconds * (1 - error), seconds * (1 + error)],
        "calibrated_on": {"step_ratio": ratio, "spread": run.spread, "steps": run.steps, "memory_ratio": memory},
    }  # fmt: skip
