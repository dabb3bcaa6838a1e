"""The weights a run starts from: initial ones, or those of a folder in the Hugging Face layout."""

from __future__ import annotations

from pathlib import Path

from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.read import read_model
from bessemer.model.initialisation import build
from bessemer.model.transformer import Transformer
from bessemer.recipe import Recipe


def starting_model(recipe: Recipe, config: ModelConfig) -> Transformer:
    """The model at step 0, in fp32 on the CPU. Raises InputError when the folder's weights are not this model's."""
    if recipe.model.from_ is None:
        return build(config, recipe.run.seed)
    folder = Path(recipe.model.from_.removeprefix("hf:"))
    if config.positions == "learned" and recipe.tokens.sequence_length > config.max_positions:
        raise InputError(
            f"tokens.sequence_length: {recipe.tokens.sequence_length}, but {folder} has only {config.max_positions} positions"
        )
    return read_model(folder, config, recipe.run.seed)
