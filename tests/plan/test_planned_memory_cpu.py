"""The planned memory of a process on a CPU: the formula with its margin, and one measured step."""

from typing import Any

import pytest

from bessemer.distributed.memory import MEASURED_MARGIN, Memory, peak_memory
from bessemer.model.huggingface.config import model_config
from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import Recipe, parse
from bessemer.train import device as devices
from bessemer.train.engine import NUM_WORKERS
from bessemer.train.measure import measured_step
from bessemer.train.precision import PRECISIONS
from tests.benchmark_files import results

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
    """The plan of a row's recipe without a measured step, from what its process held before the model."""
    recipe, micro_batches = recipe_of(row), row["sequences"] // row["micro_batch"]
    is_paired = row["processes"] == 1 and min(row["threads"], micro_batches) >= NUM_WORKERS
    return peak_memory(
        recipe.train, recipe.parallel, model_config(recipe, row["vocabulary"]), PRECISIONS[row["precision"]].element_bytes,
        before_model=row["before_model"], concurrent=NUM_WORKERS if is_paired else 1,
    )  # fmt: skip


def test_the_formula_has_its_stated_margin() -> None:
    """Whole trainings that were measured (benchmarks/memory_cpu.py), of one process and of two that shard."""
    for processes, least, most in ((1, -0.08, 0.37), (2, -0.27, 0.22)):
        rows = [row for row in ROWS if row["processes"] == processes]
        errors = [planned(row).total / row["measured_bytes"] - 1 for row in rows]
        assert len(rows) > 10 and least < min(errors) < 0 < max(errors) < most


def test_a_measured_step_is_the_plan() -> None:
    row = {**ROWS[0], "layers": 3, "sequences": 8, "micro_batch": 2, "precision": "fp32"}
    recipe = recipe_of(row)
    device = devices.choose(recipe.train.changed(device="cpu", precision="fp32"))
    config = model_config(recipe, row["vocabulary"])
    seconds, num_bytes = measured_step(recipe, config, device, 0.1, 0)
    assert seconds > 0 and num_bytes is not None
    state = 16 * config.parameters  # weights, gradients and two moments
    assert 0.8 * state < num_bytes < 4 * state
    plan = planned(row)
    for wanted in (num_bytes, plan.weights + plan.gradients + plan.optimizer + 1_000_000):
        held = plan.as_measured(wanted)
        assert held.total == pytest.approx(row["before_model"] + MEASURED_MARGIN * wanted, rel=1e-6)
        assert min(held.to_dict().values()) >= 0 and held.weights == plan.weights
