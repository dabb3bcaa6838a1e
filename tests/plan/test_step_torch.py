"""What the habits of PyTorch, DeepSpeed and Meta's program for Llama 3 add to a step and its memory, against arithmetic by hand."""

from dataclasses import replace
from typing import Any

import pytest

from bessemer.model.config import ModelConfig
from bessemer.plan import devices
from bessemer.plan.estimate import collectives, frameworks
from bessemer.plan.estimate.compute import cast_bytes
from bessemer.plan.estimate.experts import BlockMatmul
from bessemer.plan.estimate.frameworks import ranks_by_cut
from bessemer.plan.estimate.job import PHYSICS, ClusterSpec, Job, Layout, parallel
from bessemer.plan.estimate.memory import memory, stages
from bessemer.plan.estimate.memory_parts import Split, activation_bytes_without_recompute, state
from bessemer.plan.estimate.micro_batch import micro_batch_seconds
from bessemer.plan.estimate.step import exchange_seconds, refuse, step
from bessemer.plan.search import search
from tests.plan.plans import LLAMA, job_of

H100 = devices.find("H100")
SUMS: tuple[Any, Any] = ("scatter", "all")
TOKENS, WIDTH = 2 * 8192, 4096


def job(precision: Any = "bf16", changes: dict[str, Any] | None = None, micro_batch: int = 2, **layout: Any) -> Job:
    layout = {"tensor": 8, "recompute": "none", "zero": 0, **layout}
    wanted = Layout(micro_batch=micro_batch, **layout)
    framework = replace(frameworks.find("torchtitan"), **(changes or {}))
    return job_of(LLAMA, wanted, micro_batch * wanted.data, framework, precision=precision)


def pair() -> float:
    """Seconds of a gather and a scatter of one activation in 16 bits among 8 ranks of a node."""
    return collectives.reduce(collectives.of(ClusterSpec.of(H100, 8), 8, 1, PHYSICS), 2.0 * TOKENS * WIDTH)


def tensor(wanted: Job) -> float:
    return micro_batch_seconds(wanted, PHYSICS).tensor


def test_selective_recompute_gathers_again_but_does_not_scatter_again() -> None:
    """torchtitan's list of what is saved has reduce_scatter and not all_gather: 2 of a block's 4 collectives, once more."""
    assert tensor(job()) == pytest.approx(4 * pair())
    assert tensor(job(recompute="selective")) == pytest.approx(5 * pair())
    # Full: all but the scatter after the last matmul.
    assert tensor(job(recompute="full")) == pytest.approx(5.5 * pair())
    assert tensor(job(recompute="full", changes={"early_stop": False})) == pytest.approx(6 * pair())
    # Without sequence parallelism an all-reduce has no gather by itself.
    assert tensor(job(recompute="selective", sequence_parallel=False)) == pytest.approx(4 * pair())
    assert tensor(job(recompute="full", sequence_parallel=False)) == pytest.approx(5 * pair())


def test_what_pytorch_pairs_with_products_is_less_than_all() -> None:
    """Forward everything, backward the gathers: 3 of 4 pairs' halves; with a scale for each row the forward scatters alone."""
    shows = {"tensor_overlap": 1.0}
    assert tensor(job(changes={**shows, "paired": "all"})) == pytest.approx(0.0, abs=1e-12)
    assert tensor(job(changes=shows)) == pytest.approx(1 * pair())
    assert tensor(job("fp8", {**shows, "fp8": "row"})) == pytest.approx(3 * pair())


def test_sequences_gathered_together_are_copied_into_place() -> None:
    bytes_ = 2 * 4 * 2 * (2.0 * TOKENS * WIDTH)  # both passes, 4 collectives, read and written
    added = step(job()).elementwise - step(job(changes={"copies": False})).elementwise
    assert added == pytest.approx(32 * bytes_ / (H100.bandwidth * PHYSICS.bandwidth))
    one = step(job(micro_batch=1)).elementwise
    assert one == step(job(micro_batch=1, changes={"copies": False})).elementwise  # one sequence is in place


def test_casts_move_what_torchao_reads_and_writes() -> None:
    """10 tokens, 8 wide, matmuls (8, 6), (4, 8), (8, 12), (6, 8) on 2 ranks: inner 26, outer 34, weights 224."""
    shapes = [BlockMatmul(10, *sizes) for sizes in ((8, 6), (4, 8), (8, 12), (6, 8))]
    assert cast_bytes(10, shapes, 8, 1, "tensor") == (5 * (260 + 224), 5 * 340 + 2 * (340 + 260) + 2 * 224)
    # Cast on 2 ranks each before it is gathered: 8 less of what is read, and of gradients.
    assert cast_bytes(10, shapes, 8, 2, "tensor") == (5 * (180 + 224), 5 * 260 + 2 * (340 + 260) + 2 * 224)
    # Rows: input, weight and gradient are cast along both sides, after the gather.
    for split in (1, 2):
        assert cast_bytes(10, shapes, 8, split, "row") == (5 * (260 + 224), 10 * 340 + 5 * (260 + 224))


