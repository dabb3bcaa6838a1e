"""Mixtures of experts: parameter counts of checkpoints, exchange and memory by arithmetic, and published step times."""

from dataclasses import replace
from types import ModuleType

import pytest

from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.flops import flops_per_token
from bessemer.plan import devices, shapes
from bessemer.plan.estimate import experts, frameworks
from bessemer.plan.estimate.compute import matmul
from bessemer.plan.estimate.job import PHYSICS, ClusterSpec, Job, Layout
from bessemer.plan.estimate.memory import memory, stages
from bessemer.plan.estimate.step import refuse, step
from bessemer.plan.intervals import evidence, extrapolation, interval, residuals
from bessemer.plan.plan_request import PlanRequest, from_options
from bessemer.plan.plan_result import STEP_PARTS, to_dict
from bessemer.plan.search import search
from bessemer.plan.tables import evidence_line, model_line
from bessemer.recipe import parse
from bessemer.workflow import choose_layout
from tests.benchmark_files import REFERENCE, needs_reference, program, results
from tests.plan.plans import job_of, planned

H100 = devices.find("H100")


def mixture(name: str) -> ModelConfig:
    config = shapes.find(name).config
    assert config.experts
    return config


def job(name: str = "mixtral-8x7b", count: int = 64, framework: str = "megatron-core", **layout: int) -> Job:
    sizes = {"shard": count, "zero": 1, **layout}
    return job_of(mixture(name), Layout(**sizes), 512, framework)


@pytest.mark.parametrize(
    ("name", "active"),
    [("mixtral-8x7b", 12.9e9), ("mixtral-8x22b", 39e9), ("qwen3-30b-a3b", 3.3e9), ("qwen3-235b-a22b", 22e9), ("olmoe-1b-7b", 1.3e9),
     ("deepseek-v2-lite", 2.66e9), ("deepseek-v2", 21e9), ("deepseek-v3", 37e9), ("kimi-k2", 32e9)],
)  # fmt: skip
def test_active_parameters_equal_the_published_ones(name: str, active: float) -> None:
    assert mixture(name).active_parameters == pytest.approx(active, rel=0.03)


