"""The part of a tensor that this process holds, and where in the whole it lies.

Whatever split a parameter (FSDP2, tensor parallelism, both), it is a DTensor, and each process holds one box of it. What
writes, reads or fills weights knows only boxes, and so works for every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from bessemer.errors import BessemerError

Box = tuple[int, ...]  # an offset or a shape


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: the local part of a DTensor, which shares its memory, or the tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    held: Tensor = tensor.to_local()
    return held


@torch.no_grad()
def piece_of(tensor: Tensor) -> tuple[Box, Box, Tensor]:
    """The shape of the whole tensor, where this process's part begins in it, and that part.

    The part may be empty: a process has none of a dimension that is cut into more pieces than it has entries, and a
    process outside of the tensor's mesh holds nothing. Raises BessemerError for a tensor that is no sum of boxes yet
    (Partial), or whose part is not one box: FSDP2 over tensor parallelism on one dimension (`_StridedShard` with as
    many strides as there are tensor processes) is one.
    """
    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return whole, (0,) * len(whole), tensor.detach()
    held, mesh, placements = local(tensor).detach(), tensor.device_mesh, tensor.placements
    if mesh.get_coordinate() is None:
        return whole, (0,) * len(whole), held.new_empty((0,) * max(len(whole), 1))
    for number, placement in enumerate(placements):
        if placement.is_partial():
            raise BessemerError(f"parallel: a tensor of shape {list(whole)} is not reduced yet ({placements})")
        if isinstance(placement, _StridedShard):
            inner = 1
            for later, other in enumerate(placements[number + 1 :], number + 1):
                same = isinstance(other, (Shard, _StridedShard)) and other.dim == placement.dim
                inner *= mesh.size(later) if same else 1
            if placement.split_factor != inner:
                raise BessemerError(
                    f"parallel: a process's part of a tensor of shape {list(whole)} is not one box ({placements})"
                )
    shape, offset = compute_local_shape_and_global_offset(whole, mesh, placements)
    if tuple(shape) != tuple(held.shape):
        raise BessemerError(
            f"parallel: a process holds {list(held.shape)} of a tensor of shape {list(whole)}; its placements "
            f"{placements} say {list(shape)}"
        )
    return whole, tuple(int(place) for place in offset), held


@torch.no_grad()
def as_part_of(parameter: Tensor, values: Tensor) -> Tensor:
    """A local tensor as the part of a whole that is split as the parameter is: an optimizer's state kept by processes.

    A tensor of another shape than the parameter's local part (a count of steps) is the same on all, and stays itself.
    The result shares the memory of `values`.
    """
    if not isinstance(parameter, DTensor) or isinstance(values, DTensor) or local(parameter).shape != values.shape:
        return values
    return DTensor.from_local(
        values.detach(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@torch.no_grad()
def fill(tensor: Tensor, read: Callable[[Box, Box], Tensor]) -> None:
    """Put into this process's part of a tensor what `read(offset, shape)` gives for its place in the whole."""
    _, offset, held = piece_of(tensor)
    if held.numel():
        held.copy_(read(offset, tuple(held.shape)))


@torch.no_grad()
def put(tensor: Tensor, whole: Tensor) -> None:
    """Put this process's part of `whole` into a tensor of the same shape."""
    fill(tensor, lambda offset, shape: whole[tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))])


def cuts(tensor: Tensor) -> int:
    """Into how many parts a tensor is divided."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_shard())
