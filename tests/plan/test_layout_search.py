"""The search against trying everything, and the layouts it may not propose."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.plan import devices
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import ClusterSpec, Job, Layout, parallel
from bessemer.plan.estimate.memory import excess, memory
from bessemer.plan.estimate.step import refuse, step
from bessemer.plan.goal import dividing_batch, divisors
from bessemer.plan.layouts import STAGES_EACH
from bessemer.plan.search import RECOMPUTE, search
from bessemer.recipe import Optimizer, Parallel, ResolvedTrain
from bessemer.train.parallelize import require_trainable


def job(
    devices_count: int, batch: int = 64, *, layers: int = 8, width: int = 4096, device: str = "H100", **changes: int
) -> Job:
    model = ModelConfig(
        vocabulary=32_000, layers=layers, width=width, heads=32, kv_heads=8, head_dim=width // 32, mlp_width=3 * width,
        sequence_length=4096,
    ).with_changes(**changes)  # fmt: skip
    chosen = devices.find(device)
    cluster = ClusterSpec(chosen, devices_count, min(8, devices_count), chosen.intra_bandwidth, chosen.inter_bandwidth)
    return Job(model, Layout(shard=devices_count), cluster, batch, "bf16", frameworks.find("bessemer"))


def everything(of: Job) -> list[Job]:
    """Every combination of every way that divides devices and batch and that the search may propose."""
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
def test_nothing_that_fits_is_faster(count: int, device: str, layers: int) -> None:
    asked = job(count, device=device, layers=layers)
    found = search(asked)
    best = min(step(one).seconds for one in everything(asked) if not excess(one, memory(one)))
    assert found.ranked[0].step.seconds <= 1.01 * best


@pytest.mark.parametrize(("count", "batch", "divides"), [(384, 128, True), (96, 100, True), (64, 128, False)])
def test_short_sequences_are_divided_where_the_batch_does_not_fill_the_devices(
    count: int, batch: int, divides: bool
) -> None:
    found = search(job(count, batch, layers=32))
    contexts = {one.job.layout.context for one in found.ranked}
    assert contexts == ({1, 2, 4} if divides else {1})
    if count > batch:
        assert found.ranked[0].job.layout.context > 1


def test_every_row_fits_fills_the_devices_and_is_in_order() -> None:
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
    """Whether a training takes the job's layout."""
    tokens = of.batch * of.model.sequence_length
    values = {"global_batch_tokens": tokens, "micro_batch": of.layout.micro_batch, "optimizer": Optimizer()}
    train = ResolvedTrain.model_construct(**values)
    try:
        require_trainable(train, parallel(of.layout), of.model, torch.device("cuda"))
    except InputError:
        return False
    return True


@pytest.mark.parametrize(
    "changes",
    [{}, {"mlp_width": 50}, {"vocabulary": 5}, {"sequence_length": 36}, {"kv_heads": 2}, {"labels": 3}],
    ids=str,
)
def test_the_plan_refuses_what_training_refuses(changes: dict[str, int]) -> None:
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


def test_a_rule_that_training_gains_the_search_follows(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_shards_that_training_cannot_make_are_not_proposed() -> None:
    asked = job(24, 48, width=1024)
    found = search(asked)
    assert all(trains(one.job) for one in found.ranked)
    assert found.impossible["the weights do not divide over shard x context with tensor"]
    split = asked.with_layout(tensor=4, shard=6, micro_batch=1)
    assert "numbers that work: 1, 2, 4, 8, 16" in (refuse(split) or "") and not trains(split)
    megatron = replace(split, framework=frameworks.find("megatron-lm-2021"))
    assert refuse(megatron) is None, "which divides a flat buffer"


@pytest.mark.parametrize(
    ("count", "sequences", "proposed"),
    [(64, 256, 256), (2048, 1024, 1024), (1000, 1024, 1000), (24, 512, 576), (7, 100, 112), (1009, 64, 1009)],
)
def test_the_batch_that_devices_divide(count: int, sequences: int, proposed: int) -> None:
    """Kept where the devices or tensor groups of a node divide it, else near it; 1,009 is a prime."""
    asked = job(count)
    assert dividing_batch(sequences, asked.model, asked.cluster) == proposed
