"""The plan of a run compared with what its log says: steady steps of the full batch, the peak of memory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bessemer.report import planned
from bessemer.report.data import read
from bessemer.run.directory import RunDirectory

PLAN = {"step_seconds": 1.1, "memory_bytes": {"total": 90}, "step_seconds_from": "a guess"}


def step(number: int, seconds: float, tokens: int = 1000, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": number, "step_seconds": seconds, "tokens_per_second": tokens / seconds, **more}


def compared(folder: Path, rows: Sequence[dict[str, Any]], plan: dict[str, Any] = PLAN) -> dict[str, Any]:
    """Write plan.json and metrics.jsonl, and compare them."""
    run = RunDirectory(folder)
    run.plan.write_text(json.dumps(plan))
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return planned.compare(read(run))


def test_the_median_leaves_out_the_start_and_single_slow_steps(tmp_path: Path) -> None:
    rows = [step(1, 9.0), step(2, 3.0), step(3, 2.0), *(step(n, 1.0) for n in range(4, 30)), step(30, 50.0)]
    found = compared(tmp_path, rows)
    assert (found["step_seconds"]["measured"], found["step_seconds"]["spread"]) == (1.0, 0.0)
    assert found["steps"] == 27 and "memory_bytes" not in found
    assert compared(tmp_path, rows[:2]) == {}


def test_a_batch_that_grows_counts_when_it_is_full(tmp_path: Path) -> None:
    rows = [*(step(n, 0.1, 100) for n in range(50)), *(step(n, 1.0) for n in range(50, 60))]
    assert compared(tmp_path, rows)["step_seconds"]["measured"] == 1.0


def test_the_spread_is_of_the_middle_half(tmp_path: Path) -> None:
    seconds = [1.0, 1.0, 1.0, *(0.8 + 0.1 * number for number in range(5))]
    found = compared(tmp_path, [step(number, value) for number, value in enumerate(seconds, 1)])["step_seconds"]
    assert (found["measured"], found["spread"]) == (pytest.approx(1.0), pytest.approx(0.2))


def test_memory_is_the_most_that_any_line_says(tmp_path: Path) -> None:
    rows = [step(n, 1.0, memory_bytes=100 + n) for n in range(1, 10)]
    last = {"kind": "memory", "step": 9, "measured": 150, "planned": 120}
    assert compared(tmp_path, rows)["memory_bytes"] == {
        "planned": 90,
        "measured": 109,
        "error": 90 / 109 - 1,
        "since": 0,
    }
    found = compared(tmp_path, [*rows, last])["memory_bytes"]
    assert (found["planned"], found["measured"]) == (120, 150), "what the training process itself held"


def test_after_a_resume_only_what_came_since_counts(tmp_path: Path) -> None:
    old = [step(n, 9.0, memory_bytes=500) for n in range(1, 10)] + [{"kind": "memory", "step": 9, "measured": 600}]
    new = [step(n, 1.0, memory_bytes=300) for n in range(10, 16)] + [{"kind": "memory", "step": 15, "measured": 400}]
    plan = {"step_seconds": 1.0, "memory_bytes": {"total": 90}}
    found = compared(tmp_path, [*old, {"kind": "resumed", "step": 9}, *new[:6]], plan)
    assert (found["step_seconds"]["measured"], found["since"]) == (1.0, 9)
    too_few = compared(tmp_path, [*old, {"kind": "resumed", "step": 9}, *new[:2]], plan)
    assert (too_few["step_seconds"]["measured"], too_few["since"]) == (9.0, 0)
    run = RunDirectory(tmp_path)
    assert read(run).peak_memory == 300, "of the last process"
    run.metrics.write_text(run.metrics.read_text() + json.dumps(new[-1]) + "\n")
    assert read(run).peak_memory == 400


def test_plan_and_measurement_side_by_side(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    rows = [step(n, 1.0, memory_bytes=100) for n in range(1, 9)]
    found = compared(tmp_path, rows)
    planned.write(run, read(run))
    assert found == json.loads((tmp_path / "planned_against_measured.json").read_text())
    assert found["step_seconds"]["error"] == pytest.approx(0.1)
    assert found["memory_bytes"]["error"] == pytest.approx(-0.1)
    time = {"kind": "time", "step": 8, "resumed_at": 6, "seconds": 4.0, "validation": 1.5, "saving": 0.5}
    of_more_steps = compared(tmp_path, [*rows, time], {"seconds": 12.0, "steps": 16})
    assert of_more_steps["seconds"]["planned"] == 1.5 and planned.rows(of_more_steps)
    run.plan.write_text("{")
    assert planned.compare(read(run)) == {}


def test_nothing_is_written_before_there_are_steps(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert compared(tmp_path, []) == {}
    planned.write(run, read(run))
    assert not (tmp_path / "planned_against_measured.json").exists()
