"""What a run measured of itself: steady steps of the full batch, the peak of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bessemer.plan.measured_run import measured
from bessemer.report import planned
from bessemer.report.data import read
from bessemer.run.directory import RunDirectory


def step(number: int, seconds: float, tokens: int = 1000, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": number, "step_seconds": seconds, "tokens_per_second": tokens / seconds, **more}


def test_the_median_forgets_the_start_and_the_neighbours() -> None:
    rows = [step(1, 9.0), step(2, 3.0), step(3, 2.0), *(step(n, 1.0) for n in range(4, 30)), step(30, 50.0)]
    found = measured(rows)
    assert found is not None and (found.seconds, found.spread, found.batch_tokens) == (1.0, 0.0, 1000)
    assert found.steps == 27 and found.memory is None


def test_a_batch_that_grows_counts_when_it_is_full() -> None:
    found = measured([*(step(n, 0.1, 100) for n in range(50)), *(step(n, 1.0) for n in range(50, 60))])
    assert found is not None and found.seconds == 1.0 and found.batch_tokens == 1000


def test_the_spread_is_of_the_middle_half() -> None:
    found = measured([step(n, 1.0) for n in range(3)] + [step(n, 0.8 + 0.1 * n) for n in range(5)])
    assert found is not None and found.seconds == pytest.approx(1.0) and found.spread == pytest.approx(0.2)


def test_memory_is_the_most_that_any_line_says() -> None:
    rows = [step(n, 1.0, memory_bytes=100 + n) for n in range(9)] + [{"kind": "memory", "step": 9, "measured": 150}]
    found = measured(rows)
    assert found is not None and found.memory == 150


def test_after_a_resume_only_what_came_since_counts() -> None:
    old = [step(n, 9.0, memory_bytes=500) for n in range(9)] + [{"kind": "memory", "step": 9, "measured": 600}]
    new = [step(n, 1.0, memory_bytes=300) for n in range(9, 15)] + [{"kind": "memory", "step": 15, "measured": 400}]
    found = measured([*old, {"kind": "resumed", "step": 9}, *new])
    assert found is not None and (found.seconds, found.memory) == (1.0, 400)
    too_few = measured([*old, {"kind": "resumed", "step": 9}, *new[:2]])
    assert too_few is not None and too_few.memory == 300, "of the last process, as in the report"
    assert (found.since, too_few.since) == (9, 0)


def test_plan_and_measurement_side_by_side(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.plan.write_text(
        json.dumps({"step_seconds": 1.1, "memory_bytes": {"total": 90}, "step_seconds_from": "a guess"})
    )
    assert planned.write(run) == {}
    run.metrics.write_text("".join(json.dumps(step(n, 1.0, memory_bytes=100)) + "\n" for n in range(8)))
    told = planned.write(run)
    assert told == json.loads((tmp_path / "planned_against_measured.json").read_text())
    assert told["step_seconds"]["error"] == pytest.approx(0.1)
    assert told["memory_bytes"]["error"] == pytest.approx(-0.1)
    time = {"kind": "time", "step": 8, "resumed_at": 6, "seconds": 4.0, "validation": 1.5, "saving": 0.5}
    run.metrics.write_text(run.metrics.read_text() + json.dumps(time) + "\n")
    run.plan.write_text(json.dumps({"seconds": 12.0, "steps": 16}))
    of_more_steps = planned.compare(run, read(run))
    assert of_more_steps["seconds"]["planned"] == 1.5 and planned.rows(of_more_steps)
    run.plan.write_text("{")
    assert planned.compare(run, read(run)) == {}
