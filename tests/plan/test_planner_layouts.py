"""Regret, failures by planned memory, and scores of whole runs, on cases whose answers are known."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bessemer.layout import devices
from bessemer.model.config import ModelConfig
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
        import planner_layouts
        import planner_runs
        import planner_sets
    finally:
        sys.path.pop(0)
    return {"layouts": planner_layouts, "runs": planner_runs, "sets": planner_sets}


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


def test_what_a_file_says_more_of_the_sweeps_rows(benchmarks: dict[str, ModuleType]) -> None:
    arch = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 32, "ffn": 8192, "tied": True}
    row = {
        "arch": arch, "model_b": 1.34, "nodes": 1, "gpus": 8, "dp": 4, "tp": 2, "pp": 1, "mbs": 1, "gbs": 256, "zero": 1,
        "tok_s_gpu": 1000.0, "mem_gb": 20.0, "status": "ok",
    }  # fmt: skip
    read = benchmarks["sets"].layouts_h100
    plain, kept, none = read(
        [row, row | {"gathered": 1.0}, row | {"gathered": 0.0}, row | {"left_out": "another model"}]
    )
    sizes = [memory(case.job).total for case in (none, plain, kept)]
    assert sizes == sorted(set(sizes)) and plain.job.framework == frameworks.find("nanotron")


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
