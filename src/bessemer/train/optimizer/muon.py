"""Muon (Jordan et al. 2024): orthogonalised momentum for hidden matrices, which may be sharded.

Shapes: D width, F hidden width, G key/value heads, R query heads of each, K width of a head; N matrices of one shape, R rows, C
columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bessemer.distributed.optimizer_bytes import STACK_ELEMENTS
from bessemer.distributed.owners import owner_updates
from bessemer.distributed.sharded_tensors import is_dtensor, local
from bessemer.model.sublayers import JOINT, ROUTED
from bessemer.train.optimizer.moments import SLICE, UpdatedParameter, decode_slices, format_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# (a, b, c) of each step x -> a x + b x^3 + c x^5. Their composition minimises the largest error |1 - p(x)| over singular values
# from 0.02 to 1, which is 0.093 (Amsel et al. 2025, "The Polar Express"). With the division in
# `orthogonalise`, they come as near to U V^T as the five steps of Jordan et al. (2024) (benchmarks/results/ablations.json).
NEWTON_SCHULZ = ((7.7110, -22.1138, 16.2487), (3.2153, -2.4112, 0.5013), (2.2183, -1.5940, 0.4107))
EPSILON = 1e-7


def matrices(name: str, tensor: Tensor) -> list[Tensor]:
    """Return the matrices of a fused hidden parameter, as views (..., columns) whose other dimensions are the rows.

    `attention.qkv` (G, R + 2, K, D) is queries (G, R, K, D), keys (G, K, D) and values (G, K, D), for G key heads with R query
    heads each. `mlp.gate_up` (2, F, D) is gate and up. Each routed expert has its own matrices.
    """
    inner = name.split(".", 2)[-1]
    if inner.startswith(ROUTED):
        return list(tensor.flatten(0, -3).unbind(0))
    joint = JOINT.get(inner)
    return [tensor] if joint is None else [tensor[index] for index in joint.values()]


def orthogonalise(matrices_NRC: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return approximately U V^T of each matrix U S V^T, with R <= C, by Newton-Schulz steps in `dtype`.

    Singular values are divided by sqrt(|X X^T|), which exceeds the largest by less than the Frobenius norm |X| does, so that
    fewer steps bring the others to 1; 1% more allows for rounding.
    """
    x = matrices_NRC.to(dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + EPSILON)
    gram = x @ x.mT
    size = 1.01 * gram.norm(dim=(1, 2), keepdim=True).sqrt() + EPSILON
    x, gram = x.div_(size), gram.div_(size**2)
    for step, (a, b, c) in enumerate(NEWTON_SCHULZ):
        gram = x @ x.mT if step else gram
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def update_matrices(parameters: list[UpdatedParameter], group: dict[str, Any]) -> None:
    """Update the hidden matrices of a group, whole or sharded, in place."""
    names, weights = [one.name for one in parameters], [one.weight for one in parameters]
    if sharded := [weight for weight in weights if is_dtensor(weight)]:
        assert len(sharded) == len(weights), "all matrices are sharded, or none"
        muon_sharded(names, sharded, lambda n: _direction(parameters[n], group), group)
    else:
        muon(((one.name, one.weight, _direction(one, group)) for one in parameters), group)


def _direction(parameter: UpdatedParameter, group: dict[str, Any]) -> Tensor:
    """Update the momentum of a parameter's shard, and return its Nesterov direction, which is not orthogonalised yet."""
    if format_of(parameter.weight, group["state"]) == "fp32":
        return nesterov(parameter.state["momentum"], parameter.gradient, group)
    direction = torch.empty_like(parameter.gradient)
    parts = decode_slices(parameter._replace(weight=local(parameter.weight)), group["rule"], group["skip"])
    for part, target in zip(parts, torch.split(direction.view(-1), SLICE), strict=True):
        target.copy_(nesterov(part.state["momentum"], part.gradient, group))
    return direction


def muon(directed: Iterable[tuple[str, Tensor, Tensor]], group: dict[str, Any]) -> None:
    """Decay weights and move them along their orthogonalised directions, in place; matrices of one shape together.

    `directed` yields the name, weight and direction of each parameter. It is consumed one by one, so that not all directions
    are in memory at once.
    """
    # Pairs of a direction, transposed if it has more rows than columns, and the weight that it updates, by shape.
    waiting: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
    for name, weight, direction in directed:
        weight.mul_(1.0 - _rate(group) * group["weight_decay"])
        for part, target in zip(matrices(name, direction), matrices(name, weight), strict=True):
            matrix_RC = part.reshape(-1, part.shape[-1])
            matrix_RC = matrix_RC.mT if matrix_RC.shape[0] > matrix_RC.shape[1] else matrix_RC
            stack = waiting.setdefault(matrix_RC.shape, [])
            stack.append((matrix_RC, target))
            if matrix_RC.numel() * len(stack) >= STACK_ELEMENTS:
                _move(waiting.pop(matrix_RC.shape), group)
    for stack in waiting.values():
        _move(stack, group)


def muon_sharded(
    names: Sequence[str], weights: Sequence[DTensor], direction_of: Callable[[int], Tensor], group: dict[str, Any]
) -> None:
    """Update sharded parameters like `muon`; each whole matrix is orthogonalised by one process of its mesh.

    Singular values belong to whole matrices. `direction_of(i)` returns this process's shard of the direction of `weights[i]`.
    """

    def update_of(number: int, direction: Tensor) -> Tensor:
        update = torch.zeros_like(direction)
        muon([(names[number], update, direction)], group)  # decays nothing, since the weights passed here are zeros
        return update

    for number, update in owner_updates(weights, direction_of, update_of):
        shard = local(weights[number])
        shard.mul_(1.0 - _rate(group) * group["weight_decay"]).add_(update)


def nesterov(moment: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
    """Update the moment (an average, so that its scale is the gradient's) and return Nesterov's direction.

    A skipped update takes the moment as its gradient, which leaves the moment unchanged and the direction finite.
    """
    gradient = torch.where(group["skip"].bool(), moment, gradient)
    moment.lerp_(gradient, 1.0 - group["muon_momentum"])
    return gradient.lerp_(moment, group["muon_momentum"])


def _rate(group: dict[str, Any]) -> Tensor:
    """Return the learning rate as a scalar on the device, 0 for a skipped update."""
    return torch.mul(1.0 - group["skip"].double(), group["lr"])


def _move(stack: list[tuple[Tensor, Tensor]], group: dict[str, Any]) -> None:
    directions_NRC = torch.stack([direction for direction, _ in stack])
    dtype = torch.bfloat16 if directions_NRC.is_cuda else group["dtype"]
    updates_NRC = orthogonalise(directions_NRC, dtype).float()
    # The factor gives the update the root mean square of AdamW's, about 0.2 (Liu et al. 2025, section 2.2).
    updates_NRC.mul_(-0.2 * math.sqrt(updates_NRC.shape[-1]) * _rate(group))
    for (_, target), update_RC in zip(stack, updates_NRC, strict=True):
        target.add_((update_RC if target.shape[-1] == update_RC.shape[-1] else update_RC.mT).reshape(target.shape))
