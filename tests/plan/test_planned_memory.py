"""The planned memory of a job: its state, its stages, and a run of this program compared with its own plan."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from bessemer.common.errors import InputError
from bessemer.distributed.element_bytes import ElementBytes
from bessemer.distributed.memory import peak_memory
from bessemer.distributed.schedules import ScheduleActions, actions, generate, micro_batches_in_flight
from bessemer.distributed.shards import padded_elements, padding
from bessemer.distributed.stages import _split_alike_blocks, split_blocks
from bessemer.model.config import ModelConfig
from bessemer.model.flops import flops_per_token
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.frameworks import Framework, blocks_of_stages
from bessemer.plan.estimate.job import Job, Layout, parallel
from bessemer.plan.estimate.memory import memory, stages
from bessemer.plan.estimate.memory_parts import Split, activation_bytes_without_recompute, each, kept
from bessemer.plan.estimate.step import step
from bessemer.recipe import Parallel, Train, parse
from tests.model.samples import ALL_BIASES
from tests.plan.plans import LLAMA, job_of

GB = 1e9
BF16 = ElementBytes(2, cast=2)


MODEL = ModelConfig(
    vocabulary=32_000, layers=16, width=512, heads=8, kv_heads=4, head_dim=64, mlp_width=1536, sequence_length=1024
)  # fmt: skip


def job(layout: Layout, framework: str = "megatron-core", config: ModelConfig = MODEL, precision: str = "bf16") -> Job:
    return job_of(config, layout, 8 * layout.data * layout.micro_batch, framework, precision=precision)


@pytest.mark.parametrize(
    ("ranks", "stage", "gigabytes"),
    # Rajbhandari et al. 2020, table 1 and figure 1, 7.5B parameters.
    [
        (1, 3, 120),
        (4, 1, 52.5),
        (4, 2, 41.25),
        (4, 3, 30),
        (64, 1, 31.4),
        (64, 2, 16.6),
        (64, 3, 1.88),
        (1024, 3, 0.12),
    ],
)
def test_state_equals_table_1_of_the_zero_paper(ranks: int, stage: int, gigabytes: float) -> None:
    framework = Framework("zero", gradient_bytes=2.0)
    assert 7.5 * sum(each(framework, stage, ranks)) == pytest.approx(gigabytes, rel=0.03)


def test_the_parts_of_a_plan_contain_its_state() -> None:
    """One device with Megatron's precisions, no recompute: 2 + 4 + 4 + 8 bytes per parameter, and the remainder with ZeRO 1."""
    config = MODEL
    alone = memory(job(Layout(zero=0), "megatron-core"))
    found = (alone.weights, alone.gradients, alone.optimizer)
    assert found == pytest.approx([k * config.parameters for k in (2, 4, 12)], rel=1e-6)
    divided = memory(job(Layout(shard=8, zero=1), "megatron-core"))
    assert divided.weights == alone.weights and divided.gradients == alone.gradients
    assert divided.optimizer == pytest.approx(alone.optimizer / 8, abs=8)
    assert memory(job(Layout(shard=8, zero=2))).gradients == pytest.approx(alone.gradients / 8, abs=8)
    third = memory(job(Layout(shard=8, zero=3)))
    assert third.weights == pytest.approx(alone.weights / 8, abs=8) and third.buffers > divided.buffers
    assert memory(job(Layout(replicate=8, zero=1))).optimizer == alone.optimizer


def test_fp32_has_no_master_copies() -> None:
    found = memory(job(Layout(zero=0), "megatron-core", precision="fp32"))
    held = (found.weights, found.optimizer)
    assert held == pytest.approx([k * MODEL.parameters for k in (4, 8)], rel=1e-6)
    assert found.kinds["stream"] == 2 * memory(job(Layout(zero=0), "megatron-core")).kinds["stream"]


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zbv", 2), ("dualpipev", 2)]


def peak_in_flight(schedule: ScheduleActions, rank: int) -> float:
    """Count the micro-batches whose activations a rank holds; a split backward ends with W."""
    changes = [{"F": 1, "B": -1, "W": -1, "I": 0}[action.kind] for action in actions(schedule.steps[rank])]
    return max(itertools.accumulate(changes)) / schedule.virtual


