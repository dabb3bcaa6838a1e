"""Programs of benchmarks/ on cases with known answers: errors, residuals, regret, failures, calibration."""

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest

from bessemer.model.config import ModelConfig
from bessemer.plan import devices
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import PHYSICS, ClusterSpec, Job, Layout
from bessemer.plan.estimate.memory import memory
from bessemer.plan.estimate.step import step
from tests.benchmark_files import program
from tests.plan.plans import job_of

planner_cases, planner_residuals = program("planner_cases"), program("planner_residuals")
STEP = {
    "case": "one", "model": {"layers": 8, "width": 1024, "heads": 8, "kv_heads": 8, "head_dim": 128, "mlp_width": 4096,
    "vocabulary": 32_000}, "sequence": 2048, "device": "H100 SXM", "devices": 8, "framework": "megatron-core",
    "precision": "bf16", "batch": 64, "layout": {"shard": 8, "micro_batch": 2}, "seconds": 1.0, "memory_bytes": 1e10,
}  # fmt: skip
RUN = {"run": "small", "params": 1e9, "tokens": 2e10, "device": "H100", "devices": 8, "hours": 100.0}


def write(folder: Path, **changes: Any) -> Path:
    file = {"set": "mine", "steps": [{**STEP, **changes}], "runs": [RUN]}
    (folder / "mine.json").write_text(json.dumps(file), encoding="utf-8")
    return folder


def test_every_figure_is_compared_with_the_programs_prediction(tmp_path: Path) -> None:
    found = planner_cases.read(write(tmp_path))
    rows = {row[0]: row for row in planner_cases.compared(found)}
    assert set(rows) == {"step", "memory", "run"} and found.steps[0].set == "mine"
    for _, _, _, low, expected, high in rows.values():
        assert low < expected < high
    _, _, measured, low, _, high = rows["step"]
    for seconds, inside in ((low * 1.01, "100%"), (high * 1.01, "0%")):
        assert (
            f"{inside} inside"
            in planner_cases.show(planner_cases.read(write(tmp_path, seconds=seconds))).splitlines()[0]
        )
    assert measured == 1.0 and "run: 1 cases" in planner_cases.show(found)


def test_a_step_that_took_twice_the_time_has_half_the_ratio(tmp_path: Path) -> None:
    once, twice = (
        next(
            row
            for row in planner_cases.compared(planner_cases.read(write(tmp_path, seconds=seconds)))
            if row[0] == "step"
        )
        for seconds in (1.0, 2.0)
    )
    assert once[4] == twice[4] and once[4] / once[2] == pytest.approx(2 * twice[4] / twice[2])


def test_sources_have_equal_weight_and_a_left_out_source_does_not_shape_its_interval() -> None:
    def of(source: str, *values: float) -> list[Any]:
        return [planner_residuals.Residual(source, f"{source}{number}", value) for number, value in enumerate(values)]

    small, large = of("small", log(2.0)), of("large", *[0.0] * 99)
    assert planner_residuals.quantile(small + large, 0.4) == 0 and planner_residuals.quantile(
        small + large, 0.6
    ) == log(2)
    assert planner_residuals.coverage(small + large, 0.1) == {"large": 0.0, "small": 0.0}
    even = [one for name in "abcde" for one in of(name, *(number / 100 for number in range(-50, 51)))]
    assert planner_residuals.coverage(even, 0.1) == {name: pytest.approx(0.8, abs=0.02) for name in "abcde"}
    row = planner_residuals.pooled(even)
    assert row["tail"] == 0.1 and row["low"] == pytest.approx(-0.4, abs=0.02)
    assert row["middle"] == pytest.approx(0, abs=0.02) and row["high"] == pytest.approx(0.4, abs=0.02)
    # The spread of one source is three times that of the others: their tails cover a third of it, so the widest tails are chosen.
    wide = [one for one in even if one.source != "e"]
    wide += of("e", *(3 * number / 100 for number in range(-50, 51) for _ in range(8)))
    row = planner_residuals.pooled(wide)
    assert row["tail"] == min(planner_residuals.TAILS) and row["coverage_of_cases"] < 0.8 < row["coverage_of_sources"]


accuracy, layouts, memories, runs, sets, sweep = (
    program(f"planner_{name}") for name in ("accuracy", "layouts", "memory", "runs", "sets", "sweep")
)
MODEL = ModelConfig(
    vocabulary=32_000, layers=16, width=2048, heads=16, kv_heads=16, head_dim=128, mlp_width=8192, sequence_length=4096
)  # fmt: skip
SPLITS = ((8, 1, 1), (4, 2, 1), (2, 2, 2))  # shard, tensor, pipeline


