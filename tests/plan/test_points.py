"""What a run measured of itself: steady steps of the full batch, the peak of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bessemer.errors import InputError
from bessemer.plan.estimate.points import MeasuredRun, measured, of_run, scaled_by_run
from bessemer.report import planned
from bessemer.run import RunFolder


def step(number: int, seconds: float, tokens: int = 1000, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": number, "step_seconds": seconds, "tokens_per_second": tokens / seconds, **more}


def test_the_median_forgets_the_start_and_the_neighbours() -> None:
    rows = [step(1, 9.0), step(2, 3.0), step(3, 2.0), *(step(n, 1.0) for n in range(4, 30)), step(30, 50.0)]
    found = measured(rows)
    assert found is not None and (found.seconds, found.spread, found.batch_tokens) == (1.0, 0.0, 1000)
    assert found.steps == 27 and found.memory is None and found.tokens_per_second == 1000


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


def test_too_few_steps_are_said(tmp_path: Path) -> None:
    assert measured([step(1, 1.0), step(2, 1.0)]) is None and measured([]) is None
    assert measured([step(1, 1.0), {"kind": "train", "step_seconds": None}, step(3, 1.0), step(4, 1.0)]) is not None
    run = RunFolder(tmp_path)
    with pytest.raises(InputError, match="not there"):
        of_run(run)
    run.metrics.write_text(json.dumps(step(1, 1.0)) + "\n")
    with pytest.raises(InputError, match="too few steps"):
        of_run(run)


def test_plan_and_measurement_side_by_side(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert planned.write(run) is None
    run.plan.write_text(
        json.dumps({"step_seconds": 1.1, "memory_bytes": {"total": 90}, "step_seconds_from": "a guess"})
    )
    assert planned.write(run) is None
    run.metrics.write_text("".join(json.dumps(step(n, 1.0, memory_bytes=100)) + "\n" for n in range(8)))
    told = planned.write(run)
    assert told == json.loads((tmp_path / planned.FILE).read_text())
    assert told is not None and told["step_seconds"]["error"] == pytest.approx(0.1)
    assert told["memory_bytes"]["error"] == pytest.approx(-0.1)
    time = {"kind": "time", "step": 8, "resumed_at": 6, "seconds": 4.0, "validation": 1.5, "saving": 0.5}
    run.metrics.write_text(run.metrics.read_text() + json.dumps(time) + "\n")
    run.plan.write_text(json.dumps({"seconds": 12.0, "steps": 16}))
    of_more_steps = planned.of_run(run)
    assert of_more_steps is not None and of_more_steps["seconds"]["planned"] == 1.5 and planned.lines(of_more_steps)
    run.plan.write_text("{")
    assert planned.of_run(run) is None


def plan_of(seconds: float, flops: float, basis: str = "measured on this machine") -> dict[str, Any]:
    return {
        "step_seconds": seconds, "step_seconds_from": basis, "flops_per_token": flops, "seconds": 100 * seconds,
        "tokens_per_second": 1000 / seconds, "mfu": 0.4, "memory_bytes": {"total": 50},
    }  # fmt: skip


def test_a_run_scales_another_plan_by_its_own_error() -> None:
    found = MeasuredRun(1.2, 0.1, 20, 1000, 55.0)
    scaled = scaled_by_run(plan_of(10.0, 5e9), 2000, plan_of(1.0, 1e9), 1000, found)
    assert scaled["step_seconds"] == pytest.approx(12.0) and scaled["seconds"] == pytest.approx(1200.0)
    low, high = scaled["step_interval"]
    assert high - 12.0 == pytest.approx(12.0 - low) and (high - 12.0) / 12.0 == pytest.approx((0.1**2 + 0.05**2) ** 0.5)
    assert scaled["calibrated_on"] == {
        "step_ratio": pytest.approx(1.2),
        "spread": 0.1,
        "steps": 20,
        "memory_ratio": pytest.approx(1.1),
    }


def test_memory_is_compared_with_what_the_run_planned() -> None:
    """A run that built its tokens first held 300 bytes more than a process that plans it anew."""
    rows: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "step_seconds": 1.0, "tokens_per_second": 1000, "memory_bytes": 340}
        for step in range(1, 9)
    ]
    rows.append({"kind": "memory", "step": 8, "planned": 350, "measured": 343})
    found = measured(rows)
    assert found is not None and found.memory == 343
    scaled = scaled_by_run(plan_of(10.0, 5e9), 2000, plan_of(1.0, 1e9), 1000, found)
    assert scaled["calibrated_on"]["memory_ratio"] == pytest.approx(343 / 350)


def test_a_step_that_was_not_timed_goes_with_the_flops() -> None:
    found = MeasuredRun(1.2, 0.0, 20, 1000, None)
    scaled = scaled_by_run(plan_of(99.0, 5e9, "40% of the peak"), 2000, plan_of(1.0, 1e9), 1000, found)
    assert scaled["step_seconds"] == pytest.approx(1.2 * 10) and scaled["mfu"] == pytest.approx(0.4 * 99 / 12)
    assert scaled["step_interval"][1] > 1.2 * scaled["step_seconds"] and scaled["calibrated_on"]["memory_ratio"] is None
