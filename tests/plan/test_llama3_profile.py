"""The profile of Meta's program: stages, gradients and micro-batches in flight of Llama 3 405B by the paper's section 3.3.2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bessemer.model.config import ModelConfig
from bessemer.plan import devices
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.frameworks import ranks_by_cut
from bessemer.plan.estimate.job import PHYSICS, ClusterSpec, Job, Layout, parallel
from bessemer.plan.estimate.memory import memory, stages
from bessemer.plan.estimate.memory_parts import Split, activation_bytes_without_recompute, state
from bessemer.plan.estimate.step import exchange_seconds, refuse
from bessemer.plan.search import search

MODEL = ModelConfig(
    vocabulary=128_256, layers=126, width=16_384, heads=128, kv_heads=8, head_dim=128, mlp_width=53_248, sequence_length=8192,
    tie_embeddings=False, qk_norm="none",
)  # fmt: skip


def llama3(micro_batches: int, **layout: Any) -> Job:
    data = 1024 // micro_batches * 2  # as table 4: 64 data ranks with 32 sequences each, 128 with 16
    whole = Layout(
        **{"shard": data, "tensor": 8, "pipeline": 16, "virtual": 8, "schedule": "interleaved", "zero": 2, **layout}
    )
    cluster = ClusterSpec.of(devices.find("H100 SXM"), whole.world)
    return Job(MODEL, whole, cluster, data * micro_batches, "bf16", frameworks.find("llama3"))


def test_embedding_and_head_have_a_place_of_their_own_among_the_stages() -> None:
    job = llama3(16)
    ranks = ranks_by_cut(MODEL, parallel(job.layout), job.framework.cut)
    assert [rank.blocks for rank in ranks] == [7, *[8] * 14, 7]
    assert refuse(job) is None
    assert "126 blocks" in (refuse(replace(job, framework=frameworks.find("megatron-core"))) or "")
    assert "126 blocks" in (refuse(llama3(16, virtual=9)) or "")


def test_the_search_tries_as_many_stages_as_the_program_cuts() -> None:
    given = frozenset({"tensor", "pipeline", "shard", "zero", "schedule", "micro_batch"})
    found = search(llama3(16), given)
    assert 8 in {one.job.layout.virtual for one in found.ranked} | {one.layout.virtual for one in found.rejected}


@pytest.mark.parametrize(("micro_batches", "chunks"), [(16, 16 * 8), (32, 2 * 14 + 7 * 16 + 1)])
def test_the_second_rank_is_the_fullest_and_holds_the_stages_in_flight(micro_batches: int, chunks: int) -> None:
    job = llama3(micro_batches)
    held = memory(job)
    assert held.place == 1 and held.total == max(stage.total for stage in stages(job))
    each = sum(activation_bytes_without_recompute(MODEL, job.framework, Split(8), 2).values())
    waiting = held.activations - held.kinds["backward"]
    assert waiting == pytest.approx(chunks * each * MODEL.sequence_length, rel=1e-3)


def test_sharded_gradients_wait_whole_of_one_stage_and_travel_after_each_round() -> None:
    """With zero 1 all fp32 gradients of a rank wait, with zero 2 those of a stage; they then travel once for each of two rounds."""
    two_rounds = llama3(32)
    rank = ranks_by_cut(MODEL, parallel(two_rounds.layout), "ends")[1]
    whole = 4.0 * 8 * MODEL.block_matrix_parameters / 8
    spared = state(two_rounds.with_layout(zero=1), rank).buffers - state(two_rounds, rank).buffers
    assert spared == pytest.approx(whole * 7 / 8, rel=0.2)

    def seconds(job: Job, scatter: Any) -> float:
        framework = replace(job.framework, scatter=scatter, data_overlap=0.0)
        return exchange_seconds(replace(job, framework=framework), 0.0, PHYSICS)

    assert seconds(llama3(16), "round") == seconds(llama3(16), "step")
    once = seconds(two_rounds, "step") - seconds(two_rounds, "micro-batch")  # the gradients alone, without new weights
    assert seconds(two_rounds, "round") == pytest.approx(seconds(two_rounds, "step") + once)
