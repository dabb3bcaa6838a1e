"""Further cases of `planner_accuracy.py --cases DIR`, and the pooling of residuals, on cases whose answers are known."""

from __future__ import annotations

import json
import sys
from math import log
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STEP = {
    "case": "one", "model": {"layers": 8, "width": 1024, "heads": 8, "kv_heads": 8, "head_dim": 128, "mlp_width": 4096,
    "vocabulary": 32_000}, "sequence": 2048, "device": "H100 SXM", "devices": 8, "framework": "megatron-core",
    "precision": "bf16", "batch": 64, "layout": {"shard": 8, "micro_batch": 2}, "seconds": 1.0, "memory_bytes": 1e10,
}  # fmt: skip
RUN = {"run": "small", "params": 1e9, "tokens": 2e10, "device": "H100", "devices": 8, "hours": 100.0}


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import planner_cases
    finally:
        sys.path.pop(0)
    return planner_cases


def write(folder: Path, **changes: Any) -> Path:
    file = {"set": "mine", "steps": [{**STEP, **changes}], "runs": [RUN]}
    (folder / "mine.json").write_text(json.dumps(file), encoding="utf-8")
    return folder


def test_every_figure_is_compared_with_what_the_program_says(cases: ModuleType, tmp_path: Path) -> None:
    found = cases.read(write(tmp_path))
    rows = {row[0]: row for row in cases.compared(found)}
    assert set(rows) == {"step", "memory", "run"} and found.steps[0].set == "mine"
    for _, _, _, low, expected, high in rows.values():
        assert low < expected < high
    _, _, measured, low, _, high = rows["step"]
    for seconds, inside in ((low * 1.01, "100%"), (high * 1.01, "0%")):
        assert f"{inside} inside" in cases.show(cases.read(write(tmp_path, seconds=seconds))).splitlines()[0]
    assert measured == 1.0 and "run: 1 cases" in cases.show(found)


def test_a_step_that_took_twice_the_time_has_half_the_error(cases: ModuleType, tmp_path: Path) -> None:
    once, twice = (
        next(row for row in cases.compared(cases.read(write(tmp_path, seconds=seconds))) if row[0] == "step")
        for seconds in (1.0, 2.0)
    )
    assert once[4] == twice[4] and once[4] / once[2] == pytest.approx(2 * twice[4] / twice[2])


def test_sources_weigh_alike_and_a_left_out_one_is_not_in_its_interval(cases: ModuleType) -> None:
    import planner_residuals

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
    # One source spreads three times as wide as the others: their tails alone hold a third of it, so that the widest are taken.
    wide = [one for one in even if one.source != "e"]
    wide += of("e", *(3 * number / 100 for number in range(-50, 51) for _ in range(8)))
    row = planner_residuals.pooled(wide)
    assert row["tail"] == min(planner_residuals.TAILS) and row["coverage_of_cases"] < 0.8 < row["coverage_of_sources"]
