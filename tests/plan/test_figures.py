"""The series of a plan's figures agree with the plan."""

import json
from functools import cache

import pytest

from bessemer.plan import figures, plan_request, plan_result
from bessemer.plan.goal import Goal, goal_of
from bessemer.plan.plan_result import PlanResult


def goal(**asked: str) -> Goal:
    made = plan_request.from_options(asked)
    return goal_of(made.recipe, made.recipe.model.vocabulary or 32_000, model=made.model)


@cache
def searched() -> PlanResult:
    """A layout that was looked for."""
    return plan_result.make_plan(goal(model="llama3-8b", tokens="1T", gpus="16xH100"), searched=True)


@cache
def piped() -> PlanResult:
    """A given layout with a pipeline: GPT-3 as Megatron-LM trains it."""
    asked = {"tp": "8", "pp": "8", "virtual": "4", "schedule": "interleaved", "micro_batch": "1", "batch": "3145728"}
    return plan_result.make_plan(
        goal(model="gpt3-175b", tokens="300B", gpus="1024xA100-80GB", framework="megatron-lm-2021", **asked)
    )


@pytest.mark.parametrize("of", [searched, piped])
def test_memory_bars_add_up_and_mark_the_plan(of: object) -> None:
    out = of()  # type: ignore[operator]
    found = figures.memory_bars(out.job)
    assert found["capacity"] == out.job.cluster.device.memory
    for group in found["groups"]:
        for bar in group["bars"]:
            assert sum(bar["parts"].values()) == bar["total"], bar["name"]
            assert bar["fits"] == (bar["total"] <= found["capacity"])
        assert [bar["total"] for bar in group["bars"] if bar["own"]] == [out.memory.total]
    kinds = [group["kind"] for group in found["groups"]]
    assert kinds[:2] == ["ZeRO stage", "recompute"]
    assert ("pipeline stage" in kinds) == (out.job.layout.pipeline > 1)


def test_the_front_is_what_no_other_beats() -> None:
    out = searched()
    assert out.found is not None
    found = figures.layouts(out.found, out.job)
    every = [(one.step.tokens_per_second / 16, one.memory.total) for one in out.found.ranked]
    assert found["fitting"] == len(every) >= len(found["rows"]) >= 300
    for row in found["rows"]:
        speed, held = row["tokens_per_second_per_device"], row["memory"]
        beaten = any(fast >= speed and less <= held and (fast, less) != (speed, held) for fast, less in every)
        assert beaten != row["front"] or every.count((speed, held)) > 1
    assert [row["tokens_per_second_per_device"] for row in found["rows"] if row["own"]] == [
        pytest.approx(out.step.tokens_per_second / 16)
    ]


def test_all_pictures_are_plain_values() -> None:
    for out in (searched(), piped()):
        found = figures.figure_series(out)
        assert json.loads(json.dumps(found, allow_nan=False)).keys() == found.keys()
        assert sum(found["step"]["parts"].values()) == pytest.approx(out.step.seconds)
