"""Regret, failures by planned memory, and scores of whole runs, on cases whose answers are known."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bessemer.model.config import ModelConfig
from bessemer.plan import devices
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import ClusterSpec, Job, Layout
from bessemer.plan.estimate.memory import memory
from bessemer.plan.estimate.step import step

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(
    vocabulary=32_000, layers=16, width=2048, heads=16, kv_heads=16, head_dim=128, mlp_width=8192, sequence_length=4096
)  # fmt: skip
SPLITS = ((8, 1, 1), (4, 2, 1), (2, 2, 2))  # shard, tensor, pipeline


@pytest.fixture(scope="module")
def benchmarks() -> dict[str, ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import planner_accuracy
        import planner_layouts
        import planner_memory
        import planner_runs
        import planner_sets
        import planner_sweep
    finally:
        sys.path.pop(0)
    return {
        "accuracy": planner_accuracy, "layouts": planner_layouts, "memory": planner_memory, "runs": planner_runs,
        "sets": planner_sets, "sweep": planner_sweep,
    }  # fmt: skip


def cases(benchmarks: dict[str, ModuleType], seconds: list[float | None], memory_gb: float = 80.0) -> list[Any]:
    """A group of three layouts on a node that took so many times what is planned; None: failed."""
    device = replace(devices.find("H100"), memory=memory_gb * 1e9)
    found = []
    for (shard, tensor, pipeline), factor in zip(SPLITS, seconds, strict=True):
        layout = Layout(shard=shard, tensor=tensor, pipeline=pipeline)
        job = Job(MODEL, layout, ClusterSpec.of(device, 8), 64, "bf16", frameworks.find("nanotron"))
        raw = {"nodes": 1, "status": "crashed_or_oom" if factor is None else "ok"}
        taken = None if factor is None else step(job).seconds * factor
        found.append(
            benchmarks["sets"].Case(f"dp{shard}-tp{tensor}-pp{pipeline}", "nanotron 3.57B", job, taken, None, raw)
        )
    return found


def test_the_regret_is_what_the_choice_takes_over_the_best(benchmarks: dict[str, ModuleType]) -> None:
    group = cases(benchmarks, [1.0, 1.0, 1.0])
    (row,) = benchmarks["layouts"].regrets(group)
    planned = {case.name: step(case.job).seconds for case in group}
    assert row.chosen == "dp8-tp1-pp1" and not row.failed and not row.fitted and row.layouts == 3
    assert row.regret == pytest.approx(1 - min(planned.values()) / planned[row.chosen]) == row.sound
    (slow,) = benchmarks["layouts"].regrets(cases(benchmarks, [10.0, 1.0, 1.0]))
    assert slow.chosen == row.chosen and slow.regret > 0.8
    assert slow.sound is not None and slow.sound < 0.2, (
        "a run of less than half the best rate is none of the undisturbed"
    )


def test_a_choice_that_failed_is_counted(benchmarks: dict[str, ModuleType]) -> None:
    (row,) = benchmarks["layouts"].regrets(cases(benchmarks, [None, 1.0, 1.0]))
    assert row.failed and row.regret is None and row.sound == 0
    assert benchmarks["layouts"].regrets(cases(benchmarks, [None, None, None])) == []
    assert benchmarks["layouts"].regrets(cases(benchmarks, [1.0, 1.0, 1.0], memory_gb=1.0)) == []


def test_failures_are_counted_by_planned_memory(benchmarks: dict[str, ModuleType]) -> None:
    group = cases(benchmarks, [1.0, None, 1.0])
    tight = cases(benchmarks, [None, None, None], memory_gb=max(memory(case.job).total for case in group) / 1e9 / 1.5)
    rows = benchmarks["layouts"].failures([*group, *tight])
    assert sum(row["runs"] for row in rows) == 6 and sum(row["failed"] for row in rows) == 4
    assert max(rows, key=lambda row: row["from"])["expected"] > 0.9


SHAPE = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 32, "ffn": 8192, "tied": True}
ROW = {
    "arch": SHAPE, "model_b": 3.57, "nodes": 1, "gpus": 8, "dp": 4, "tp": 2, "pp": 1, "mbs": 1, "gbs": 256, "zero": 1,
    "tok_s_gpu": 1000.0, "mem_gb": 20.0, "status": "ok",
}  # fmt: skip
DEEP = ROW | {"dp": 1, "pp": 4}
FAILED = {"tok_s_gpu": None, "mem_gb": None, "status": "crashed_or_oom"}
SWEEP_ROWS = [
    ROW,
    ROW | {"tok_s_gpu": 900.0},
    ROW | FAILED,
    DEEP,
    DEEP | {"mbs": 2},
    DEEP | {"mbs": 4} | FAILED,
    ROW | {"mbs": 4},
]


def sweep_table(**changed: Any) -> dict[str, Any]:
    """Of SWEEP_ROWS: one run of three of a layout, one run before the fix and one failure before it, one of another model."""
    early = {"3.57B, 1 nodes": "2-1-1-1@900 2-4-2-1 2-4-4-1"}
    return {
        "rows": 7,
        "version": [
            {"gathered": [1.0, 0.9], "fixed": False, "layouts": early},
            {"gathered": [0.0, 0.5], "fixed": True},
        ],
        "left_out": [{"why": "another model", "layouts": {"3.57B, 1 nodes": "2-1-4-1"}}],
        **changed,
    }


def test_what_is_left_out_has_no_part_in_scores_but_its_memory(benchmarks: dict[str, ModuleType]) -> None:
    cases = list(benchmarks["sets"].layouts_h100(benchmarks["sweep"].marked(SWEEP_ROWS, sweep_table())))
    (times,) = benchmarks["accuracy"].time_errors(cases, draws=0)
    assert times.n == 3, "two runs of the shallow layout and the deep one after the fix"
    (choice,) = benchmarks["layouts"].regrets(cases)
    assert choice.layouts == 3 and "mbs2" not in choice.chosen
    assert sum(row["runs"] for row in benchmarks["layouts"].failures(cases)) == 6
    peaks = list(benchmarks["memory"].peaks(cases))
    assert len(peaks) == 4 and len({row.planned for row in peaks}) == 4, "each with what its version kept"
    assert benchmarks["memory"].verdicts(cases)["nanotron"]["ran"] == 4
    every = benchmarks["accuracy"].with_rows_left_out(cases)
    assert every["left_out"] == {benchmarks["sweep"].BEFORE_FIX: 1, "another model": 1}
    assert every["rows"] == 7 and every["memory"]["n"] == 5 and every["time"][0]["n"] == 5


def test_halves_share_no_run_and_scores_are_of_one(benchmarks: dict[str, ModuleType]) -> None:
    runs = benchmarks["runs"]
    some = [runs.PublishedRun(name, 1e9, 1e10, 1.0, "H100 SXM", 8, {}) for name in "abcde"]
    assert runs.half(some, 0) == set("ace") and runs.half(some, 1) == set("bd")
    row = {"half": "scored", "hours": 100.0, "ideal": 50.0, "low": 80.0, "high": 160.0}
    rows = [
        {**row, "expected": 110.0},
        {**row, "expected": 130.0, "high": 90.0},
        {**row, "half": "fitted", "expected": 1.0},
    ]
    found = runs.score(rows, "scored")
    assert found["n"] == 2 and found["median_absolute"] == pytest.approx(0.2) == found["mean_absolute"]
    assert (
        found["ideal_bias"] == pytest.approx(-0.5)
        and found["inside"] == 0.5
        and found["bias"] == pytest.approx(0.196, abs=0.001)
    )
    assert runs.PublishedRun("Llama3.1-8B", 1e9, 1e10, 1.0, "H100 SXM", 8, {}).source == "Llama3"
