"""Values that sections of the report compute: wall time, the split over processes, the confusion matrix."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from bessemer.guard.goodput import TIME_KINDS
from bessemer.guard.incidents import STRAGGLER
from bessemer.report.data import Json, RunData, as_number, as_object, as_objects, as_text, number_or_0

MAX_CLASSES = 20  # a wider confusion matrix is left to evaluation.json
MAX_RANKS = 16
AXES = {
    "replicate": "copies of the model", "shard": "processes that share one copy's state",
    "tensor": "processes that share every matrix", "pipeline": "stages of blocks",
    "context": "processes that share every sequence",
}  # fmt: skip
WALL_TIME_INKS = {
    "productive": "good", "data_wait": "part-2", "validation": "part-3", "saving": "part-4",
    "start": "part-5", "recovery": "accent", "redone": "lost", "stalled": "rule", "stopped": "raw", "other": "reference",
}  # fmt: skip


def wall_time(data: RunData) -> list[tuple[str, str, float]]:
    """Divide the wall time of the training: ink, name and seconds of each kind."""
    total = number_or_0(data.times, "total")
    found = [(WALL_TIME_INKS[kind], name, number_or_0(data.times, kind)) for kind, name in TIME_KINDS.items()]
    return [one for one in found if one[2] >= 0.0005 * total]


def processes(data: RunData) -> Json:
    """Describe how a run of several processes was split, and the mean seconds of each rank's matmul; {}: one process."""
    layout = as_object(data.recipe, "parallel")
    sizes = {axis: max(int(number_or_0(layout, axis)), 1) for axis in AXES}
    world = prod(sizes.values())
    if world == 1:
        return {}
    more: list[tuple[str, Any, str]] = []
    if sizes["shard"] * sizes["context"] > 1:
        more.append(("zero", int(as_number(layout, "zero") or 3), "what shard divides"))
    if sizes["pipeline"] > 1:
        more.append(("schedule", as_text(layout, "schedule") or "1f1b", "of the micro-batches"))
    means = {rank: float(np.nanmean(values)) for rank, values in data.ranks.groups.get("matmul_seconds", {}).items()}
    return {
        "world": world, "axes": [(axis, size, AXES[axis]) for axis, size in sizes.items() if size > 1], "more": more,
        "ranks": sorted(means.items(), key=lambda item: -item[1])[:MAX_RANKS],  # the slowest first
        "stragglers": [as_text(one, "cause") for one in data.incidents if one.get("what") == STRAGGLER.name],
    }  # fmt: skip


def visible(value: Any) -> str:
    """The text of a token; of white space alone, as signs a reader can see."""
    word = as_text(value)
    return word if word.strip() else word.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")


def confusion(data: RunData) -> list[tuple[str, list[float]]]:
    """Each class and what its texts were taken for; empty where there are too many classes, or the matrix is damaged."""
    names = [as_text(row, "label") for row in as_objects(data.evaluation, "classes")]
    rows = data.evaluation.get("confusion")
    if not isinstance(rows, list) or not len(rows) == len(names) <= MAX_CLASSES:
        return []
    if not all(isinstance(row, list) and len(row) == len(names) for row in rows):
        return []
    return [(name, [number_or_0(value) for value in row]) for name, row in zip(names, rows, strict=True)]


def document_names(value: Any) -> list[str]:
    """Document names of an incident, whether they are listed plainly or by the sequence that held them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return document_names(value.get("documents"))
    names = (name for item in value for name in document_names(item)) if isinstance(value, list) else ()
    return list(dict.fromkeys(names))
