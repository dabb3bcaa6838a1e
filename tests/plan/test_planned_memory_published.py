"""Planned memory compared with tables of torchtitan and the Zero Bubble paper, which are copied here."""

from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from bessemer.distributed.memory import MEASURED_MARGIN, Memory, peak_memory
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import model_config
from bessemer.model.recipe_defaults import resolve
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.frameworks import Framework
from bessemer.plan.estimate.job import Layout
from bessemer.plan.estimate.memory import memory
from bessemer.recipe import Recipe, parse
from bessemer.train import device as devices
from bessemer.train.engine import NUM_WORKERS
from bessemer.train.measure import measure_step
from bessemer.train.precision import PRECISIONS
from tests.benchmark_files import results
from tests.model.samples import ALL_BIASES
from tests.plan.plans import job_of

GIB = 2**30
LLAMA3 = {"8B": (32, 4096, 32, 14336), "70B": (80, 8192, 64, 28672), "405B": (126, 16384, 128, 53248)}

# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 6, and llama3-8b_h200_202506_trainy-whitefiber.md: program,
# model, sequence, layout values other than 1, and GiB of the allocator's peak on the fullest rank. The pipeline's batch has 8
# micro-batches, the program's default at that time.
FULL: dict[str, Any] = {"recompute": "full"}
TITAN: list[tuple[str, str, int, dict[str, Any], float]] = [
    ("torchtitan-eager", "8B", 8192, {"shard": 8, "micro_batch": 2}, 82.4),
    ("torchtitan", "8B", 8192, {"shard": 8, "micro_batch": 2}, 77.0),
    ("torchtitan-eager", "8B", 8192, {"shard": 128, "micro_batch": 2}, 67.0),
    ("torchtitan", "8B", 8192, {"shard": 128, "micro_batch": 2}, 62.0),
    ("torchtitan", "8B", 32768, {"shard": 8, **FULL}, 83.9),
    ("torchtitan", "8B", 65536, {"shard": 4, "context": 2, **FULL}, 84.2),
    ("torchtitan", "8B", 131072, {"shard": 2, "context": 4, **FULL}, 84.0),
    ("torchtitan", "8B", 262144, {"context": 8, **FULL}, 84.5),
    ("torchtitan", "70B", 8192, {"shard": 32, "tensor": 8, "micro_batch": 16, **FULL}, 71.9),
    ("torchtitan", "405B", 8192, {"shard": 8, "tensor": 8, "pipeline": 8, "micro_batch": 4, **FULL}, 82.5),
    ("torchtitan", "405B", 32768, {"shard": 8, "tensor": 8, "pipeline": 8, **FULL}, 75.3),
    ("torchtitan", "405B", 65536, {"shard": 4, "context": 2, "tensor": 8, "pipeline": 8, **FULL}, 75.9),
    ("torchtitan", "405B", 131072, {"shard": 2, "context": 4, "tensor": 8, "pipeline": 8, **FULL}, 77.1),
    ("torchtitan", "405B", 262144, {"context": 8, "tensor": 8, "pipeline": 8, **FULL}, 84.9),
    ("torchtitan-2025", "8B", 8192, {"shard": 32, "micro_batch": 2}, 47.96),
    ("torchtitan-2025", "8B", 8192, {"shard": 64, "micro_batch": 2}, 46.97),
]

# Qi et al. 2023, "Zero bubble pipeline parallelism", table 4: blocks, hidden size, heads, ranks, micro-batch, and GB of
# Megatron's 1F1B and of its interleaved schedule with one block per stage. No ZeRO; one block fewer on the first and on the last
# stage.
BUBBLE = [
    (22, 2304, 24, 8, 6, 30, 40),
    (30, 4096, 32, 8, 3, 39, 48),
    (46, 5120, 40, 16, 1, 32, 39),
    (62, 6144, 48, 32, 1, 43, 58),
]


def peak(model: ModelConfig, layout: Layout, framework: Framework, micro_batches: int) -> float:
    """Return the GiB of the allocator's peak."""
    batch = layout.data * layout.micro_batch * micro_batches
    return memory(job_of(model, layout, batch, framework)).reserved / GIB


