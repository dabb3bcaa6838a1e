"""AdamW and Lion: updates in which each element knows only its own gradient and moments, so that they may be cut anywhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw as fused_adamw

State = dict[str, Tensor]


def adamw(weights: list[Tensor], gradients: list[Tensor], states: list[State], group: dict[str, Any]) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), in place, by torch's fused kernel.

    Each state holds `exp_avg`, `exp_avg_sq` and `step`, the number of updates so far, which is counted up.
    """
    fused_adamw(
        weights,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def lion(weights: list[Tensor], gradients: list[Tensor], states: list[State], group: dict[str, Any]) -> None:
    """Lion (Chen et al. 2023, algorithm 2), in place: w -= lr (sign(b1 m + (1 - b1) g) + decay w), then m follows g by b2."""
    (now, kept), rate = group["betas"], group["lr"]
    for weight, gradient, state in zip(weights, gradients, states, strict=True):
        moment = state["exp_avg"]
        direction = moment.lerp(gradient, 1.0 - now).sign_()
        weight.mul_(1.0 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
        moment.lerp_(gradient, 1.0 - kept)