def test_a_ring_carries_keys_for_all_query_heads_where_they_are_repeated() -> None:
    """Llama 3 8B has 4 query heads to a key. They travel once forward and twice backward; without overlap."""

    def seconds(*, repeats_keys: bool) -> float:
        changes = {"context": "gather", "repeats_keys": repeats_keys}
        wanted = job(changes=changes, tensor=1, context=8, micro_batch=1)
        return micro_batch_seconds(wanted, PHYSICS).context

    each = (
        2 * 2 * 8192 * 1024 * 7 / 8 / (H100.intra_bandwidth * PHYSICS.intra)
    )  # keys and values of 8 heads of 128, in 16 bits
    assert seconds(repeats_keys=True) - seconds(repeats_keys=False) == pytest.approx(3 * 3 * each)


def test_zero_three_of_2021_fetches_three_times_part_by_part_and_hides_nothing() -> None:
    """4 matrices for each of 3 passes and 12 gradients for a block, each a list of 64 views of 8 us, beside the ring."""
    split = Layout(shard=64, zero=3, recompute="full", sequence_parallel=False)
    wanted = job_of(LLAMA, split, 64, "deepspeed-zero3")
    ring = collectives.of(wanted.cluster, 64, 1, PHYSICS)
    whole = 2.0 * LLAMA.block_matrix_parameters  # bytes in 16 bits, of weights and of gradients
    calls = 3 * 4 + 12
    expected = 4 * whole * 63 / 64 / ring.rate + calls * (ring.hops + ring.call + 64 * 8e-6)
    assert micro_batch_seconds(wanted, PHYSICS).shard == pytest.approx(expected)
    kept = replace(wanted, layout=replace(split, recompute="none"))  # nothing is computed again: 2 passes
    less = whole * 63 / 64 / ring.rate + 4 * (ring.hops + ring.call + 64 * 8e-6)
    assert micro_batch_seconds(kept, PHYSICS).shard == pytest.approx(expected - less)


def test_deepspeeds_zero_one_sums_gradients_on_every_rank() -> None:
    """An all-reduce and a gather: 3 times the gradients' way round instead of 2, beside the hops."""
    framework = frameworks.find("megatron-deepspeed")
    assert framework.sums == "all"
    ring = collectives.of(ClusterSpec.of(H100, 64), 8, 8, PHYSICS)
    far = 7 / 8 / ring.rate
    assert collectives.summed(ring, 1e9, 1, "scatter") == pytest.approx(1e9 * far + ring.hops + ring.call)
    assert collectives.summed(ring, 1e9, 1, "all") == pytest.approx(2e9 * far + 2 * ring.hops + ring.call)
    split = Layout(shard=8, tensor=8, zero=1, recompute="full")
    own, every = (step(job_of(LLAMA, split, 8, replace(framework, sums=sums))).data for sums in SUMS)
    assert every / own == pytest.approx(1.5, rel=0.01)


LLAMA_405B = ModelConfig(
    vocabulary=128_256, layers=126, width=16_384, heads=128, kv_heads=8, head_dim=128, mlp_width=53_248, sequence_length=8192,
    tie_embeddings=False, qk_norm="none",
)  # fmt: skip


def llama3(micro_batches: int, **layout: Any) -> Job:
    data = 1024 // micro_batches * 2  # as table 4: 64 data ranks with 32 sequences each, 128 with 16
    whole = Layout(
        **{"shard": data, "tensor": 8, "pipeline": 16, "virtual": 8, "schedule": "interleaved", "zero": 2, **layout}
    )
    return job_of(LLAMA_405B, whole, data * micro_batches, "llama3")


def test_embedding_and_head_have_a_place_of_their_own_among_the_stages() -> None:
    job = llama3(16)
    ranks = ranks_by_cut(LLAMA_405B, parallel(job.layout), job.framework.cut)
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
    each = sum(activation_bytes_without_recompute(LLAMA_405B, job.framework, Split(8), 2).values())
    waiting = held.activations - held.kinds["backward"]
    assert waiting == pytest.approx(chunks * each * LLAMA_405B.sequence_length, rel=1e-3)


def test_sharded_gradients_wait_whole_of_one_stage_and_travel_after_each_round() -> None:
    """With zero 1 all fp32 gradients of a rank wait, with zero 2 those of a stage; they then travel once for each of two rounds."""
    two_rounds = llama3(32)
    rank = ranks_by_cut(LLAMA_405B, parallel(two_rounds.layout), "ends")[1]
    whole = 4.0 * 8 * LLAMA_405B.block_matrix_parameters / 8
    spared = state(two_rounds.with_layout(zero=1), rank).buffers - state(two_rounds, rank).buffers
    assert spared == pytest.approx(whole * 7 / 8, rel=0.2)

    def seconds(job: Job, scatter: Any) -> float:
        framework = replace(job.framework, scatter=scatter, data_overlap=0.0)
        return exchange_seconds(replace(job, framework=framework), 0.0, PHYSICS)

    assert seconds(llama3(16), "round") == seconds(llama3(16), "step")
    once = seconds(two_rounds, "step") - seconds(two_rounds, "micro-batch")  # the gradients alone, without new weights
    assert seconds(two_rounds, "round") == pytest.approx(seconds(two_rounds, "step") + once)
