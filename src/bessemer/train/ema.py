"""An exponential moving average of the weights, in fp32, beside the ones that are trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bessemer.errors import BessemerError
from bessemer.parallel.local import local


class WeightAverage:
    """average <- d average + (1 - d) weights after every update.

    d is `decay`, but no more than (1 + n) / (10 + n) at update n (0-based), so that the average leaves the initial
    weights behind early on (the rule of TensorFlow's ExponentialMovingAverage with num_updates).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights: dict[str, Tensor] = {name: local(weight) for name, weight in model.named_parameters()}
        self.tensors: dict[str, Tensor] = {}
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew from the weights as they are."""
        self.tensors = {name: weight.float().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follow the weights after the update number `step` (0-based)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages = list(self.tensors.values())
        torch._foreach_lerp_(averages, [weight.float() for weight in self._weights.values()], 1.0 - decay)

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `tensors` was."""
        if tensors.keys() != self.tensors.keys():
            odd = sorted(tensors.keys() ^ self.tensors.keys())
            raise BessemerError(f"checkpoint: its average of the weights is another model's: tensor {odd[0]}")
        for name, average in self.tensors.items():
            average.copy_(tensors[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with the average; the weights come back unchanged."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Tensor by tensor, values and not storage: compiled code and optimizers know the storage."""
        for name, weight in self._weights.items():
            held = weight.clone()
            weight.copy_(self.tensors[name])
            self.tensors[name].copy_(held)