@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
def test_the_formula_of_micro_batches_in_flight_equals_a_count_of_the_schedule(name: str, virtual: int) -> None:
    """Compare every rank, also with fewer micro-batches than fill the pipeline; for zbv the formula adds 1/2."""
    compared = 0
    for ranks in (2, 3, 4, 8):
        for micro_batches in range(1, 2 * ranks + 9):
            try:
                schedule = generate(name, ranks, micro_batches, virtual)
            except InputError:
                continue
            for rank in range(ranks):
                counted = peak_in_flight(schedule, rank) + (0.5 if name == "zbv" else 0.0)
                found = micro_batches_in_flight(name, ranks, virtual, rank, micro_batches)
                assert found == min(counted, micro_batches), (ranks, micro_batches, rank)
                compared += 1
    assert compared > 100


def test_the_first_and_last_stage_have_embedding_and_head() -> None:
    config = MODEL.with_changes(tie_embeddings=True)
    table = config.vocabulary * config.width
    found = stages(job(Layout(pipeline=4, zero=0), "megatron-core", config))
    inner = found[1].weights
    assert [held.logits > 0 for held in found] == [False, False, False, True]
    assert found[0].weights - inner == 2 * table and found[3].weights - inner >= 2 * table  # tied: on both
    assert memory(job(Layout(pipeline=4, zero=0), "megatron-core", config)) == max(found, key=lambda held: held.total)
    v = stages(job(Layout(pipeline=4, schedule="zbv", virtual=2, zero=0), "megatron-core", config))
    assert [held.logits > 0 for held in v] == [True, False, False, False]


def test_the_fast_split_equals_the_balanced_one() -> None:
    draw = random.Random(0)
    for _ in range(600):
        config = MODEL.with_changes(
            layers=draw.randint(2, 24), vocabulary=draw.choice([256, 2_000, 8_000, 32_000, 128_000, 512_000])
        )
        count = draw.randint(1, config.layers)
        block = flops_per_token(config) - 6.0 * config.head_matrix_parameters
        costs = [block / config.layers] * config.layers
        expected = split_blocks(costs, 2.0 * config.width, 6.0 * config.head_matrix_parameters, count)
        assert blocks_of_stages(config, count, "balanced") == tuple(map(len, expected)), (config.layers, count)
    # Ties, which no configuration has: the later stages are larger.
    for embedding, head, layers in itertools.product((0.0, 0.3), (0.0, 0.5, 6.0), range(2, 16)):
        for count in range(2, min(layers, 9) + 1):
            expected = split_blocks((1.0,) * layers, embedding, head, count)
            assert _split_alike_blocks(layers, 1.0, embedding, head, count) == tuple(map(len, expected)), (
                layers,
                count,
            )


@pytest.mark.parametrize(
    ("cut", "layers", "count", "expected"),
    [
        ("even", 30, 4, (8, 8, 7, 7)),
        # "the last stage has 1 block, while the rest have 7" (BLOOM's chronicles)
        ("ceiling", 78, 12, (7,) * 11 + (1,)),
        ("ends", 106, 12, (8, *(9,) * 10, 8)),
        ("middle", 126, 8, (15, *(16,) * 6, 15)),
    ],
)
def test_stage_splits_of_other_programs(cut: Any, layers: int, count: int, expected: tuple[int, ...]) -> None:
    assert blocks_of_stages(MODEL.with_changes(layers=layers), count, cut) == expected


OURS = [
    Layout(),
    Layout(replicate=8, zero=1),
    Layout(shard=8, zero=1),
    Layout(shard=8, zero=2),
    Layout(shard=8, zero=3, recompute="full"),
    Layout(shard=4, tensor=2, zero=3, recompute="selective", micro_batch=2),
    Layout(replicate=2, shard=2, tensor=2, pipeline=4, zero=1),
    Layout(shard=2, context=4, zero=3),
    Layout(pipeline=4, virtual=2, schedule="interleaved", shard=2, zero=2, recompute="full"),
    Layout(pipeline=4, virtual=2, schedule="zbv", zero=1),
]


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp8"])
@pytest.mark.parametrize("layout", OURS)
def test_planned_memory_of_this_program_equals_the_plan_of_a_run(layout: Layout, precision: Any) -> None:
    config = MODEL.with_changes(sequence_length=2048)
    given = job(layout, "bessemer", config, precision=precision)
    text = (
        f'[run]\nname = "x"\n[tokens]\nsequence_length = {config.sequence_length}\n[model]\nlayers = {config.layers}\n'
        f"width = {config.width}\nheads = {config.heads}\n[train]\nsteps = 1\nmicro_batch = {layout.micro_batch}\n"
        f'global_batch_tokens = {given.tokens}\nprecision = "{precision}"\nrecompute = "{layout.recompute}"\n'
    )
    recipe = parse(text, "x").model_copy(update={"parallel": parallel(layout)})
    recomputed = 0 if layout.recompute == "none" else config.layers
    width, cast = (4, 0) if precision == "fp32" else (2, 2 if precision == "bf16" else 0)
    bytes_ = ElementBytes(width, cast=cast)
    theirs = peak_memory(recipe.train, recipe.parallel, config, bytes_, recomputed_per_rank=recomputed, is_cuda=True)
    ours = memory(given)
    assert ours.allocated == theirs.total
    named = (ours.weights, ours.gradients, ours.optimizer, ours.activations, ours.logits, ours.buffers)
    assert named == (
        theirs.weights, theirs.gradients, theirs.optimizer, theirs.activations, theirs.logits,
        theirs.unsharded_weights,
    )  # fmt: skip


