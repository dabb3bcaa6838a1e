"""Headroom: the risk of running out of memory, and the layout that is chosen with it."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.model.config import ModelConfig
from bessemer.plan import devices
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import ClusterSpec, Job, Layout
from bessemer.plan.estimate.memory import HEADROOM, MEDIAN_LIMIT, out_of_memory
from bessemer.plan.intervals import residuals
from bessemer.plan.search import MORE_MEMORY, MORE_RISK, NEARLY_AS_FAST, Candidate, search


def job(layers: int, count: int = 16, device: str = "H100") -> Job:
    model = ModelConfig(
        vocabulary=32_000, layers=layers, width=4096, heads=32, kv_heads=8, head_dim=128, mlp_width=12_288,
        sequence_length=4096,
    )  # fmt: skip
    return Job(
        model, Layout(shard=count), ClusterSpec.of(devices.find(device), count), 64, "bf16", frameworks.find("bessemer")
    )


def test_fewer_than_one_in_twenty_failed_of_the_runs_planned_to_leave_the_headroom() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "planner_accuracy.json"
    bands = json.loads(results.read_text(encoding="utf-8"))["failures"]
    runs, failed = (sum(band[key] for band in bands if band["from"] < 1 - HEADROOM) for key in ("runs", "failed"))
    assert 1 - HEADROOM in {band["from"] for band in bands} and runs > 200 and failed < 0.05 * runs


def test_the_risk_is_what_failed_of_the_models_that_it_was_not_fitted_to() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "planner_accuracy.json"
    bands = [band for band in json.loads(results.read_text(encoding="utf-8"))["failures"] if not band["fitted"]]
    near = [band for band in bands if 0.7 <= band["from"] < 1.3]
    failed, expected = (sum(band[key] for band in near) for key in ("failed", "expected"))
    assert sum(band["runs"] for band in near) > 30 and failed == pytest.approx(expected, rel=0.3)


def test_the_risk_rises_with_the_memory_from_none_to_certain() -> None:
    risks = [out_of_memory(share / 20, 1.0) for share in range(60)]
    assert risks == sorted(risks) and risks[0] == 0.0 and risks[-1] > 0.999
    assert out_of_memory(MEDIAN_LIMIT * 80e9, 80e9) == pytest.approx(0.5)


def test_the_choice_leaves_the_headroom_and_divides_the_model_least_among_near_equals() -> None:
    for headroom in (0.0, HEADROOM, 0.4):
        found = search(job(32), headroom=headroom)
        chosen, fastest = found.preferred[0], found.safe[0]
        assert chosen.leaves(headroom) and chosen.step.seconds <= NEARLY_AS_FAST * fastest.step.seconds
        near = [one for one in found.safe if one.step.seconds <= NEARLY_AS_FAST * fastest.step.seconds]
        ways = [one.job.layout.tensor * one.job.layout.pipeline * one.job.layout.context for one in (chosen, *near)]
        assert ways[0] == min(ways)
        assert sorted(map(id, found.preferred)) == sorted(map(id, found.ranked))


def test_where_nothing_leaves_the_headroom_little_more_memory_buys_time() -> None:
    """The layout of least memory alone may be far slower: what is near it is compared as those that leave the headroom are."""
    found = search(job(32), headroom=0.95)
    least = min(found.ranked, key=lambda one: one.memory.total)
    first, rest = found.preferred[0], found.preferred
    device = first.job.cluster.device.memory

    def is_near(one: Candidate) -> bool:
        limit = least.memory.total + MORE_MEMORY * device
        return one.memory.total <= limit and one.risk <= least.risk + MORE_RISK

    near = [one for one in found.ranked if is_near(one)]
    assert not found.safe and 1 < len(near) < len(found.ranked)
    assert first.step.seconds <= NEARLY_AS_FAST * min(one.step.seconds for one in near) < least.step.seconds
    assert all(map(is_near, rest[: len(near)])) and not any(map(is_near, rest[len(near) :]))
    assert sorted(map(id, rest)) == sorted(map(id, found.ranked))
    totals = [one.memory.total for one in rest[len(near) :]]
    assert totals == sorted(totals)


@pytest.mark.parametrize(
    ("words", "is_chosen"),
    [
        (("--dp", "64", "--tp", "1", "--zero", "3", "--micro-batch", "1"), False),
        (("--dp", "64", "--tp", "1", "--zero", "3", "--micro-batch", "1", "--recompute", "none"), False),
        (("--dp", "64", "--zero", "3"), True),
        (("--tp", "8", "--zero", "3", "--micro-batch", "1"), True),
    ],
    ids=str,
)
def test_a_layout_given_whole_has_the_range_of_a_given_one(
    words: tuple[str, ...], is_chosen: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """By options or by a recipe: what the planner did not choose from several is as certain as what it did not choose."""
    asked = ["plan", "--json", "--model", "llama-2-7b", "--tokens", "1T", "--batch", "4M", "--gpus", "64xH100"]
    assert run_command([*asked, *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    row = residuals()["chosen" if is_chosen else "step"]["unmeasured"]
    low, high = (end / plan["step_seconds"] for end in plan["interval_80"]["step_seconds"])
    assert (low, high) == pytest.approx((exp(row["low"]), exp(row["high"])), rel=0.02)
    days = plan["interval_80"]["days"][1] / plan["expected"]["days"]
    of_runs = exp(residuals()["run"]["high"])
    assert days >= 0.999 * of_runs and (is_chosen or days <= 1.01 * of_runs)
