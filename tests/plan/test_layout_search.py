"""The layout search compared with trying everything, the layouts it must not propose, and the risk of running out of memory."""

from dataclasses import replace
from itertools import pairwise, product
from math import exp

import pytest

from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import Job, Layout, parallel
from bessemer.plan.estimate.memory import HEADROOM, MEDIAN_LIMIT, excess, memory, out_of_memory
from bessemer.plan.estimate.step import refuse, step
from bessemer.plan.goal import dividing_batch, divisors
from bessemer.plan.intervals import residuals
from bessemer.plan.layouts import STAGES_EACH
from bessemer.plan.search import MORE_MEMORY, MORE_RISK, NEARLY_AS_FAST, RECOMPUTE, Candidate, search
from bessemer.recipe import Optimizer, Parallel, ResolvedTrain
from bessemer.train.parallelize import require_trainable
from tests.benchmark_files import results
from tests.plan.plans import job_of, planned


def job(
    devices_count: int, batch: int = 64, *, layers: int = 8, width: int = 4096, device: str = "H100", **changes: int
) -> Job:
    model = ModelConfig(
        vocabulary=32_000, layers=layers, width=width, heads=32, kv_heads=8, head_dim=width // 32, mlp_width=3 * width,
        sequence_length=4096,
    ).with_changes(**changes)  # fmt: skip
    return job_of(model, Layout(shard=devices_count), batch, device=device)


def everything(of: Job) -> list[Job]:
    """Return every combination that divides devices and batch and that the search may propose."""
    found = []
    count, per_node = of.cluster.devices, of.cluster.per_node
    for tensor, pipeline in product(divisors(per_node), divisors(count)):
        if count % (tensor * pipeline):
            continue
        data = count // (tensor * pipeline)
        for shard, micro, zero, mode, virtual in product(
            divisors(data), (1, 2, 4, 8, 16, 32, 64), (0, 1, 2, 3), RECOMPUTE, STAGES_EACH
        ):
            if (zero == 0) != (shard == 1) or of.batch % (data * micro):
                continue
            if virtual > 1 and pipeline == 1:
                continue
            found.append(of.with_layout(
                replicate=data // shard, shard=shard, tensor=tensor, pipeline=pipeline, virtual=virtual, zero=zero,
                schedule="interleaved" if virtual > 1 else "1f1b", micro_batch=micro, recompute=mode,
            ))  # fmt: skip
    return [one for one in found if refuse(one) is None]


@pytest.mark.parametrize(("count", "device", "layers"), [(8, "H100", 8), (16, "A100 40GB", 8), (16, "L40S", 12)])
def test_no_fitting_layout_is_faster_than_the_best(count: int, device: str, layers: int) -> None:
    asked = job(count, device=device, layers=layers)
    found = search(asked)
    best = min(step(one).seconds for one in everything(asked) if not excess(one, memory(one)))
    assert found.ranked[0].step.seconds <= 1.01 * best


@pytest.mark.parametrize(("count", "batch", "divides"), [(384, 128, True), (96, 100, True), (64, 128, False)])
def test_short_sequences_are_split_if_the_batch_does_not_fill_the_devices(
    count: int, batch: int, divides: bool
) -> None:
    found = search(job(count, batch, layers=32))
    contexts = {one.job.layout.context for one in found.ranked}
    assert contexts == ({1, 2, 4} if divides else {1})
    if count > batch:
        assert found.ranked[0].job.layout.context > 1


def test_rows_fit_fill_the_devices_and_are_sorted() -> None:
    found = search(job(32, layers=16))
    seconds = [one.step.seconds for one in found.ranked]
    assert seconds == sorted(seconds) and len(found.ranked) > 20
    for one in found.ranked:
        assert one.job.layout.world == 32 and not excess(one.job, one.memory)
        assert one.job.batch % (one.job.layout.data * one.job.layout.micro_batch) == 0
    for miss in found.rejected:
        assert miss.missing > 0 and miss.reasons
    pareto = found.pareto
    assert [one.step.seconds for one in pareto] == sorted(one.step.seconds for one in pareto)
    for faster, slower in pairwise(pareto):
        assert slower.memory.total < faster.memory.total


def trains(of: Job) -> bool:
    """Return True if a training accepts the job's layout."""
    tokens = of.batch * of.model.sequence_length
    values = {"global_batch_tokens": tokens, "micro_batch": of.layout.micro_batch, "optimizer": Optimizer()}
    train = ResolvedTrain.model_construct(**values)
    try:
        require_trainable(train, parallel(of.layout), of.model, "cuda")
    except InputError:
        return False
    return True


@pytest.mark.parametrize(
    "changes",
    [{}, {"mlp_width": 50}, {"vocabulary": 5}, {"sequence_length": 36}, {"kv_heads": 2}, {"labels": 3}],
    ids=str,
)
def test_the_plan_rejects_layouts_that_training_rejects(changes: dict[str, int]) -> None:
    sizes = {"heads": 8, "kv_heads": 4, "mlp_width": 96, "vocabulary": 256, "sequence_length": 48, **changes}
    schedules = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("dualpipev", 2)]
    answers = set()
    for tensor, context, pipeline in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 4, 16)):
        for (schedule, virtual), batch in product(schedules if pipeline > 1 else schedules[:1], (3, 8, 9)):
            split = Layout(
                tensor=tensor, context=context, pipeline=pipeline, virtual=virtual, schedule=schedule,  # type: ignore[arg-type]
            )  # fmt: skip
            asked = replace(job(split.world, batch, **sizes), layout=split)
            assert (refuse(asked) is None) == trains(asked), split
            answers.add(trains(asked))
    assert answers == {True, False}
    assert all(trains(one.job) for one in search(job(16, 64, **sizes)).ranked)


