"""Steady step time and peak memory that a run measured, from the lines of its metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

START_SHARE, START_STEPS = 0.1, 3  # steps left out at the start: caches, the allocator and the kernel's choices settle
FEWEST = 3  # steps that a median is taken of


@dataclass(frozen=True)
class MeasuredRun:
    """seconds: median of a steady step of the full batch; spread: interquartile range as a share of it; steps: that it is of;
    batch_tokens: of such a step; memory: peak bytes of the fullest process, None where it was not recorded; since: step of the
    resume after which the steps are."""

    seconds: float
    spread: float
    steps: int
    batch_tokens: int
    memory: float | None
    since: int = 0


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
    memory = PeakMemory()
    for row in rows:
        memory.add(row)
    return MeasuredRun(median(seconds), (high - low) / middle, len(seconds), full, memory.peak)


class PeakMemory:
    """Peak bytes of the fullest process, line by line of metrics.jsonl, since the last resume after which any were logged:
    earlier processes had another base."""

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