def test_tensors_offloaded_by_fsdp_are_not_on_the_device() -> None:
    config = MODEL
    recipe = parse(
        'run.name = "t"\ntokens.sequence_length = 1024\n[train]\nsteps = 1\nglobal_batch_tokens = 8192\nmicro_batch = 1',
        "t",
    )
    held = {
        offload: peak_memory(recipe.train, Parallel(shard=8, offload=offload), config, BF16, is_cuda=True)
        for offload in (False, True)
    }
    assert held[True].weights == held[True].optimizer == 0 < held[False].weights
    assert held[False].gradients - held[True].gradients == held[False].weights, (
        "the shard, but not what is being reduced"
    )
    assert held[True].activations == held[False].activations
    assert held[True].unsharded_weights == held[False].unsharded_weights > 0


@pytest.mark.parametrize("zero", [1, 3])
def test_unsharded_gradients_are_not_offloaded(zero: Any) -> None:
    """ZeRO 1 adds the whole gradients of several micro-batches in fp32 before any shard of them exists."""
    text = 'run.name = "t"\ntokens.sequence_length = 1024\n[train]\nsteps = 1\nglobal_batch_tokens = 32768\nmicro_batch = 1'
    config, train = MODEL, parse(text, "t").train
    held = peak_memory(train, Parallel(shard=8, zero=zero, offload=True), config, BF16, is_cuda=True)
    shard = 4 * config.parameters // 8
    assert held.gradients > 4 * config.parameters if zero == 1 else held.gradients < 2 * shard


FOUR_BLOCKS = LLAMA.with_changes(vocabulary=1024, layers=4, sequence_length=4096)


def test_padding_follows_the_split_dimension() -> None:
    assert padded_elements((8, 6, 128, 4096), 32) == 8 * 6 * 128 * 4096  # 128 is divisible
    assert padded_elements((8, 6, 128, 4096), 96) == 96 * 6 * 128 * 4096  # 8 processes of 96 have a part
    assert padded_elements((2, 14_336, 4096), 96) == 96 * 14_336 * 4096  # 2 processes have a part
    assert padded_elements((4096, 14_336), 96) == 43 * 96 * 14_336
    assert padding(FOUR_BLOCKS, 1, 32) == 1.0
    assert padding(FOUR_BLOCKS, 2, 96) == 1.0  # require_shards rejects it


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_padded_weights_cost_memory_and_time(zero: int) -> None:
    """Compared with the same number of devices as replicas of evenly divided shards; a program without padding has no cost."""
    uneven = Layout(shard=96, zero=zero)
    even = replace(uneven, replicate=3, shard=32)
    ours, theirs = (
        [job_of(FOUR_BLOCKS, layout, 192, name) for layout in (uneven, even)] for name in ("bessemer", "torchtitan")
    )
    factor = padding(FOUR_BLOCKS, 1, 96)
    assert factor > 20
    held = [memory(one) for one in ours]
    assert held[0].optimizer > 0.8 * factor / 3 * held[1].optimizer and held[0].buffers > 10 * held[1].buffers
    assert step(ours[0]).seconds > 1.5 * step(ours[1]).seconds
    assert memory(theirs[0]).optimizer < memory(theirs[1]).optimizer
    assert step(theirs[0]).seconds < 1.1 * step(theirs[1]).seconds


ROWS, LENGTH = 2, 128


