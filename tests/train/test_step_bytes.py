"""The formulas of memory and of communication are what a step takes: on fake tensors, and on two processes."""

from collections import Counter
from typing import Any

import pytest
import torch

from bessemer.distributed.memory import rank_memory
from bessemer.distributed.mesh import join
from bessemer.distributed.stages import pipeline_ranks
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.model.element_bytes import ElementBytes
from bessemer.model.transformer import meta_model
from bessemer.plan.communication import planned_bytes
from bessemer.recipe import Parallel, Recipe
from bessemer.recipe.load import parse
from bessemer.train import parallelize
from bessemer.train.device import choose
from bessemer.train.objective import config_of, task_of
from bessemer.train.precision import PRECISIONS
from tests.choose import long_but
from tests.distributed.processes import run_on
from tests.train.fake_step import StepBytes, simulate, watch_step

TEXT = """
run = {name = "t"}
model = {layers = 4, width = 128, heads = 4, kv_heads = 2, mlp_width = 384}
tokens = {sequence_length = 64, document_mask = false}
train = {steps = 4, global_batch_tokens = 1024, micro_batch = 2, device = "cpu"}
"""
VOCABULARY = 512
BF16 = ElementBytes(2, cast=2)


def recipe_of(layout: Parallel, **train: Any) -> tuple[Recipe, ModelConfig]:
    """Return a resolved recipe, with two micro-batches without a pipeline, and its model."""
    resolved = recipe_defaults.resolve(parse(TEXT, "test"), VOCABULARY)
    batch = 64 * 2 * 2 * layout.data if layout.pipeline == 1 else 1024
    changed = resolved.train.model_copy(update={"recompute": "full", "global_batch_tokens": batch, **train})
    recipe = resolved.model_copy(update={"parallel": layout, "train": changed})
    return recipe, config_of(recipe, VOCABULARY, 0)


LAYOUTS = {
    "zero1": Parallel(shard=2, zero=1),
    "zero3": Parallel(shard=2),
    "hsdp": Parallel(replicate=2, shard=2),
    "tp2": Parallel(tensor=2),
    "cp2": Parallel(context=2),
    "pp2": Parallel(pipeline=2),
    "fsdp2 tp2": Parallel(shard=2, tensor=2),
    "fsdp2 pp2": Parallel(shard=2, pipeline=2),
    # 5 divides no dimension of `qkv` and `gate_up`, 3 none of `qkv`.
    "uneven": Parallel(shard=5),
    "uneven zero1": Parallel(shard=5, zero=1),
    "uneven zero2": Parallel(shard=3, zero=2),
    "muon": Parallel(shard=4),
}


@pytest.mark.parametrize("name", long_but(list(LAYOUTS), "zero3", "fsdp2 tp2", "pp2", "uneven", "muon"))
def test_a_step_takes_what_the_formulas_say(name: str) -> None:
    layout = LAYOUTS[name]
    recipe, config = recipe_of(layout, loss_chunk=128)
    if name == "muon":
        kind = recipe.train.optimizer.model_copy(update={"kind": "muon"})
        recipe, config = recipe_of(layout, loss_chunk=128, optimizer=kind)
    sent = Counter[str]()
    for part in pipeline_ranks(config, layout):
        held = simulate(recipe, config, part.pipeline_rank)
        planned = rank_memory(recipe.train, layout, config, part, BF16, recomputed_per_rank=config.layers, is_cuda=True)
        assert planned.total == pytest.approx(held.peak, rel=0.1), (planned, held)
        assert planned.weights == pytest.approx(held.weights, rel=0.01)
        assert planned.optimizer == pytest.approx(held.optimizer, rel=0.01)
        sent += held.sent
    planned_sent = planned_bytes(
        recipe.train, layout, config, PRECISIONS["bf16"].sent_bytes, recomputed_total=config.layers
    )
    everyone = {kind: number * layout.world // layout.pipeline for kind, number in sent.items()}
    assert planned_sent is None or everyone == pytest.approx(planned_sent, rel=1e-3)


def real(layout: Parallel) -> StepBytes:
    """Take a step on this process of a real group."""
    recipe, config = recipe_of(layout)
    mesh, task = join(layout, torch.device("cpu")), task_of(recipe.train, False, config, 0)
    built = parallelize.parallelize(
        recipe.train,
        meta_model(config),
        mesh,
        task,
        choose(recipe.train),
        config.layers,
        parallelize.initial_weights(config, 1),
    )
    return watch_step(recipe.train, layout, config, *built)


@pytest.mark.parametrize("zero", long_but([0, 1, 2, 3], 0, 3))
def test_two_processes_hold_and_send_what_the_formula_of_their_zero_stage_says(zero: int) -> None:
    """Bytes a parameter, fp32 (Rajbhandari et al. 2020, section 5, with masters divided): 4 weight, 4 gradient, 8 moments."""
    layout = Parallel(shard=2, zero=zero) if zero else Parallel(replicate=2)  # type: ignore[arg-type]
    recipe, config = recipe_of(layout)
    planned = planned_bytes(recipe.train, layout, config, PRECISIONS["fp32"].sent_bytes, recomputed_total=config.layers)
    for held in run_on(2, real, layout):
        assert held.between == pytest.approx(
            16 * config.parameters if not zero else 12 * config.parameters / 2, rel=0.05
        )
        # A reduce-scatter that is still under way holds the gradients of its block.
        assert held.after_backward == pytest.approx(16 * config.parameters / (2 if zero else 1), rel=0.15)
        assert {kind: 2 * number for kind, number in held.sent.items()} == planned
