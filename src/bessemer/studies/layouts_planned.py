"""What the planner says that a run of the study `layouts` sends."""

from __future__ import annotations

import torch

from bessemer.layout.communication import Bytes, step_bytes
from bessemer.model.of_recipe import model_config
from bessemer.recipe import Recipe
from bessemer.studies import text
from bessemer.train.precision import PRECISIONS


def planned(recipe: Recipe, targets: int) -> dict[str, int] | None:
    """Bytes of a step by kind, of all processes; None where there is no formula. targets: of the global batch."""
    train, layout, config = recipe.train, recipe.parallel, model_config(recipe, text.VOCABULARY)
    assert train.global_batch_tokens is not None and train.micro_batch is not None, "the recipe is resolved"
    arithmetic = PRECISIONS[train.precision]
    weights = arithmetic.weights.itemsize
    narrow = (arithmetic.autocast or arithmetic.weights).itemsize
    of = Bytes(narrow, narrow, weights, torch.promote_types(arithmetic.weights, torch.float32).itemsize)
    sequences = train.global_batch_tokens // recipe.tokens.sequence_length
    micro_batches = sequences // layout.data // train.micro_batch
    return step_bytes(config, layout, train.global_batch_tokens, targets, micro_batches, of)