def test_a_gpu_plan_counts_intermediate_tensors_unless_blocks_are_compiled() -> None:
    model = MODEL.with_changes(
        vocabulary=512, layers=20, width=256, heads=4, kv_heads=2, mlp_width=704, sequence_length=LENGTH
    )
    held = {
        compile_: peak_memory(
            Train(micro_batch=ROWS, global_batch_tokens=ROWS * LENGTH, compile=compile_), Parallel(), model, BF16, is_cuda=True
        ).activations
        for compile_ in ("off", "auto")
    }  # fmt: skip
    tokens = ROWS * LENGTH
    per_block = (held["off"] - held["auto"]) / 20
    # Norms, attention with its joined matmul, MLP, counted manually.
    compiled = 2 * (4 * 256 + 512 + 2 * 256 + 512 + 3 * 704)
    assert per_block == pytest.approx(tokens * (sum(part.eager_bytes for part in model.sublayers) - compiled))


SEQUENCE, WIDTH, HEADS = 48, 64, 4
SWIGLU_WITHOUT_BIASES = {"gated": True, "activation": "silu", **dict.fromkeys(ALL_BIASES, False)}
UNFUSED = Framework("unfused", attention="unfused", dropout=True)


def model(**changes: object) -> ModelConfig:
    values: dict[str, object] = dict(
        vocabulary=512, layers=2, width=WIDTH, heads=HEADS, kv_heads=HEADS, head_dim=WIDTH // HEADS, mlp_width=4 * WIDTH,
        sequence_length=SEQUENCE, qk_norm="none", activation="gelu", gated=False, norm="layer", **ALL_BIASES,
    )  # fmt: skip
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_activations_equal_table_2_of_korthikanti(tensor: int) -> None:
    """Published bytes of a layer for s b h = 1 token x h, 16 bits (Korthikanti et al. 2022, table 2)."""
    s, h, a, t = 2048, 6144, 64, tensor
    config = model(width=h, heads=a, kv_heads=a, head_dim=h // a, mlp_width=4 * h, sequence_length=s)
    published = {
        ("none", False): 10 + 24 / t + 5 * a * s / (h * t),
        ("none", True): (34 + 5 * a * s / h) / t,
        ("selective", False): 10 + 24 / t,
        ("selective", True): 34 / t,
        ("full", False): 2,
    }
    for (mode, sequence), factor in published.items():
        found = kept(config, UNFUSED, Split(t, sequence), 2, mode)  # type: ignore[arg-type]
        assert sum(found.values()) == pytest.approx(h * factor, rel=1e-12), (mode, sequence)


def test_fewer_key_heads_and_fused_attention_keep_less() -> None:
    """Counted manually: 8 of 64 heads for keys and values, no scores but one fp32 sum per head, SwiGLU in one kernel."""
    h, f, a, d = 8192, 28672, 64, 128
    config = model(
        width=h, heads=a, kv_heads=8, head_dim=d, mlp_width=f, sequence_length=4096, **SWIGLU_WITHOUT_BIASES, norm="rms"
    )
    found = activation_bytes_without_recompute(config, frameworks.find("megatron-core-sync"), Split(), 2)
    attention = h + (h + 2 * 1024) + h  # input, queries with keys and values, output
    assert sum(found.values()) == 2 * (2 * h + attention + h + 3 * f) + 4 * a


def test_an_unfused_gate_keeps_its_activation_too() -> None:
    """Autograd keeps gate, silu(gate), up and their product; one kernel computes silu(gate) again."""
    config = model(**SWIGLU_WITHOUT_BIASES)
    fused, apart = (
        activation_bytes_without_recompute(config, Framework("x", unfused_gate=value), Split(), 2)
        for value in (False, True)
    )
    assert sum(apart.values()) - sum(fused.values()) == 2 * config.mlp_width


def test_torchtitan_keeps_every_second_product() -> None:
    """It keeps q, v, gate and down of q, k, v, o, gate, up, down (its policy counts from 1 and keeps the odd ones) and the
    attention's output. A compiler drops the last one, which nothing reads.
    """
    h, f, kv = 4096, 14336, 1024
    sizes = {"width": h, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp_width": f, "sequence_length": 8192}
    config = model(**sizes, **SWIGLU_WITHOUT_BIASES, norm="rms")
    eager = 2 * (h + h + kv + h + f + h) + 4 * 32
    for name, expected in (("torchtitan-eager", eager), ("torchtitan", eager - 2 * h)):
        assert sum(kept(config, frameworks.find(name), Split(), 2, "selective").values()) == expected


def test_gathered_inputs_are_kept_if_the_program_keeps_them() -> None:
    config = model()
    divided = activation_bytes_without_recompute(config, Framework("x"), Split(4), 2)
    for share in (0.5, 1.0):
        whole = activation_bytes_without_recompute(config, Framework("x", gathered=share), Split(4), 2)
        assert sum(whole.values()) - sum(divided.values()) == share * 2 * 2 * WIDTH * (1 - 1 / 4)
