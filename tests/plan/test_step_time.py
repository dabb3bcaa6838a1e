"""The time of a step: its arithmetic compared with closed forms, monotonicity, and published measurements."""

from dataclasses import replace
from typing import Any

import pytest

from bessemer.model.config import ModelConfig
from bessemer.model.flops import flops_per_token
from bessemer.plan import devices
from bessemer.plan.estimate import collectives, compute, frameworks
from bessemer.plan.estimate.compute import cast_bytes
from bessemer.plan.estimate.experts import BlockMatmul
from bessemer.plan.estimate.frameworks import ranks_by_cut
from bessemer.plan.estimate.job import PHYSICS, ClusterSpec, Job, Layout, parallel
from bessemer.plan.estimate.memory import memory, stages
from bessemer.plan.estimate.memory_parts import Split, activation_bytes_without_recompute, state
from bessemer.plan.estimate.micro_batch import micro_batch_seconds
from bessemer.plan.estimate.step import exchange_seconds, held_parameters, optimizer_seconds, refuse, step
from bessemer.plan.search import search
from tests.model.samples import ALL_BIASES
from tests.plan.plans import LLAMA, job_of

PARTS = (
    "matmuls", "attention", "elementwise", "host", "tensor", "context", "shard", "data", "pipeline", "bubble", "stragglers",
    "optimizer",
)  # fmt: skip


def gpt(hidden: int, layers: int, heads: int, vocabulary: int = 51_200) -> ModelConfig:
    return ModelConfig(
        vocabulary, layers, hidden, heads, heads, hidden // heads, 4 * hidden, 2048, norm="layer", **ALL_BIASES, qk_norm="none",
        positions="learned", activation="gelu_tanh", gated=False, tie_embeddings=True,
    )  # fmt: skip


def job(
    model: ModelConfig = LLAMA, device: str = "H100", batch: int = 256, framework: str = "megatron-core", **layout: Any
) -> Job:
    return job_of(model, Layout(**layout), batch, framework, device)


