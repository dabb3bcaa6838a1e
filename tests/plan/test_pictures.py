"""The series behind the pictures agree with the plan that they are of."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from bessemer.plan import ask, outcome, pictures
from bessemer.plan.estimate.step import StageSeconds
from bessemer.plan.jobs import Goal, goal_of
from bessemer.plan.laws import REPLICATION
from bessemer.plan.outcome import PlanResult
from bessemer.plan.pictures import pipeline_picture


def goal(**asked: str) -> Goal:
    made = ask.alone(asked)
    return goal_of(made.recipe, made.recipe.model.vocabulary or 32_000, model=made.model)


@cache
def searched() -> PlanResult:
    """A layout that was looked for."""
    return outcome.of(goal(model="llama3-8b", tokens="1T", gpus="16xH100"), searched=True)


@cache
def piped() -> PlanResult:
    """A given layout with a pipeline: GPT-3 as Megatron-LM trains it."""
    asked = {"tp": "8", "pp": "8", "virtual": "4", "schedule": "interleaved", "micro_batch": "1", "batch": "3145728"}
    return outcome.of(
        goal(model="gpt3-175b", tokens="300B", gpus="1024xA100-80GB", framework="megatron-lm-2021", **asked)
    )


@pytest.mark.parametrize("of", [searched, piped])
def test_memory_bars_add_up_and_mark_the_plan(of: object) -> None:
    out = of()  # type: ignore[operator]
    found = pictures.memory_bars(out.job)
    assert found["capacity"] == out.job.cluster.device.memory
    for group in found["groups"]:
        for bar in group["bars"]:
            assert sum(bar["parts"].values()) == bar["total"], bar["name"]
            assert bar["fits"] == (bar["total"] <= found["capacity"])
        assert [bar["total"] for bar in group["bars"] if bar["own"]] == [out.memory.total]
    kinds = [group["kind"] for group in found["groups"]]
    assert kinds[:2] == ["ZeRO stage", "recompute"]
    assert ("pipeline stage" in kinds) == (out.job.layout.pipeline > 1)


def test_zero_divides_what_it_says() -> None:
    job = piped().job
    bars = {bar["name"]: bar["parts"] for bar in pictures.memory_bars(job)["groups"][0]["bars"]}
    state = [bars[f"ZeRO {zero}"]["weights"] + bars[f"ZeRO {zero}"]["gradients"] for zero in (0, 1)]
    held = job.model.parameters / 64  # tensor 8 x pipeline 8; the first stage has the embedding on top
    assert state[0] == state[1] == pytest.approx(6 * held, rel=0.05)
    assert bars["ZeRO 0"]["optimizer"] == pytest.approx(12 * held, rel=0.05)
    assert bars["ZeRO 1"]["optimizer"] == pytest.approx(bars["ZeRO 0"]["optimizer"] / 16, rel=1e-6)


def test_one_device_has_nothing_to_divide() -> None:
    out = outcome.of(goal(params="1B", tokens="1B", gpus="1xH200"))
    assert [group["kind"] for group in pictures.memory_bars(out.job)["groups"]] == ["recompute"]


@pytest.mark.parametrize("of", [searched, piped])
def test_a_timeline_is_as_long_as_the_step(of: object) -> None:
    out = of()  # type: ignore[operator]
    found = pictures.timeline(out.step, out.job.layout)
    assert sum(found["parts"].values()) == pytest.approx(out.step.seconds)
    for bars in found["lanes"].values():
        assert bars[0][1] == 0.0 and bars[-1][2] == pytest.approx(out.step.seconds)
        assert all(one[2] == two[1] for one, two in pairwise(bars))
    passes = [bar for bar in found["lanes"]["passes"] if bar[0] in ("forward", "backward")]
    busy = sum(end - start for _, start, end in passes)
    assert busy == pytest.approx(found["micro_batches"] * (found["forward"] + found["backward"]))
    assert len(passes) == (2 * found["micro_batches"] if found["each"] else 2)


def test_a_timeline_is_of_the_slowest_stages() -> None:
    out = piped()
    slow = (
        *(StageSeconds(3, 1.0, 2.0),) * 13,
        StageSeconds(3, 5.0, 9.0),
        *(StageSeconds(3, 1.0, 2.0),) * 18,
    )  # stage 14 is on rank 5 of 8
    found = pictures.timeline(replace(out.step, stages=slow), out.job.layout)
    assert found["stages"] == [6, 14, 22, 30]
    assert (found["forward"], found["backward"]) == (8.0, 15.0)


def test_the_pipeline_is_the_jobs_own() -> None:
    out = piped()
    found = pipeline_picture(out.job, out.step)
    assert found is not None
    assert (found["ranks"], found["virtual"], found["micro_batches"]) == (8, 4, 96)
    assert found["shown_micro_batches"] % 8 == 0
    cells = 2 * found["shown_micro_batches"] * 4 * 8
    assert found["svg"].count("<g><title>rank ") == cells <= 2 * 1500
    assert sum(one["layers"] for one in found["stages"]) == out.job.model.layers
    assert found["time_step"] == pytest.approx(sum(one.forward for one in out.step.stages) / 32)
    assert pipeline_picture(searched().job, searched().step) is None


def test_stages_alike_idle_as_the_formula_says() -> None:
    out = piped()
    alike = replace(out.step, stages=(StageSeconds(12, 1.0, 2.0),) * 8)
    found = pipeline_picture(out.job.with_layout(virtual=1, schedule="1f1b"), alike)
    assert found is not None
    m = found["shown_micro_batches"]
    assert found["utilisation"] == pytest.approx(m / (m + 7))


def test_of_many_ranks_some_are_drawn() -> None:
    out = piped()
    many = replace(out.step, stages=(StageSeconds(3, 1.0, 2.0),) * 32)
    found = pipeline_picture(out.job.with_layout(pipeline=32, virtual=1, schedule="1f1b"), many)
    assert found is not None
    assert found["shown_ranks"] == [*range(15), 31]
    assert ">rank 31<" in found["svg"] and ">rank 15<" not in found["svg"]
    assert len(found["svg"]) < 1_000_000


def test_the_surface_has_the_runs_place() -> None:
    found = pictures.loss_surface(8e9, 1e12, points=21)
    assert found["here"] == [8e9, 1e12]
    assert found["parameters"][10] == pytest.approx(8e9) and found["tokens"][10] == pytest.approx(1e12)
    assert found["loss"][10][10] == pytest.approx(REPLICATION.loss(8e9, 1e12), rel=1e-4)
    budgets = {row["flops"]: row for row in found["budgets"]}
    through = budgets[6 * 8e9 * 1e12]
    assert all(
        6 * n * d == pytest.approx(6 * 8e21, rel=1e-3)
        for n, d in zip(through["parameters"], through["tokens"], strict=True)
    )
    rule = found["optima"]["rule"]
    assert all(d == pytest.approx(20 * n, rel=1e-3) for n, d in zip(rule["parameters"], rule["tokens"], strict=True))
    low, high = found["parameters"][0], found["parameters"][-1]
    assert found["known"] and all(low <= one["parameters"] <= high for one in found["known"])
    assert len(json.dumps(found)) < 60_000


def test_the_laws_agree_with_the_rule() -> None:
    rows = {row["law"]: row for row in pictures.law_opinions(70e9, 1.4e12)}
    rule = next(row for law, row in rows.items() if law.startswith("20 tokens"))
    assert rule["optimal_tokens"] == pytest.approx(1.4e12)
    assert rule["best_parameters"] == pytest.approx(70e9) and rule["best_tokens"] == pytest.approx(1.4e12)


def test_the_chosen_interval_lies_on_the_curve() -> None:
    out = searched()
    found = pictures.checkpoints(out.running, out.save)
    assert found is not None
    curve = list(zip(found["intervals"], found["waste"], strict=True))
    chosen = found["chosen"]
    assert chosen["waste"] == out.running.waste
    below = max((point for point in curve if point[0] <= chosen["interval"]), key=lambda point: point[0])
    above = min((point for point in curve if point[0] >= chosen["interval"]), key=lambda point: point[0])
    assert min(below[1], above[1]) * 0.98 <= chosen["waste"] <= max(below[1], above[1]) * 1.02
    assert min(curve, key=lambda point: point[1])[0] == pytest.approx(found["best"], rel=0.1)


def test_the_front_is_what_no_other_beats() -> None:
    out = searched()
    assert out.found is not None
    found = pictures.layouts(out.found, out.job)
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
        found = pictures.pictures(out)
        assert json.loads(json.dumps(found, allow_nan=False)).keys() == found.keys()
