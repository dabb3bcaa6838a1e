"""The planner held against published measurements, where the folder of reference files is at hand (BESSEMER_REFERENCE, or
shared/reference/planner beside the repository)."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("BESSEMER_REFERENCE") or ROOT.parent / "shared" / "reference" / "planner")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the reference files are not here (BESSEMER_REFERENCE)")

# Mean absolute error that each set must keep to; the benchmark says what was fitted and what was only in view.
LINE = {
    "A100 single node": 0.10, "A100 multi-node": 0.10, "SC'21 Table 1": 0.10, "SC'21 Table 2": 0.10,
    "SC'21 Table 2, ZeRO-3": 0.15, "Korthikanti Table 5": 0.10, "MegaScale": 0.10, "Llama 3 405B": 0.10,
    "Megatron-Core H100": 0.12, "MPT H100 SXM": 0.10, "MPT A100 SXM 80GB": 0.10, "MPT A100 SXM 40GB": 0.10, "B200": 0.12,
    "torchtitan": 0.16, "BLOOM": 0.12, "Megatron Bridge fp8": 0.10, "Megatron Bridge fp8, scored": 0.10,
}  # fmt: skip


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import planner_accuracy
    finally:
        sys.path.pop(0)
    return planner_accuracy


def test_every_set_keeps_its_line(accuracy: ModuleType) -> None:
    cases = [*accuracy.planner_sets.read(FOLDER), *accuracy.planner_vendor.cases()]
    rows = {row.set: row for row in accuracy.time_errors(cases, draws=0)}
    kept = {name: rows[name].mean_absolute for name in LINE if name in rows}
    assert kept
    assert {name: size for name, size in kept.items() if size > LINE[name]} == {}


def test_the_layouts_chosen_are_the_measured_best_or_near(accuracy: ModuleType) -> None:
    choices = accuracy.regrets(accuracy.planner_sets.read(FOLDER))
    if not choices:
        pytest.skip("the sweep is not among the reference files")
    for fitted in (True, False):
        some = [choice for choice in choices if choice.fitted == fitted]
        sizes = sorted(choice.sound for choice in some if choice.sound is not None)
        assert len(sizes) >= 10 and median(sizes) <= 0.02 and accuracy.percentile(sizes, 0.9) <= 0.15
        assert sum(choice.failed for choice in some) <= (1 if fitted else 0)


def test_what_the_sweep_leaves_out_is_known_and_stated(accuracy: ModuleType) -> None:
    """Of each reason as many rows as the page says, and none of other sets."""
    counts = Counter(case.left_out for case in accuracy.planner_sets.read(FOLDER) if case.left_out)
    if not counts:
        pytest.skip("the sweep is not among the reference files")
    kept = json.loads((ROOT / "benchmarks" / "results" / "planner_accuracy.json").read_text(encoding="utf-8"))
    assert counts == kept["with_rows_left_out"]["left_out"] and sum(counts.values()) == 150


@pytest.mark.parametrize("model", ["3.57B", "80.0B"])
def test_half_of_the_sweeps_other_models_is_met(accuracy: ModuleType, model: str) -> None:
    """A tenth of the sweep's rows are of broken runs, so that a mean says little and a median more."""
    name = f"{accuracy.planner_layouts.SWEEP} {model}"
    cases = [case for case in accuracy.planner_sets.read(FOLDER) if case.set == name and not case.left_out]
    sound = [case for case in cases if case.seconds and accuracy.refuse(case.job) is None]
    if not sound:
        pytest.skip("the sweep is not among the reference files")
    assert median(abs(accuracy.off(case)) for case in sound) <= 0.1