def test_flops_per_token_equal_a_manual_count() -> None:
    """DeepSeek-V3 by its table of dimensions: projections to and from latents, one shared and eight routed experts, the router."""
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    mixed = attention + 3 * 7168 * 2048 * 9 + 7168 * 256
    matrices = 58 * mixed + 3 * (attention + 3 * 7168 * 18432) + 129_280 * 7168
    scores = 12 * 61 * 128 * (192 + 128) / 2 * (4096 + 1) / 2
    assert flops_per_token(mixture("deepseek-v3")) == pytest.approx(6 * matrices + scores, rel=1e-6)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "kimi-k2", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_the_fullest_stage_is_found(name: str) -> None:
    """The first stage has the small dense layers and the embedding."""
    for pipeline in (2, 4, 8, 16):
        given = job(name, 64, expert=2, pipeline=pipeline, shard=64 // pipeline)
        assert memory(given).total == max(one.total for one in stages(given)), pipeline


@pytest.mark.parametrize("pipeline", [1, 4])
def test_devices_have_every_expert_once_per_replica(pipeline: int) -> None:
    """Weights of 2 bytes: experts divided over 8, all others over tensor ranks; state over the ranks that have copies."""
    one = job(shard=64 // pipeline // 2, tensor=2, pipeline=pipeline, expert=8)
    config, places = mixture("mixtral-8x7b"), stages(one)
    routed, rest = config.expert_parameters / 8, (config.parameters - config.expert_parameters) / 2
    assert sum(place.weights for place in places) == pytest.approx(2 * (routed + rest), rel=0.001)
    copies, shards = 64 // pipeline // 8, 64 // pipeline // 2
    assert sum(place.optimizer for place in places) == pytest.approx(12 * (routed / copies + rest / shards), rel=0.001)


def test_the_exchange_depends_on_the_topology() -> None:
    """Send 1,000 tokens of 4,096 in 16 bits to 2 of 8 experts.

    In a node 7/8 of the copies leave a device. Over 8 nodes of one rank each, a token goes to 8 (1 - (7/8)^2) = 1.875 nodes, in
    one of 8 cases including its own, or to each expert separately.
    """
    config, how = mixture("mixtral-8x7b"), PHYSICS
    near, far = ClusterSpec.of(H100, 8), ClusterSpec(H100, 64, 1, 450e9, 50e9)
    wide, narrow = frameworks.find("megatron-core-sync"), frameworks.find("megatron-core")
    copies, latency = 1000 * 2 * 4096 * 2, how.call + how.near
    inside = experts.exchange(config, 1000, 8, 2, near, wide, how)
    assert inside == pytest.approx(copies * 7 / 8 / (450e9 * how.intra) + latency)
    each = experts.exchange(config, 1000, 8, 2, far, wide, how)
    assert each == pytest.approx(copies * 7 / 8 / (50e9 * how.inter) + how.far + latency)
    once = experts.exchange(config, 1000, 8, 2, far, narrow, how)
    assert once == pytest.approx(1000 * 4096 * 2 * 1.875 * 7 / 8 / (50e9 * how.inter) + how.far + latency)
    assert experts.exchange(config, 1000, 1, 2, far, wide, how) == 0.0
    limited = config.with_changes(node_limit=1)
    assert experts.exchange(limited, 1000, 8, 2, far, narrow, how) < once


def test_the_parts_of_a_step_add_up() -> None:
    spread = step(job(expert=8, micro_batch=1, recompute="full"))  # type: ignore[arg-type]
    assert sum(getattr(spread, name) for name in STEP_PARTS) == pytest.approx(spread.seconds)
    alone = step(job(expert=1, micro_batch=1, recompute="full"))  # type: ignore[arg-type]
    assert spread.expert > 0.0 == alone.expert and spread.model_flops == alone.model_flops
    even = Job(**{**vars(job(expert=8)), "framework": frameworks.find("deepseek-v3")})
    assert step(even).expert < step(job(expert=8)).expert, "its exchange is hidden"


# MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json, group_matmul: matrices, rows, outer and inner size, measured share
# of 2,250 TFLOP/s for the forward pass, the input's gradient and the weights' gradient (summed in fp32).
GROUPED = (
    (256, 128, 4096, 7168, 0.2081, 0.2264, 0.0775), (256, 128, 7168, 2048, 0.1782, 0.1513, 0.0801),
    (128, 256, 4096, 7168, 0.2714, 0.3325, 0.1473), (128, 256, 7168, 2048, 0.3035, 0.2329, 0.1409),
    (40, 616, 3072, 5120, 0.4618, 0.3213, 0.2579), (40, 616, 5120, 1536, 0.3258, 0.2807, 0.2723),
    (64, 512, 4096, 7168, 0.3670, 0.4046, 0.2192), (64, 512, 7168, 2048, 0.4274, 0.2942, 0.2145),
)  # fmt: skip


@pytest.mark.parametrize("row", GROUPED)
def test_grouped_matmuls_take_the_measured_time(row: tuple[float, ...]) -> None:
    count, rows, outer, inner = (int(each) for each in row[:4])
    best, b200 = 2.0 * count * rows * outer * inner / 2250e12, devices.find("B200")
    sizes = ((rows, outer, inner, False), (rows, inner, outer, False), (outer, inner, rows, True))
    for (m, n, k, sums), measured in zip(sizes, row[4:], strict=True):
        planned = best / matmul(m, n, k, "bf16", b200, PHYSICS, count, is_grouped=True, sums=sums)
        assert planned == pytest.approx(measured, rel=0.4)


@pytest.mark.parametrize(
    ("layout", "message"),
    [({"expert": 3}, "possible: 1, 2, 4, 8"), ({"count": 4, "shard": 4, "expert": 8}, "possible: 1, 2, 4"),
     ({"count": 12, "shard": 12, "expert": 4, "framework": "bessemer"}, "possible: 1"),
     ({"count": 12, "shard": 12, "expert": 4, "framework": "megatron-core"}, "")],
)  # fmt: skip
def test_experts_that_do_not_divide_are_an_error(layout: dict[str, int], message: str) -> None:
    """FSDP shards the weights of an expert evenly, other programs flatten them."""
    why = refuse(replace(job(**layout), batch=768))
    assert message in why if why else not message


def test_the_search_divides_the_experts() -> None:
    found = search(job("qwen3-30b-a3b", 32))
    assert {one.job.layout.expert for one in found.ranked} >= {8, 16, 32}
    assert all(one.memory == memory(one.job) and one.step == step(one.job) for one in found.ranked[:3])


@pytest.mark.parametrize("framework", ["bessemer", "torchtitan"])
def test_fsdp_shards_experts_over_the_ranks_that_have_copies(framework: str) -> None:
    """Weights of 4 bytes: divided experts over all 64 devices, everything else over the 8 of `shard`."""
    config, one = mixture("mixtral-8x7b"), job(framework=framework, replicate=8, shard=8, expert=8, zero=3)
    routed, undivided = config.expert_parameters, one.with_layout(expert=1)
    assert memory(one).weights == pytest.approx(4 * (routed / 64 + (config.parameters - routed) / 8), rel=0.001)
    assert memory(undivided).weights == pytest.approx(4 * config.parameters / 8, rel=0.001)
    assert step(one).expert > 0.0 == step(undivided).expert and step(one).data < step(undivided).data


def test_an_own_mixture_is_planned_for_bessemer() -> None:
    sizes = 'width = 1024\nheads = 16\nlayers = 8\nvocabulary = 8000\nfamily = "qwen3_moe"\nexperts = 32\nexpert_width = 512'
    rest = "[train]\ntokens = 10000000\nglobal_batch_tokens = 65536\nmicro_batch = 4\n[tokens]\nsequence_length = 2048"
    cluster = '[cluster]\ndevice = "H100"\ndevices = 8\n[parallel]\nauto = true\ntensor = 1\npipeline = 1'
    recipe = parse(f'[run]\nname = "mine"\n[model]\n{sizes}\n{rest}\n{cluster}', "plan")
    plan = choose_layout.planned(PlanRequest(recipe))
    found = to_dict(plan, searched=True)
    assert found["framework"] == "bessemer" and found["notes"] == [] and found["fits"]
    assert 0.05 < found["mfu"] < 0.6 and 2 * found["active_parameters"] < found["parameters"]
    assert plan.found is not None and {one.job.layout.expert for one in plan.found.ranked} == {1, 2, 4, 8}
    (note,) = choose_layout.planning_goal(recipe.changed(model={"router": "sigmoid"})).notes
    assert "qwen3_moe with router" in note and "export.hf" in note
    with pytest.raises(InputError, match=r"^model\.experts: .*model\.width"):
        from_options({"params": "30B", "gpus": "8xH100"}, ["model.experts=64"])


@pytest.mark.parametrize(("name", "framework"), [("deepseek-v2-lite", "megatron-core"), ("olmoe-1b-7b", "bessemer")])
def test_latent_attention_is_planned_for_another_program(
    capsys: pytest.CaptureFixture[str], name: str, framework: str
) -> None:
    words = "--tokens 1B --batch 65536 --gpus 8xH100 --dp 8 --tp 1 --pp 1 --micro-batch 1 --zero 1"
    found = planned(capsys, "--model", name, *words.split())
    assert found["framework"] == framework and bool(found["notes"]) == (framework != "bessemer")


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return program("planner_mixtures")


def test_published_steps_are_inside_their_intervals(benchmark: ModuleType) -> None:
    """The residuals of a mixture come from mixtures only, and its interval is wider than that of a dense model."""
    rows = benchmark.bridge()
    found = [(interval("step", row.job, row.planned), row.measured) for row in rows]
    inside = sum(one.low <= measured <= one.high for one, measured in found)
    assert 0.75 * len(rows) <= inside < len(rows)
    assert evidence(rows[0].job).program and evidence(rows[0].job).cases == 13
    dense = replace(rows[8].job, model=shapes.find("llama-3-70b").config)
    assert evidence(dense) != evidence(rows[8].job)
    assert extrapolation(rows[8].job) >= residuals()["mixture_spread"] > 0.1
    other = replace(rows[0].job, framework=frameworks.find("nanotron"))
    assert evidence_line(other).startswith("no published step of nanotron") and "mixtures of experts" in evidence_line(
        other
    )


def test_planned_steps_are_close_to_published_ones(benchmark: ModuleType) -> None:
    steps, deepseek = benchmark.bridge(), benchmark.deepseek()
    table = benchmark.summary(steps)
    assert table["n"] == 15 and table["mean_absolute"] < 0.14 and abs(deepseek.error) < 0.08
    found = results("planner_mixtures")
    times = [one for name, one in found["sets"].items() if "memory" not in name]
    assert sum(one["inside"] for one in times) >= 0.8 * sum(one["n"] for one in times)
    committed = {row["name"]: row["error"] for row in found["rows"]}
    for row in (*steps, deepseek):
        assert committed[row.name] == pytest.approx(row.error, abs=1e-6), "run benchmarks/planner_mixtures.py again"


@needs_reference
def test_deepseek_on_a_node_of_b200(benchmark: ModuleType) -> None:
    rows = benchmark.simumax(REFERENCE)
    time, held = ([row for row in rows if row.set == f"SimuMax, {kind}"] for kind in ("time", "memory"))
    assert len(time) == len(held) == 9
    assert benchmark.summary(time)["mean_absolute"] < 0.11 and benchmark.summary(held)["mean_absolute"] < 0.01


def test_the_plan_of_deepseek_v3_matches_its_device_hours(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3's 2.664M H800-hours (its table 1), planned as a user would, with a layout chosen by the planner."""
    asked = ("--model", "deepseek-v3", "--tokens", "14.8T", "--batch", "62914560", "--gpus", "2048xH800")
    found = planned(capsys, *asked, "--precision", "fp8", "--framework", "deepseek-v3")
    assert found["device_hours"] == pytest.approx(2.664e6, rel=0.1)
    assert found["expected"]["device_hours"] == pytest.approx(2.664e6, rel=0.15)
    assert found["interval_80"]["device_hours"][0] < 2.664e6 < found["interval_80"]["device_hours"][1]
    assert found["parameters"] == 671_026_419_200 and found["layout"]["expert"] > 8
    shown = model_line(mixture("deepseek-v3"))
    assert shown.startswith("671B parameters, 37.6B active (256 experts, 8 per token)") and "experts of 2,048" in shown
