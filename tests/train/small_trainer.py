"""A trainer of the small recipe, and a batch for it."""

from pathlib import Path

import numpy as np
import torch

from bessemer.model.transformer import build_model
from bessemer.recipe import load
from bessemer.tokens.loader import Batch
from bessemer.train.device import choose
from bessemer.train.precision import LossScale
from bessemer.train.task import config_of
from bessemer.train.trainer import StepStats, Trainer


def trainer_of(recipe_file: Path, *overrides: str) -> Trainer:
    from bessemer.model.recipe_defaults import resolve

    recipe = resolve(load(recipe_file, overrides), 400)
    model = build_model(config_of(recipe, 400, 3), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return Trainer(recipe, model, choose(recipe.train), 0, 2)


def batch(rows: int = 8) -> Batch:
    draw = np.random.default_rng(0)
    return Batch.next_token(0, draw.integers(0, 400, (rows, 33)), np.array([0, 1] * (rows // 2)))


def stats_of(trainer: Trainer, data: Batch, scale: LossScale | None = None) -> StepStats:
    """Accumulate the gradients of a batch and return the statistics."""
    gradients = trainer.forward_backward(data, None if scale is None else scale.to_tensor(trainer.device.torch_device))
    return trainer.read([gradients])[0]


def gradient(trainer: Trainer) -> torch.Tensor:
    return torch.cat(
        [parameter.grad.flatten() for parameter in trainer.model.parameters() if parameter.grad is not None]
    )
