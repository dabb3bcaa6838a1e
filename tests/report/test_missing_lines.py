"""Steps without a line in metrics.jsonl are found, at any interval of logging."""

from __future__ import annotations

import pytest

from bessemer.report.data import missing_lines, trained_steps


@pytest.mark.parametrize(
    ("logged", "step", "says"),
    [
        (range(1, 51), 50, ""),
        (range(1, 51), 60, "the lines of steps 51 to 60 are missing"),
        ([*range(1, 20), *range(21, 51)], 50, "the lines of step 20 are missing"),
        ([*range(1, 10), *range(20, 30), *range(40, 51)], 50, "steps 10 to 19 are missing, and 1 other gap"),
        (range(10, 101, 10), 105, ""),
        ([10, 20, 30, 50, 60, 70], 70, "the lines of steps 31 to 49 are missing"),
        ([*range(1, 20), *range(20, 101, 10)], 100, ""),  # another interval from step 20 on
        ([], 0, ""),
    ],
)
def test_gaps(logged: list[int], step: int, says: str) -> None:
    rows = [{"kind": "train", "step": number} for number in logged] + [{"kind": "validation", "step": 3}]
    found = missing_lines(trained_steps(rows), step)
    assert (says in found) and bool(says) == bool(found)