def cases(seconds: list[float | None], memory_gb: float = 80.0) -> list[Any]:
    """Return a group of three layouts on a node with a given ratio of measured to planned time; None for a failed run."""
    device = replace(devices.find("H100"), memory=memory_gb * 1e9)
    found = []
    for (shard, tensor, pipeline), factor in zip(SPLITS, seconds, strict=True):
        layout = Layout(shard=shard, tensor=tensor, pipeline=pipeline)
        job = Job(MODEL, layout, ClusterSpec.of(device, 8), 64, "bf16", frameworks.find("nanotron"))
        raw = {"nodes": 1, "status": "crashed_or_oom" if factor is None else "ok"}
        taken = None if factor is None else step(job).seconds * factor
        found.append(sets.Case(f"dp{shard}-tp{tensor}-pp{pipeline}", "nanotron 3.57B", job, taken, None, raw))
    return found


def test_regret_is_the_share_of_the_best_rate_that_the_choice_loses() -> None:
    group = cases([1.0, 1.0, 1.0])
    (row,) = layouts.regrets(group)
    planned = {case.name: step(case.job).seconds for case in group}
    assert row.chosen == "dp8-tp1-pp1" and not row.failed and not row.fitted and row.layouts == 3
    assert row.regret == pytest.approx(1 - min(planned.values()) / planned[row.chosen]) == row.sound
    (slow,) = layouts.regrets(cases([10.0, 1.0, 1.0]))
    assert slow.chosen == row.chosen and slow.regret > 0.8
    assert slow.sound is not None and slow.sound < 0.2, (
        "a run of less than half the best rate is none of the undisturbed"
    )


def test_a_choice_that_failed_is_counted() -> None:
    (row,) = layouts.regrets(cases([None, 1.0, 1.0]))
    assert row.failed and row.regret is None and row.sound == 0
    assert layouts.regrets(cases([None, None, None])) == []
    assert layouts.regrets(cases([1.0, 1.0, 1.0], memory_gb=1.0)) == []


def test_failures_are_counted_by_planned_memory() -> None:
    group = cases([1.0, None, 1.0])
    tight = cases([None, None, None], memory_gb=max(memory(case.job).total for case in group) / 1e9 / 1.5)
    rows = layouts.failures([*group, *tight])
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
    """Return the table for SWEEP_ROWS: one of two runs of a layout, a run and a failure before the fix, and one of another
    model.
    """
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


def test_left_out_rows_count_for_memory_only() -> None:
    cases = list(sets.layouts_h100(sweep.marked(SWEEP_ROWS, sweep_table())))
    (times,) = accuracy.time_errors(cases, draws=0)
    assert times.n == 3, "two runs of the shallow layout and the deep one after the fix"
    (choice,) = layouts.regrets(cases)
    assert choice.layouts == 3 and "mbs2" not in choice.chosen
    assert sum(row["runs"] for row in layouts.failures(cases)) == 6
    peaks = list(memories.peaks(cases))
    assert len(peaks) == 4 and len({row.planned for row in peaks}) == 4, "each with what its version kept"
    assert memories.verdicts(cases)["nanotron"]["ran"] == 4
    every = accuracy.with_rows_left_out(cases)
    assert every["left_out"] == {sweep.BEFORE_FIX: 1, "another model": 1}
    assert every["rows"] == 7 and every["memory"]["n"] == 5 and every["time"][0]["n"] == 5


def test_halves_are_disjoint_and_scores_cover_one() -> None:
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


calibrate = program("planner_calibrated").calibrate

SMALL = ModelConfig(65_536, 24, 2048, 16, 16, 128, 5504, 4096, qk_norm="none")


def jobs() -> list[Job]:
    layouts = (Layout(shard=16, zero=3), Layout(replicate=2, tensor=8, micro_batch=4), Layout(replicate=16, micro_batch=2),
                   Layout(replicate=4, tensor=2, pipeline=2, recompute="full"))  # fmt: skip
    return [job_of(SMALL, layout, 128, "torchtitan", "A100") for layout in layouts]


def test_a_slower_machine_is_found_from_three_steps_and_predicts_the_fourth() -> None:
    truth = replace(PHYSICS, matmuls=PHYSICS.matmuls * 0.85, intra=PHYSICS.intra * 0.8)
    measured = [(job, step(job, truth).seconds) for job in jobs()]
    found = calibrate(measured[:3])
    assert found.matmuls < PHYSICS.matmuls
    before = abs(step(jobs()[3]).seconds / measured[3][1] - 1)
    after = abs(step(jobs()[3], found).seconds / measured[3][1] - 1)
    assert before > 0.10
    assert after < 0.05


def test_steps_that_equal_the_prediction_change_nothing() -> None:
    found = calibrate([(job, step(job).seconds) for job in jobs()])
    assert found == PHYSICS
    assert calibrate([]) == PHYSICS