def test_peaks_equal_torchtitans_tables() -> None:
    errors = []
    for program, size, sequence, changes, measured in TITAN:
        layers, hidden, heads, ffn = LLAMA3[size]
        model = ModelConfig(
            vocabulary=128256, layers=layers, width=hidden, heads=heads, kv_heads=8, head_dim=hidden // heads, mlp_width=ffn,
            sequence_length=sequence, qk_norm="none",
        )  # fmt: skip
        layout = Layout(**{"zero": 3, "recompute": "selective", **changes})
        errors.append(peak(model, layout, frameworks.find(program), layout.pipeline) / measured - 1)
    assert mean(map(abs, errors)) < 0.035 and max(map(abs, errors)) < 0.09, errors


def test_peaks_equal_those_of_the_zero_bubble_paper() -> None:
    found = frameworks.find("megatron-lm-2022")
    framework = replace(found, cut="ends")
    for layers, hidden, heads, ranks, micro_batch, plain, interleaved in BUBBLE:
        model = ModelConfig(
            vocabulary=51200, layers=layers, width=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads,
            mlp_width=4 * hidden, sequence_length=1024, qk_norm="none", activation="gelu", gated=False, norm="layer", **ALL_BIASES,
            positions="learned",
        )  # fmt: skip
        one = Layout(pipeline=ranks, micro_batch=micro_batch, zero=0)
        several = replace(one, virtual=(layers + 2) // ranks, schedule="interleaved")
        for layout, measured in ((one, plain), (several, interleaved)):
            planned = peak(model, layout, framework, 3 * ranks)
            assert abs(planned / measured - 1) < 0.04, (hidden, layout.schedule, planned, measured)


ROWS = results("memory_cpu")["rows"]


def recipe_of(row: dict[str, Any]) -> Recipe:
    text = f"""
        run.name = "x"
        tokens.sequence_length = {row["length"]}
        model = {{ layers = {row["layers"]}, width = {row["width"]}, heads = {row["heads"]}, kv_heads = {row["kv_heads"]},
                   mlp_width = {row["mlp_width"]}{row["more"] and ", "}{row["more"]} }}
        train = {{ steps = 4, global_batch_tokens = {row["sequences"] * row["length"]}, micro_batch = {row["micro_batch"]},
                   recompute = "{row["recompute"]}" }}
        parallel.shard = {row["processes"]}
    """
    return resolve(parse(text.replace(",\n                  ", ","), "x"), row["vocabulary"])


def planned(row: dict[str, Any]) -> Memory:
    """Return the plan of a row's recipe without a measured step, from the memory its process had before the model."""
    recipe, micro_batches = recipe_of(row), row["sequences"] // row["micro_batch"]
    is_paired = row["processes"] == 1 and min(row["threads"], micro_batches) >= NUM_WORKERS
    return peak_memory(
        recipe.train, recipe.parallel, model_config(recipe, row["vocabulary"]), PRECISIONS[row["precision"]].element_bytes,
        before_model=row["before_model"], concurrent=NUM_WORKERS if is_paired else 1,
    )  # fmt: skip


def test_the_formula_has_its_stated_margin() -> None:
    """Measured whole trainings (benchmarks/memory_cpu.py) of one process and of two that shard."""
    for processes, least, most in ((1, -0.08, 0.37), (2, -0.27, 0.22)):
        rows = [row for row in ROWS if row["processes"] == processes]
        errors = [planned(row).total / row["measured_bytes"] - 1 for row in rows]
        assert len(rows) > 10 and least < min(errors) < 0 < max(errors) < most


def test_a_measured_step_is_the_basis_of_the_plan() -> None:
    row = {**ROWS[0], "layers": 3, "sequences": 8, "micro_batch": 2, "precision": "fp32"}
    recipe = recipe_of(row)
    device = devices.choose(recipe.train.changed(device="cpu", precision="fp32"))
    config = model_config(recipe, row["vocabulary"])
    seconds, num_bytes = measure_step(recipe, config, device, 0.1, 0)
    assert seconds > 0 and num_bytes is not None
    state = 16 * config.parameters  # weights, gradients and two moments
    assert 0.8 * state < num_bytes < 4 * state
    plan = planned(row)
    for wanted in (num_bytes, plan.weights + plan.gradients + plan.optimizer + 1_000_000):
        held = plan.as_measured(wanted)
        assert held.total == pytest.approx(row["before_model"] + MEASURED_MARGIN * wanted, rel=1e-6)
        assert min(held.to_dict().values()) >= 0 and held.weights == plan.weights
    compiled = replace(plan, compiled=5_000_000_000).as_measured(num_bytes)  # more code than a measured step has
    assert compiled.to_dict()["fragmentation"] == compiled.compiled and compiled.fragmentation == 0
