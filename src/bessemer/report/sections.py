"""Values of report sections: parallel layout, times of ranks, confusion matrix and document names."""

from __future__ import annotations

from typing import Any

import numpy as np

from bessemer.guard.goodput import TIME_KINDS as TIME_KINDS
from bessemer.guard.incidents import STRAGGLER as STRAGGLER
from bessemer.recipe.parallel import AXES
from bessemer.report.data import RunData, as_object, as_objects, as_text, number_or_0

MAX_CLASSES = 20  # a larger confusion matrix is only in evaluation.json
MAX_RANKS = 16


def layout_sizes(data: RunData) -> dict[str, int]:
    """Return the size of each parallel axis larger than 1."""
    layout = as_object(data.recipe, "parallel")
    return {axis: size for axis in AXES if (size := int(number_or_0(layout, axis))) > 1}


def rank_seconds(data: RunData) -> list[tuple[str, float]]:
    """Return the mean seconds of each rank's matmul test, slowest first."""
    means = {rank: float(np.nanmean(values)) for rank, values in data.ranks.groups.get("matmul_seconds", {}).items()}
    return sorted(means.items(), key=lambda item: -item[1])[:MAX_RANKS]


def confusion(data: RunData) -> list[tuple[str, list[float]]]:
    """Return (true class, counts by predicted class) of a classifier; empty for too many classes or a damaged matrix."""
    names = [as_text(row, "label") for row in as_objects(data.evaluation, "classes")]
    rows = data.evaluation.get("confusion")
    if not isinstance(rows, list) or not len(rows) == len(names) <= MAX_CLASSES:
        return []
    if not all(isinstance(row, list) and len(row) == len(names) for row in rows):
        return []
    return [(name, [number_or_0(value) for value in row]) for name, row in zip(names, rows, strict=True)]


def document_names(value: Any) -> list[str]:
    """Return the distinct document names in an incident's field.

    The field is a name, a list of names, or a dict or list of dicts with the names under `documents`.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return document_names(value.get("documents"))
    names = (name for item in value for name in document_names(item)) if isinstance(value, list) else ()
    return list(dict.fromkeys(names))
