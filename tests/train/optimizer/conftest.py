"""A small model with generated gradients, driven by an optimizer."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from bessemer.model.config import ModelConfig
from bessemer.model.transformer import build_model as build_model
from bessemer.recipe import Optimizer as Settings
from bessemer.train import optimizer as optimizers

CONFIG = ModelConfig(
    vocabulary=80, layers=2, width=64, heads=4, kv_heads=2, head_dim=16, mlp_width=96, sequence_length=16
)
Weights = dict[str, np.ndarray]


class Driven:
    """A model with gradients drawn by name and step, so that two instances get the same ones."""

    def __init__(self, settings: Settings, tied: bool = False) -> None:
        self.settings = settings
        self.model = build_model(ModelConfig(**{**CONFIG.to_dict(), "tie_embeddings": tied}), 0)
        self.optimizer = optimizers.build(self.model, settings)
        self.taken = 0

    def gradient(self, name: str, step: int) -> np.ndarray:
        """Return normal numbers whose scale differs between rows by some decades, as in real gradients; the first rows are zero."""
        shape = dict(self.model.named_parameters())[name].shape
        draw = np.random.default_rng([step, *name.encode()])
        sizes = 10.0 ** -np.linspace(0, 3, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        gradient = draw.normal(size=shape) * sizes
        if step < 2:
            gradient[0] = 0
        return gradient.astype(np.float32)

    def weights(self) -> Weights:
        return {
            name: weight.detach().numpy().astype(np.float64).copy() for name, weight in self.model.named_parameters()
        }

    def take(self, steps: int, rate: float = 0.01) -> Weights:
        """Take steps with learning rates rate, rate / 2, rate / 3, ..."""
        for _ in range(steps):
            for name, weight in self.model.named_parameters():
                weight.grad = torch.from_numpy(self.gradient(name, self.taken))
            optimizers.set_learning_rate(self.optimizer, rate / (self.taken + 1))
            self.optimizer.step()
            self.taken += 1
        return self.weights()


@pytest.fixture
def driven() -> Callable[..., Driven]:
    def make(tied: bool = False, **settings: object) -> Driven:
        values = {"learning_rate": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.3, **settings}
        return Driven(Settings(**values), tied)  # type: ignore[arg-type]

    return make
