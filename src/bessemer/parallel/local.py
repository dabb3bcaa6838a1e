"""The part of a tensor that this process holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, sharing its memory; any other tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.detach() if tensor.requires_grad else tensor


def piece_of(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], Tensor]:
    """(shape of the whole, offset of the local part in it, the local part)."""
    if not isinstance(tensor, DTensor):
        return tensor.shape, (0,) * tensor.dim(), local(tensor)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.shape, tuple(offset), local(tensor)


def cuts(tensor: Tensor) -> int:
    """Into how many parts the tensor is divided."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    number = 1
    for placement, size in sizes:
        number *= size if isinstance(placement, Shard) else 1
    return number
