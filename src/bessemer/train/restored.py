"""A trained run opened for reading: the model of its newest verified checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.checkpoint import latest
from bessemer.checkpoint.average import mean_weights, newest
from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import build_model
from bessemer.recipe import Recipe
from bessemer.run import RunFolder
from bessemer.terminal import warn
from bessemer.tokens.shards import TokenStore
from bessemer.train.device import Device
from bessemer.train.state import Position, load_weights, part
from bessemer.train.step import TrainStep


@dataclass(frozen=True)
class Restored:
    """A model with its weights, and how far it was trained."""

    step: TrainStep
    position: Position


def open_trained(recipe: Recipe, run: RunFolder, store: TokenStore, device: Device, average: int = 1) -> Restored:
    """Load the newest verified checkpoint's weights: their moving average when the run keeps one.

    average: the mean of the weights of so many newest checkpoints instead, when more than one.
    """
    checkpoint = latest(run.checkpoints, on_damage=warn)
    if checkpoint is None:
        raise InputError(f"{run.path}: no checkpoint yet; train it with `bessemer train RECIPE`")
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"ema": 0.0})})  # no second copy to read
    config = ModelConfig.from_dict(checkpoint.facts["model"])
    step = TrainStep(recipe, build_model(config, recipe.run.seed), device, store.end_of_text, len(store.sources))
    if average > 1:
        checkpoints = newest(run.checkpoints, average, on_damage=warn)
        load_weights(step, checkpoints[0], mean_weights(checkpoints))
    else:
        load_weights(step, checkpoint, part(checkpoint, "ema") or None)
    step.model.eval()
    return Restored(step, Position(checkpoint.step, int(checkpoint.facts["samples"])))