def test_the_search_follows_a_new_rule_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses_four(model: ModelConfig, layout: Parallel, *_: object, **__: object) -> None:
        if layout.tensor == 4:
            raise InputError("parallel.tensor: a new rule")

    asked = job(16, 64)
    assert any(one.job.layout.tensor == 4 for one in search(asked).ranked)
    monkeypatch.setattr("bessemer.plan.estimate.step.require_valid", refuses_four)
    search.cache_clear()
    found = search(asked)
    search.cache_clear()
    assert found.ranked and all(one.job.layout.tensor != 4 for one in found.ranked)
    assert found.impossible["parallel.tensor: a new rule"]


def test_impossible_shards_are_not_proposed() -> None:
    asked = job(24, 48, width=1024)
    found = search(asked)
    assert all(trains(one.job) for one in found.ranked)
    assert found.impossible["the weights do not divide over shard x context with tensor"]
    split = asked.with_layout(tensor=4, shard=6, micro_batch=1)
    assert ": 1, 2, 4, 8, 16" in (refuse(split) or "") and not trains(split)
    megatron = replace(split, framework=frameworks.find("megatron-lm-2021"))
    assert refuse(megatron) is None, "which divides a flat buffer"


@pytest.mark.parametrize(
    ("count", "sequences", "proposed"),
    [(64, 256, 256), (2048, 1024, 1024), (1000, 1024, 1000), (24, 512, 576), (7, 100, 112), (1009, 64, 1009)],
)
def test_the_batch_is_one_that_the_devices_divide(count: int, sequences: int, proposed: int) -> None:
    """A batch that the devices or tensor groups of a node divide is kept, others move to a near value; 1,009 is a prime."""
    asked = job(count)
    assert dividing_batch(sequences, asked.model, asked.cluster) == proposed


def test_fewer_than_one_in_twenty_runs_planned_with_headroom_failed() -> None:
    bands = results("planner_accuracy")["failures"]
    runs, failed = (sum(band[key] for band in bands if band["from"] < 1 - HEADROOM) for key in ("runs", "failed"))
    assert 1 - HEADROOM in {band["from"] for band in bands} and runs > 200 and failed < 0.05 * runs


def test_the_risk_matches_failures_of_models_it_was_not_fitted_to() -> None:
    bands = [band for band in results("planner_accuracy")["failures"] if not band["fitted"]]
    near = [band for band in bands if 0.7 <= band["from"] < 1.3]
    failed, expected = (sum(band[key] for band in near) for key in ("failed", "expected"))
    assert sum(band["runs"] for band in near) > 30 and failed == pytest.approx(expected, rel=0.3)


def test_the_risk_rises_with_the_memory_from_none_to_certain() -> None:
    risks = [out_of_memory(share / 20, 1.0) for share in range(60)]
    assert risks == sorted(risks) and risks[0] == 0.0 and risks[-1] > 0.999
    assert out_of_memory(MEDIAN_LIMIT * 80e9, 80e9) == pytest.approx(0.5)


def test_the_choice_keeps_the_headroom_and_splits_the_model_least_among_near_equals() -> None:
    for headroom in (0.0, HEADROOM, 0.4):
        found = search(job(16, layers=32), headroom=headroom)
        chosen, fastest = found.preferred[0], found.safe[0]
        assert chosen.leaves(headroom) and chosen.step.seconds <= NEARLY_AS_FAST * fastest.step.seconds
        near = [one for one in found.safe if one.step.seconds <= NEARLY_AS_FAST * fastest.step.seconds]
        ways = [one.job.layout.tensor * one.job.layout.pipeline * one.job.layout.context for one in (chosen, *near)]
        assert ways[0] == min(ways)
        assert sorted(map(id, found.preferred)) == sorted(map(id, found.ranked))


def test_without_headroom_a_faster_layout_may_use_slightly_more_memory() -> None:
    """The layout of least memory may be far slower, so layouts with almost as little memory are compared by time."""
    found = search(job(16, layers=32), headroom=0.95)
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
def test_a_fully_given_layout_has_the_interval_of_given_layouts(
    words: tuple[str, ...], is_chosen: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given by options or by a recipe: a layout that the planner did not choose has the interval of a given layout."""
    asked = ("--model", "llama-2-7b", "--tokens", "1T", "--batch", "4M", "--gpus", "64xH100")
    plan = planned(capsys, *asked, *words)
    row = residuals()["chosen" if is_chosen else "step"]["unmeasured"]
    low, high = (end / plan["step_seconds"] for end in plan["interval_80"]["step_seconds"])
    assert (low, high) == pytest.approx((exp(row["low"]), exp(row["high"])), rel=0.02)
    days = plan["interval_80"]["days"][1] / plan["expected"]["days"]
    of_runs = exp(residuals()["run"]["high"])
    assert days >= 0.999 * of_runs and (is_chosen or days <= 1.01 * of_runs)
