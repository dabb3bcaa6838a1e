"""Muon: momentum whose singular values are all made about 1, matrix by matrix (Jordan et al. 2024).

Shapes: N matrices of one shape, R rows, C columns, R <= C.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bessemer.parallel.local import as_part_of, local, put
from bessemer.train.optimizer.groups import matrices

# The quintic a x + b x^3 + c x^5 that Jordan et al. (2024, "Muon", section "Newton-Schulz") chose for its steep start:
# five steps bring singular values from 0.01 to 1 into about [0.7, 1.2].
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPSILON = 1e-7
STACK_ELEMENTS = (
    1 << 25
)  # elements orthogonalised together: many small products at once, without a second model in memory


def orthogonalised(matrices_NRC: Tensor) -> Tensor:
    """The nearest half-orthogonal matrices, about: U V^T of each U S V^T, by five Newton-Schulz steps.

    In bf16 on CUDA; in fp32 elsewhere, since a CPU without bf16 units would take several times as long.
    """
    a, b, c = COEFFICIENTS
    dtype = torch.bfloat16 if matrices_NRC.device.type == "cuda" else torch.float32
    tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x = (matrices_NRC.mT if tall else matrices_NRC).to(dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + EPSILON)  # singular values of at most 1
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def scale(rows: int, columns: int, kind: str) -> float:
    """What an orthogonalised update is multiplied with.

    match_rms: 0.2 sqrt(max(rows, columns)), which gives it the root mean square of about 0.2 that AdamW's updates have
    (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2). spectral: sqrt(max(1, rows / columns)) (Jordan
    et al. 2024).
    """
    if kind == "match_rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


@dataclass
class _Stack:
    """Directions of one shape that wait to be orthogonalised, and the weights they belong to."""

    directions: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


def muon(directed: Iterable[tuple[str, Tensor, Tensor]], group: dict[str, Any]) -> None:
    """Decay weights and move them along their orthogonalised directions, in place; matrices of a shape together.

    directed: name, weight and direction of each parameter; taken one after the other, so that not all directions have
    to be there at once.
    """
    waiting: dict[tuple[int, int], _Stack] = {}
    for name, weight, direction in directed:
        weight.mul_(1.0 - group["lr"] * group["weight_decay"])
        for part, place in zip(matrices(name, direction), matrices(name, weight), strict=True):
            matrix_RC = part.reshape(-1, part.shape[-1])
            shape = (matrix_RC.shape[0], matrix_RC.shape[1])
            stack = waiting.setdefault(shape, _Stack())
            stack.directions.append(matrix_RC)
            stack.weights.append(place)
            if matrix_RC.numel() * len(stack.directions) >= STACK_ELEMENTS:
                _move(waiting.pop(shape), group)
    for stack in waiting.values():
        _move(stack, group)


def muon_of_divided(name: str, weight: DTensor, direction: Tensor, group: dict[str, Any]) -> None:
    """As `muon`, for one parameter that is divided among processes; direction: its local part.

    Singular values belong to whole matrices, so each process gathers the direction and keeps its part of the update.
    """
    whole = DTensor.from_local(
        direction, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    ).full_tensor()
    update = torch.zeros_like(whole)
    muon([(name, update, whole)], group)
    held = local(weight)
    own = torch.empty_like(held)
    put(as_part_of(weight, own), update)
    held.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(own)


def nesterov(moment: Tensor, gradient: Tensor, momentum: float) -> Tensor:
    """Update the moment (an average, so that its scale is the gradient's) and return the direction that looks ahead."""
    moment.lerp_(gradient, 1.0 - momentum)
    return gradient.lerp(moment, momentum)


def _move(stack: _Stack, group: dict[str, Any]) -> None:
    rows, columns = stack.directions[0].shape
    size = group["lr"] * scale(rows, columns, group["scale"])
    if stack.directions[0].is_cuda:
        moved = list(orthogonalised(torch.stack(stack.directions)).unbind(0))
    else:  # some CPUs round a batched matmul by the number of matrices in it, and offloading decides which are together
        moved = [orthogonalised(direction.unsqueeze(0)).squeeze(0) for direction in stack.directions]
    for place, update in zip(stack.weights, moved, strict=True):
        place.add_(update.reshape(place.shape).to(place.dtype), alpha=-size)
