"""The planner compared with published measurements, if the folder of reference files is present: times, layouts, memory."""

from collections import Counter
from statistics import median
from types import ModuleType
from typing import Any

import pytest

from tests.benchmark_files import REFERENCE, needs_reference, program, results

pytestmark = needs_reference

# Largest accepted mean absolute error per set; the benchmark says which sets were fitted and which were only in view.
LINE = {
    "A100 single node": 0.10, "A100 multi-node": 0.10, "SC'21 Table 1": 0.10, "SC'21 Table 2": 0.10,
    "SC'21 Table 2, ZeRO-3": 0.15, "Korthikanti Table 5": 0.10, "MegaScale": 0.10, "Llama 3 405B": 0.10,
    "Megatron-Core H100": 0.12, "MPT H100 SXM": 0.10, "MPT A100 SXM 80GB": 0.10, "MPT A100 SXM 40GB": 0.10, "B200": 0.12,
    "torchtitan": 0.16, "BLOOM": 0.12, "Megatron Bridge fp8": 0.10, "Megatron Bridge fp8, scored": 0.10,
}  # fmt: skip


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    return program("planner_accuracy")


def test_every_set_stays_within_its_error(accuracy: ModuleType) -> None:
    cases = [*accuracy.planner_sets.read(REFERENCE), *accuracy.planner_vendor.cases()]
    rows = {row.set: row for row in accuracy.time_errors(cases, draws=0)}
    kept = {name: rows[name].mean_absolute for name in LINE if name in rows}
    assert kept
    assert {name: size for name, size in kept.items() if size > LINE[name]} == {}


def test_chosen_layouts_are_the_measured_best_or_close(accuracy: ModuleType) -> None:
    choices = accuracy.regrets(accuracy.planner_sets.read(REFERENCE))
    if not choices:
        pytest.skip("the sweep is not among the reference files")
    for fitted in (True, False):
        some = [choice for choice in choices if choice.fitted == fitted]
        sizes = sorted(choice.sound for choice in some if choice.sound is not None)
        assert len(sizes) >= 10 and median(sizes) <= 0.02 and accuracy.percentile(sizes, 0.9) <= 0.15
        assert sum(choice.failed for choice in some) <= (1 if fitted else 0)


def test_rows_left_out_of_the_sweep_are_stated_on_the_page(accuracy: ModuleType) -> None:
    """The number of rows for each reason equals that of the page, and no other sets are affected."""
    counts = Counter(case.left_out for case in accuracy.planner_sets.read(REFERENCE) if case.left_out)
    if not counts:
        pytest.skip("the sweep is not among the reference files")
    kept = results("planner_accuracy")
    assert counts == kept["with_rows_left_out"]["left_out"] and sum(counts.values()) == 150


@pytest.mark.parametrize("model", ["3.57B", "80.0B"])
def test_the_median_error_of_other_models_in_the_sweep(accuracy: ModuleType, model: str) -> None:
    """A tenth of the sweep's rows come from broken runs, so the median says more than the mean."""
    name = f"{accuracy.planner_layouts.SWEEP} {model}"
    cases = [case for case in accuracy.planner_sets.read(REFERENCE) if case.set == name and not case.left_out]
    sound = [case for case in cases if case.seconds and accuracy.refuse(case.job) is None]
    if not sound:
        pytest.skip("the sweep is not among the reference files")
    assert median(abs(accuracy.off(case)) for case in sound) <= 0.1


@pytest.fixture(scope="module")
def compared() -> tuple[dict[str, Any], dict[str, Any]]:
    benchmark = program("planner_memory")
    rows, verdicts = benchmark.compare(REFERENCE)
    names = {row.set for row in rows}
    return {name: benchmark.summary([row for row in rows if row.set == name]) for name in names}, verdicts


MEMORY = {
    "torchtitan": 0.05, "B200": 0.02, "BLOOM": 0.05, "nanotron": 0.1, "Zero Bubble table 4": 0.03, "Korthikanti figure 1": 0.005,
    "Korthikanti figure 7": 0.005, "ZeRO table 1": 0.005, "textbook, 70B": 0.0,
}  # fmt: skip


def test_every_set_stays_within_its_error_of_memory(compared: Any) -> None:
    found = {name: compared[0][name]["mean_absolute"] for name in MEMORY}
    assert {name: size for name, size in found.items() if size > MEMORY[name]} == {}


@pytest.mark.parametrize("name", ["torchtitan", "B200"])
def test_runs_that_succeeded_fit_and_failed_ones_do_not(compared: Any, name: str) -> None:
    assert compared[1][name]["ran, said not to fit"] == []
    assert compared[1][name]["failed, said to fit"] == []


def test_runs_at_the_largest_micro_batch_fit_by_plan(compared: Any) -> None:
    """Every row of LLM Foundry's table ran, most with the largest batch its author could fit.

    Rows planned not to fit are at most 3% above the data sheet's memory; a device has a few percent more.
    """
    ran = [found for name, found in compared[1].items() if name.startswith("MPT")]
    wrong = sum(len(found["ran, said not to fit"]) for found in ran)
    assert wrong <= 0.06 * sum(found["ran"] for found in ran)


def test_every_set_has_a_verdict_and_misjudged_runs_are_listed(compared: Any) -> None:
    """The largest runs without recompute are planned not to fit; the table must contain them with their excess."""
    found = compared[1]
    assert {"Llama 3 405B", "Megatron Bridge fp8", "Megatron Bridge fp8, scored"} <= found.keys()
    for name, row in found.items():
        assert len(row["excess"]) == len(row["ran, said not to fit"]) <= row["ran"], name
        assert all(excess > 0 for excess in row["excess"]), name
    assert found["Llama 3 405B"]["ran"] == 3 and max(found["Llama 3 405B"]["excess"], default=0) < 0.15
