"""A trained run opened for reading: the model of its newest verified checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.checkpoint import latest
from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.initialisation import build
from bessemer.recipe import Recipe
from bessemer.run import RunFolder
from bessemer.terminal import warn
from bessemer.tokens.shards import TokenStore
from bessemer.train.device import Device
from bessemer.train.state import Position, load_weights
from bessemer.train.step import TrainStep


@dataclass(frozen=True)
class Restored:
    """A model with its weights, and how far it was trained."""

    step: TrainStep
    position: Position


def open_trained(recipe: Recipe, run: RunFolder, store: TokenStore, device: Device) -> Restored:
    """Load the newest verified checkpoint's weights."""
    checkpoint = latest(run.checkpoints, on_damage=warn)
    if checkpoint is None:
        raise InputError(f"{run.path}: no checkpoint yet; train it with `bessemer train RECIPE`")
    config = ModelConfig.from_dict(checkpoint.facts["model"])
    step = TrainStep(recipe, build(config, recipe.run.seed), device, store.end_of_text, len(store.sources))
    load_weights(step, checkpoint)
    step.model.eval()
    return Restored(step, Position(checkpoint.step, int(checkpoint.facts["samples"])))