SPLITS: list[dict[str, Any]] = [
    {},
    {"tensor": 8},
    {"shard": 64, "zero": 3},
    {"replicate": 4, "shard": 16, "zero": 2},
    {"replicate": 16, "tensor": 4, "pipeline": 4},
    {"shard": 8, "zero": 1, "tensor": 2, "pipeline": 4, "virtual": 4, "schedule": "interleaved"},
    {"shard": 4, "zero": 3, "context": 4, "tensor": 2, "recompute": "full"},
    {"shard": 2, "pipeline": 4, "virtual": 2, "schedule": "zbv", "recompute": "selective"},
    {"tensor": 8, "micro_batch": 4},
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("framework", frameworks.FRAMEWORKS)
def test_the_parts_add_up_and_none_is_negative(split: dict[str, Any], framework: str) -> None:
    taken = step(job(framework=framework, **split))
    assert sum(getattr(taken, part) for part in PARTS) == pytest.approx(taken.seconds, rel=1e-9)
    assert all(getattr(taken, part) >= -1e-12 for part in PARTS), {part: getattr(taken, part) for part in PARTS}
    assert 0 < taken.mfu <= taken.hfu < 1


def test_flops_equal_those_of_the_model_and_recompute_adds_the_forward_pass() -> None:
    tokens = 256 * LLAMA.sequence_length
    plain, full = step(job(framework="megatron-core")), step(job(framework="megatron-core", recompute="full"))
    assert plain.model_flops == full.model_flops == pytest.approx(flops_per_token(LLAMA) * tokens)
    assert plain.hardware_flops == plain.model_flops
    head = 6.0 * LLAMA.vocabulary * LLAMA.width
    assert full.hardware_flops - full.model_flops == pytest.approx((flops_per_token(LLAMA) - head) / 3 * tokens)
    ours = step(job(framework="bessemer", recompute="selective"))  # keeps the results of matmuls and attention
    assert ours.hardware_flops == ours.model_flops
    # selective: Korthikanti et al. 2022, appendix A: 1 + s / (6 h) times, with attention not halved; ours has the causal half.
    model = gpt(12_288, 96, 96)
    part = step(job(model, "A100", framework="megatron-lm-2022", recompute="selective"))
    assert part.hardware_flops / part.model_flops == pytest.approx(1 + 2048 / (12 * 12_288), rel=0.01)


def test_a_product_is_bound_by_the_matrix_units_or_by_the_memory() -> None:
    device, how = devices.find("A100"), replace(PHYSICS, start=0.0, depth=0.0)
    large = compute.matmul(128 * 108, 8192, 16_384, "bf16", device, how)
    assert large == pytest.approx(
        2 * 128 * 108 * 8192 * 16_384 / (device.achievable_flops("bf16") * how.matmuls), rel=0.01
    )
    thin = compute.matmul(8, 16_384, 16_384, "bf16", device, how)
    assert thin == pytest.approx(2 * 16_384**2 / (device.bandwidth * how.bandwidth), rel=0.01)


def test_collectives_equal_the_closed_forms_of_a_ring() -> None:
    cluster = ClusterSpec.of(devices.find("H100"), 64)
    how = replace(PHYSICS, call=0.0, near=0.0, far=0.0, intra=1.0, inter=1.0)
    inside, across = collectives.of(cluster, 8, 1, how), collectives.of(cluster, 8, 8, how)
    assert collectives.gather(inside, 8e9) == pytest.approx(7 / 8 * 8e9 / 450e9)
    assert collectives.reduce(inside, 8e9) == pytest.approx(2 * 7 / 8 * 8e9 / 450e9)
    assert collectives.gather(across, 8e9) == pytest.approx(7 / 8 * 8e9 / 50e9)
    assert collectives.gather(collectives.of(cluster, 64, 1, how), 64e9) == pytest.approx(63 / 64 * 64e9 / 400e9)
    assert collectives.gather(collectives.of(cluster, 16, 4, how), 16e9) == pytest.approx(15 / 16 * 16e9 / 100e9)
    assert collectives.send(cluster, (0, 1), 4, 1e9, how) == pytest.approx(1 / 450)
    assert collectives.send(cluster, (1, 2), 4, 1e9, how) == pytest.approx(1 / 50)
    assert collectives.send(cluster, (1, 1), 4, 1e9, how) == 0
    # Ranks with a stride of 3: groups of 6 and 9 are on two nodes, and some of 3 and 6.
    assert [collectives.send(cluster, (k, k + 1), 3, 450e9, how) for k in range(3)] == pytest.approx([1, 9, 9])
    # Groups that do not divide a node's devices: 6 to 11 has two on one node, (6, 8, 10) has one.
    assert collectives.gather(collectives.of(cluster, 6, 1, how), 6e9) == pytest.approx(5 / 6 * 6e9 / 100e9)
    assert collectives.gather(collectives.of(cluster, 3, 2, how), 3e9) == pytest.approx(2 / 3 * 3e9 / 50e9)
    assert collectives.gather(collectives.of(cluster, 1, 1, how), 1e9) == 0
    slow = replace(how, near=1e-6, far=10e-6, call=3e-6)
    whole = collectives.of(cluster, 64, 1, slow)
    assert collectives.gather(whole, 64e9, calls=2) == pytest.approx(63 / 400 + 2 * (7 * 10e-6 + 56 * 1e-6 + 3e-6))


@pytest.mark.parametrize("framework", ["bessemer", "megatron-core", "deepseek-v3"])
@pytest.mark.parametrize(
    ("split", "slow"),
    [
        # By rank of the pipeline, each with 4 devices of a node of 8: every second boundary is between nodes.
        ({"shard": 4, "pipeline": 8}, 1),
        ({"shard": 4, "pipeline": 8, "schedule": "gpipe"}, 2),  # the two passes are sequential
        ({"shard": 4, "pipeline": 8, "virtual": 2, "schedule": "interleaved"}, 2),  # two stages on each
        ({"shard": 8, "pipeline": 4}, 2),  # all boundaries are between nodes, and a stage has two of them
        ({"shard": 32}, 0),
        ({"shard": 1, "tensor": 2, "pipeline": 4}, 0),  # one node
    ],
    ids=str,
)
def test_a_boundary_between_stages_takes_as_long_as_its_link(
    split: dict[str, Any], slow: int, framework: str
) -> None:  # fmt: skip
    """The network is so slow that only the messages count. `slow` is the number of messages between nodes that one stage waits
    for per micro-batch.
    """
    planned = job(batch=1024, framework=framework, **split)
    cluster = replace(planned.cluster, inter_bandwidth=1e6)
    taken = step(replace(planned, cluster=cluster))
    whole = 2 * LLAMA.sequence_length * LLAMA.width / planned.layout.tensor
    message = whole / (cluster.inter_bandwidth * PHYSICS.inter)
    expected = slow * message * planned.micro_batches
    assert taken.pipeline + taken.bubble == pytest.approx(expected, rel=0.1, abs=message)


@pytest.mark.parametrize(
    "better",
    [
        {"bandwidth": 2.0}, {"intra_bandwidth": 2.0}, {"inter_bandwidth": 2.0}, {"matmul": 1.2},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_better_device_is_never_slower(better: dict[str, float], split: dict[str, Any]) -> None:
    before = job(**split)
    device = before.cluster.device
    device = replace(device, **{key: getattr(device, key) * factor for key, factor in better.items()})
    links = {key: getattr(before.cluster, key) * better.get(key, 1.0) for key in ("intra_bandwidth", "inter_bandwidth")}
    after = replace(before, cluster=replace(before.cluster, device=device, **links))
    assert step(after).seconds <= step(before).seconds


def test_host_time_depends_only_on_the_speed_of_the_host() -> None:
    small = ModelConfig(50_304, 12, 256, 4, 4, 64, 1024, 128, qk_norm="none")
    slow = step(job(small, batch=8, framework="nanotron"))
    framework = frameworks.find("nanotron")
    host = 8 * 12 * 2 * framework.kernels * framework.launch
    assert slow.host + slow.matmuls + slow.attention + slow.elementwise == pytest.approx(host, rel=0.1)
    fast = step(job(small, batch=8, framework="nanotron"), replace(PHYSICS, launch=0.0))
    assert fast.host == 0 < slow.host


def test_gradients_of_replicas_and_shards_travel_once_or_per_micro_batch() -> None:
    how = replace(PHYSICS, call=0.0, near=0.0, far=0.0, spread=0.0)
    plain = job(framework="megatron-core-sync", replicate=8)
    held = held_parameters(plain)[0]
    assert held == LLAMA.layers * LLAMA.block_matrix_parameters + 2 * LLAMA.vocabulary * LLAMA.width
    rate = 450e9 * how.intra
    assert exchange_seconds(plain, 0.0, how) == pytest.approx(2 * 7 / 8 * 4 * held / rate)
    sharded = plain.with_layout(replicate=1, shard=8, zero=1)
    assert exchange_seconds(sharded, 0.0, how) == pytest.approx(7 / 8 * (4 + 2) * held / rate)
    fsdp = replace(plain.with_layout(replicate=1, shard=8, zero=3), framework=frameworks.find("torchtitan"))
    assert exchange_seconds(fsdp, 0.0, how) == 0
    one, two = (step(replace(fsdp, batch=8 * n), how).shard for n in (1, 2))
    assert two == pytest.approx(2 * one)


def test_zero_stages_divide_the_optimizer_time() -> None:
    how = replace(PHYSICS, step=0.0)
    whole = job(framework="megatron-core-sync", replicate=8)
    held = held_parameters(whole)[0]
    # Adam in mixed precision: gradient read, master and moments read and written, weight written; 4 passes over gradients in
    # addition.
    bytes_each = 4 + 2 * (4 + 8) + 2 + 4 * 4
    assert optimizer_seconds(whole, how) == pytest.approx(held * bytes_each / (3350e9 * how.bandwidth))
    sharded = whole.with_layout(replicate=1, shard=8, zero=3)
    assert optimizer_seconds(sharded, how) == pytest.approx(optimizer_seconds(whole, how) / 8)


# Narayanan et al. 2021, table 1: parameters in 1e9 and TFLOP/s per GPU, including the recomputed forward pass; layers, hidden,
# heads, tensor, pipeline, data, batch; micro-batch and stages per device from examples/sc21/run_table_1.sh of Megatron-LM.
SC21 = [
    (1.7, 137, 24, 2304, 24, 1, 1, 32, 512, 16, 1),
    (76.1, 140, 60, 10240, 80, 8, 4, 32, 1792, 2, 3),
    (529.6, 163, 105, 20480, 128, 8, 35, 9, 2520, 1, 3),
    (1008.0, 163, 128, 25600, 160, 8, 64, 6, 3072, 1, 1),
]


@pytest.mark.parametrize("row", SC21)
def test_steps_agree_with_the_sc21_table_within_ten_percent(row: tuple[Any, ...]) -> None:
    size, tflops, layers, hidden, heads, t, p, d, batch, micro, v = row
    model = gpt(hidden, layers, heads)
    assert model.parameters == pytest.approx(size * 1e9, rel=0.03)  # the paper's figures are rounded
    flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51_200 / (16 * layers * hidden))
    layout = Layout(
        replicate=d, tensor=t, pipeline=p, virtual=v, schedule="interleaved" if v > 1 else "1f1b", micro_batch=micro, zero=0,
        recompute="full", sequence_parallel=False,
    )  # fmt: skip
    taken = step(job_of(model, layout, batch, "megatron-lm-2021", "A100", "fp16")).seconds
    assert taken == pytest.approx(flops / (tflops * 1e12 * layout.world), rel=0.10)


# torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: Llama 3.1 8B, tokens/s for each GPU.
TITAN = [(8, "torchtitan-eager", "bf16", 5762), (8, "torchtitan", "bf16", 6667), (8, "torchtitan", "fp8", 8532),
         (128, "torchtitan-eager", "bf16", 5605), (128, "torchtitan", "bf16", 6514), (128, "torchtitan", "fp8", 8380)]  # fmt: skip


@pytest.mark.parametrize(("gpus", "framework", "precision", "rate"), TITAN)
def test_steps_agree_with_torchtitans_table_within_ten_percent(
    gpus: int, framework: str, precision: Any, rate: float
) -> None:
    h100 = devices.find("H100")
    slower = (5 / 7) ** (1 / 3)  # 500 of 700 W
    device = replace(
        h100, memory=96e9, bandwidth=2.4e12, matmul=h100.matmul * slower, matmul_fp8=(h100.matmul_fp8 or 0) * slower
    )  # fmt: skip
    layout = Layout(shard=gpus, zero=3, micro_batch=2, recompute="selective")
    wanted = Job(
        LLAMA, layout, ClusterSpec(device, gpus, 8, 450e9, 50e9), 2 * gpus, precision, frameworks.find(framework)
    )
    assert step(wanted).tokens_per_second / gpus == pytest.approx(rate, rel=0.10)


@pytest.mark.parametrize("name", devices.catalogue())
def test_every_device_of_the_catalogue_has_a_step_time(name: str) -> None:
    device = devices.find(name)
    for precision in device.flops:
        taken = step(job_of(LLAMA, Layout(shard=8, zero=3), 32, device=name, precision=precision))
        assert 0.02 < taken.mfu < device.matmul


H100 = devices.find("H100")
SUMS: tuple[Any, Any] = ("scatter", "all")
TOKENS, WIDTH = 2 * 8192, 4096


def torch_job(
    precision: Any = "bf16", changes: dict[str, Any] | None = None, micro_batch: int = 2, **layout: Any
) -> Job:
    layout = {"tensor": 8, "recompute": "none", "zero": 0, **layout}
    wanted = Layout(micro_batch=micro_batch, **layout)
    framework = replace(frameworks.find("torchtitan"), **(changes or {}))
    return job_of(LLAMA, wanted, micro_batch * wanted.data, framework, precision=precision)


def pair() -> float:
    """Return the seconds of a gather and a scatter of one activation in 16 bits among 8 ranks of a node."""
    return collectives.reduce(collectives.of(ClusterSpec.of(H100, 8), 8, 1, PHYSICS), 2.0 * TOKENS * WIDTH)


def tensor(wanted: Job) -> float:
    return micro_batch_seconds(wanted, PHYSICS).tensor


def test_selective_recompute_repeats_gathers_but_not_scatters() -> None:
    """torchtitan's list of saved results has reduce_scatter but not all_gather: 2 of a block's 4 collectives run again."""
    assert tensor(torch_job()) == pytest.approx(4 * pair())
    assert tensor(torch_job(recompute="selective")) == pytest.approx(5 * pair())
    # Full: all except the scatter after the last matmul.
    assert tensor(torch_job(recompute="full")) == pytest.approx(5.5 * pair())
    assert tensor(torch_job(recompute="full", changes={"early_stop": False})) == pytest.approx(6 * pair())
    # Without sequence parallelism an all-reduce cannot be split into its gather.
    assert tensor(torch_job(recompute="selective", sequence_parallel=False)) == pytest.approx(4 * pair())
    assert tensor(torch_job(recompute="full", sequence_parallel=False)) == pytest.approx(5 * pair())


def test_pytorch_overlaps_only_some_collectives_with_matmuls() -> None:
    """It pairs everything in the forward pass and the gathers in the backward pass: halves of 3 of 4 pairs; with a scale per row
    only the forward scatters.
    """
    shows = {"tensor_overlap": 1.0}
    assert tensor(torch_job(changes={**shows, "paired": "all"})) == pytest.approx(0.0, abs=1e-12)
    assert tensor(torch_job(changes=shows)) == pytest.approx(1 * pair())
    assert tensor(torch_job("fp8", {**shows, "fp8": "row"})) == pytest.approx(3 * pair())


def test_sequences_gathered_together_are_copied_into_place() -> None:
    bytes_ = 2 * 4 * 2 * (2.0 * TOKENS * WIDTH)  # both passes, 4 collectives, read and written
    added = step(torch_job()).elementwise - step(torch_job(changes={"copies": False})).elementwise
    assert added == pytest.approx(32 * bytes_ / (H100.bandwidth * PHYSICS.bandwidth))
    one = step(torch_job(micro_batch=1)).elementwise
    # A single sequence is already in place.
    assert one == step(torch_job(micro_batch=1, changes={"copies": False})).elementwise


def test_casts_move_the_bytes_that_torchao_reads_and_writes() -> None:
    """10 tokens, width 8, matmuls (8, 6), (4, 8), (8, 12), (6, 8) on 2 ranks: inner 26, outer 34, weights 224."""
    shapes = [BlockMatmul(10, *sizes) for sizes in ((8, 6), (4, 8), (8, 12), (6, 8))]
    assert cast_bytes(10, shapes, 8, 1, "tensor") == (5 * (260 + 224), 5 * 340 + 2 * (340 + 260) + 2 * 224)
    # Each cast on 2 ranks before it is gathered: 8 less of the read input, and of gradients.
    assert cast_bytes(10, shapes, 8, 2, "tensor") == (5 * (180 + 224), 5 * 260 + 2 * (340 + 260) + 2 * 224)
    # Rows: input, weight and gradient are cast along both dimensions, after the gather.
    for split in (1, 2):
        assert cast_bytes(10, shapes, 8, split, "row") == (5 * (260 + 224), 10 * 340 + 5 * (260 + 224))


def test_a_ring_sends_repeated_keys_for_all_query_heads() -> None:
    """Llama 3 8B has 4 query heads per key head. Keys travel once forward and twice backward; no overlap."""

    def seconds(*, repeats_keys: bool) -> float:
        changes = {"context": "gather", "repeats_keys": repeats_keys}
        wanted = torch_job(changes=changes, tensor=1, context=8, micro_batch=1)
        return micro_batch_seconds(wanted, PHYSICS).context

    # Keys and values of 8 heads of 128, in 16 bits.
    each = 2 * 2 * 8192 * 1024 * 7 / 8 / (H100.intra_bandwidth * PHYSICS.intra)
    assert seconds(repeats_keys=True) - seconds(repeats_keys=False) == pytest.approx(3 * 3 * each)


def test_zero_three_of_2021_fetches_weights_three_times_without_overlap() -> None:
    """4 matrices for each of 3 passes and 12 gradients per block, each a list of 64 views of 8 us, in addition to the ring."""
    split = Layout(shard=64, zero=3, recompute="full", sequence_parallel=False)
    wanted = job_of(LLAMA, split, 64, "deepspeed-zero3")
    ring = collectives.of(wanted.cluster, 64, 1, PHYSICS)
    whole = 2.0 * LLAMA.block_matrix_parameters  # bytes in 16 bits, of weights and of gradients
    calls = 3 * 4 + 12
    expected = 4 * whole * 63 / 64 / ring.rate + calls * (ring.hops + ring.call + 64 * 8e-6)
    assert micro_batch_seconds(wanted, PHYSICS).shard == pytest.approx(expected)
    kept = replace(wanted, layout=replace(split, recompute="none"))  # nothing is recomputed: 2 passes
    less = whole * 63 / 64 / ring.rate + 4 * (ring.hops + ring.call + 64 * 8e-6)
    assert micro_batch_seconds(kept, PHYSICS).shard == pytest.approx(expected - less)


def test_deepspeeds_zero_one_sums_gradients_on_every_rank() -> None:
    """An all-reduce and a gather: 3 times the ring time of the gradients instead of 2, in addition to the hops."""
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
    data = 1024 // micro_batches * 2  # as in table 4: 64 data ranks with 32 sequences each, 128 with 16
    whole = Layout(
        **{"shard": data, "tensor": 8, "pipeline": 16, "virtual": 8, "schedule": "interleaved", "zero": 2, **layout}
    )
    return job_of(LLAMA_405B, whole, data * micro_batches, "llama3")


def test_embedding_and_head_have_their_own_place_among_the_stages() -> None:
    given = llama3(16)
    ranks = ranks_by_cut(LLAMA_405B, parallel(given.layout), given.framework.cut)
    assert [rank.blocks for rank in ranks] == [7, *[8] * 14, 7]
    assert refuse(given) is None
    assert "126 blocks" in (refuse(replace(given, framework=frameworks.find("megatron-core"))) or "")
    assert "126 blocks" in (refuse(llama3(16, virtual=9)) or "")


def test_the_search_tries_as_many_stages_as_the_program_allows() -> None:
    fixed = frozenset({"tensor", "pipeline", "shard", "zero", "schedule", "micro_batch"})
    found = search(llama3(16), fixed)
    assert 8 in {one.job.layout.virtual for one in found.ranked} | {one.layout.virtual for one in found.rejected}


@pytest.mark.parametrize(("micro_batches", "chunks"), [(16, 16 * 8), (32, 2 * 14 + 7 * 16 + 1)])
def test_the_second_rank_has_the_most_memory_for_stages_in_flight(micro_batches: int, chunks: int) -> None:
    given = llama3(micro_batches)
    held = memory(given)
    assert held.place == 1 and held.total == max(stage.total for stage in stages(given))
    each = sum(activation_bytes_without_recompute(LLAMA_405B, given.framework, Split(8), 2).values())
    waiting = held.activations - held.kinds["backward"]
    assert waiting == pytest.approx(chunks * each * LLAMA_405B.sequence_length, rel=1e-3)


def test_sharded_gradients_are_kept_per_stage_and_reduced_after_each_round() -> None:
    """ZeRO 1 keeps all fp32 gradients of a rank; ZeRO 2 keeps those of a stage, which travel once for each of two rounds."""
    two_rounds = llama3(32)
    rank = ranks_by_cut(LLAMA_405B, parallel(two_rounds.layout), "ends")[1]
    whole = 4.0 * 8 * LLAMA_405B.block_matrix_parameters / 8
    spared = state(two_rounds.with_layout(zero=1), rank).buffers - state(two_rounds, rank).buffers
    assert spared == pytest.approx(whole * 7 / 8, rel=0.2)

    def seconds(given: Job, scatter: Any) -> float:
        framework = replace(given.framework, scatter=scatter, data_overlap=0.0)
        return exchange_seconds(replace(given, framework=framework), 0.0, PHYSICS)

    assert seconds(llama3(16), "round") == seconds(llama3(16), "step")
    once = seconds(two_rounds, "step") - seconds(two_rounds, "micro-batch")  # only the gradients, without new weights
    assert seconds(two_rounds, "round") == pytest.approx(seconds(two_rounds, "step") + once)
