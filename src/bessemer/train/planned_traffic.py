"""What the planner says that a step's processes send each other, in the types that the training uses."""

from __future__ import annotations

import torch

from bessemer.layout.communication import Bytes, step_bytes
from bessemer.model.config import ModelConfig
from bessemer.recipe import Recipe
from bessemer.train.precision import PRECISIONS


def planned_bytes(
    recipe: Recipe, config: ModelConfig, precision: str, targets: int | None = None, recomputed: int = 0
) -> dict[str, int] | None:
    """Bytes of a step by kind, of all processes; None where there is no formula. precision: as the device has it; targets: of
    the global batch; None: every token is one; recomputed: blocks."""
    train, layout = recipe.train, recipe.parallel
    batch = train.global_batch_tokens
    assert batch is not None and train.micro_batch is not None, "the recipe is resolved"
    arithmetic = PRECISIONS[precision]
    weights = arithmetic.weights.itemsize
    narrow = (arithmetic.autocast or arithmetic.weights).itemsize
    of = Bytes(narrow, narrow, weights, torch.promote_types(arithmetic.weights, torch.float32).itemsize)
    micro_batches = batch // recipe.tokens.sequence_length // layout.data // train.micro_batch
    return step_bytes(config, layout, batch, batch if targets is None else targets, micro_batches, of, recomputed)
