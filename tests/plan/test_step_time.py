"""The time of a step: its arithmetic against closed forms, what must not make it slower, and published measurements."""

from dataclasses import replace
from typing import Any

import pytest

from bessemer.model.config import ModelConfig
from bessemer.model.flops import flops_per_token
from bessemer.plan import devices
from bessemer.plan.estimate import collectives, compute, frameworks
from bessemer.plan.estimate.job import PHYSICS, ClusterSpec, Job, Layout
from bessemer.plan.estimate.step import exchange_seconds, held_parameters, optimizer_seconds, step
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


def test_flops_are_those_of_the_model_and_recompute_adds_the_forward_pass() -> None:
    tokens = 256 * LLAMA.sequence_length
    plain, full = step(job(framework="megatron-core")), step(job(framework="megatron-core", recompute="full"))
    assert plain.model_flops == full.model_flops == pytest.approx(flops_per_token(LLAMA) * tokens)
    assert plain.hardware_flops == plain.model_flops
    head = 6.0 * LLAMA.vocabulary * LLAMA.width
    assert full.hardware_flops - full.model_flops == pytest.approx((flops_per_token(LLAMA) - head) / 3 * tokens)
    ours = step(job(framework="bessemer", recompute="selective"))  # keeps what matmuls and attention give
    assert ours.hardware_flops == ours.model_flops
    # selective: Korthikanti et al. 2022, appendix A: 1 + s / (6 h) times, attention not halved; ours has the causal half.
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


def test_collectives_are_the_closed_forms_of_a_ring() -> None:
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
    # Ranks 3 apart: those of 6 and 9 are on two nodes, of 3 and 6 some are.
    assert [collectives.send(cluster, (k, k + 1), 3, 450e9, how) for k in range(3)] == pytest.approx([1, 9, 9])
    # Groups that a node's devices cannot be divided by: 6 to 11 has two on one node, (6, 8, 10) has one.
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
        # By rank of the pipeline, each 4 devices of a node of 8: every second boundary is between nodes.
        ({"shard": 4, "pipeline": 8}, 1),
        ({"shard": 4, "pipeline": 8, "schedule": "gpipe"}, 2),  # the two passes are one after the other
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
    """Against the time of the messages alone, when the network is so slow that nothing else counts. `slow`: messages between nodes
    that one stage waits for in a micro-batch."""
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


def test_waiting_for_the_host_is_the_host_alone_and_goes_with_its_speed() -> None:
    small = ModelConfig(50_304, 12, 256, 4, 4, 64, 1024, 128, qk_norm="none")
    slow = step(job(small, batch=8, framework="nanotron"))
    framework = frameworks.find("nanotron")
    host = 8 * 12 * 2 * framework.kernels * framework.launch
    assert slow.host + slow.matmuls + slow.attention + slow.elementwise == pytest.approx(host, rel=0.1)
    fast = step(job(small, batch=8, framework="nanotron"), replace(PHYSICS, launch=0.0))
    assert fast.host == 0 < slow.host


def test_gradients_of_copies_and_of_shards_travel_once_or_for_each_micro_batch() -> None:
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


def test_the_optimizers_time_is_divided_by_zero() -> None:
    how = replace(PHYSICS, step=0.0)
    whole = job(framework="megatron-core-sync", replicate=8)
    held = held_parameters(whole)[0]
    # Adam in mixed precision: gradient read, master and moments both ways, weight written; 4 passes over gradients besides.
    bytes_each = 4 + 2 * (4 + 8) + 2 + 4 * 4
    assert optimizer_seconds(whole, how) == pytest.approx(held * bytes_each / (3350e9 * how.bandwidth))
    sharded = whole.with_layout(replicate=1, shard=8, zero=3)
    assert optimizer_seconds(sharded, how) == pytest.approx(optimizer_seconds(whole, how) / 8)


# Narayanan et al. 2021, table 1: parameters in 1e9 and what a GPU does in TFLOP/s, the recomputed forward pass counted; layers,
# hidden, heads, tensor, pipeline, data, batch; micro-batch and stages a device from examples/sc21/run_table_1.sh of Megatron-LM.
SC21 = [
    (1.7, 137, 24, 2304, 24, 1, 1, 32, 512, 16, 1),
    (76.1, 140, 60, 10240, 80, 8, 4, 32, 1792, 2, 3),
    (529.6, 163, 105, 20480, 128, 8, 35, 9, 2520, 1, 3),
    (1008.0, 163, 128, 25600, 160, 8, 64, 6, 3072, 1, 1),
]


@pytest.mark.parametrize("row", SC21)
def test_sc21s_table_is_met_within_ten_percent(row: tuple[Any, ...]) -> None:
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
def test_torchtitans_table_is_met_within_ten_percent(gpus: int, framework: str, precision: Any, rate: float) -> None:
    h100 = devices.find("H100")
    slower = (5 / 7) ** (1 / 3)  # 500 W of 700
    device = replace(
        h100, memory=96e9, bandwidth=2.4e12, matmul=h100.matmul * slower, matmul_fp8=(h100.matmul_fp8 or 0) * slower
    )  # fmt: skip
    layout = Layout(shard=gpus, zero=3, micro_batch=2, recompute="selective")
    wanted = Job(
        LLAMA, layout, ClusterSpec(device, gpus, 8, 450e9, 50e9), 2 * gpus, precision, frameworks.find(framework)
    )
    assert step(wanted).tokens_per_second / gpus == pytest.approx(rate, rel=0.10)


@pytest.mark.parametrize("name", devices.catalogue())
def test_every_device_of_the_catalogue_makes_a_step(name: str) -> None:
    device = devices.find(name)
    for precision in device.flops:
        taken = step(job_of(LLAMA, Layout(shard=8, zero=3), 32, device=name, precision=precision))
        assert 0.02 < taken.mfu < device.matmul
