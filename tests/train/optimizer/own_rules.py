"""Optimizer rules as a user writes them: SignMomentum is elementwise, ByRows has state of other shapes."""

from typing import ClassVar

import torch
from torch import Tensor

from bessemer import ParameterUpdate, UpdateRule
from bessemer.common import extensions


class SignMomentum(UpdateRule):
    """The sign of an average without bias towards zero."""

    moments = ("average",)
    others: ClassVar = {"count": lambda shape: ()}
    beta: float = 0.9

    def direction(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], update: ParameterUpdate) -> Tensor:
        state["count"] += 1
        state["average"] = state["average"].lerp(gradient, 1 - self.beta)
        return torch.sign(state["average"] / (1 - self.beta ** state["count"]))


class ByRows(UpdateRule):
    """Momentum scaled by the mean square of each row, times a factor of columns x columns (as in Shampoo)."""

    moments = ("momentum",)
    others: ClassVar = {"rows": lambda shape: shape[:-1], "columns": lambda shape: (shape[-1], shape[-1])}
    needs_whole = True
    is_for_matrices = True

    def direction(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], update: ParameterUpdate) -> Tensor:
        flat = gradient.reshape(-1, gradient.shape[-1])
        state["momentum"].lerp_(gradient, 0.1)
        state["rows"].lerp_(gradient.square().mean(-1), 0.1)
        state["columns"].lerp_(flat.T @ flat / flat.square().sum().clamp(min=1e-30), 0.1)
        scaled = state["momentum"] / (state["rows"].sqrt().unsqueeze(-1) + 1e-8)
        return scaled @ (torch.eye(flat.shape[-1], dtype=flat.dtype) - 0.5 * state["columns"])


def own(name: str) -> str:
    """Return the kind of a rule in this file, and trust it."""
    kind = f"{__file__}:{name}"
    extensions.trust([kind])
    return kind
