"""The part of a tensor that a process holds: compared with tensors whose values are their own places."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from processes import run_on
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from bessemer.errors import BessemerError
from bessemer.parallel.dtensors import as_shard_of, fill, local, local_shard
from bessemer.parallel.mesh import join
from bessemer.recipe import Parallel


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def lies_right(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """What the process holds is what the whole has at the place that it names."""
    shape, offset, held = local_shard(tensor)
    if held.numel() == 0:
        return shape == tuple(whole.shape)
    there = tuple(slice(at, at + n) for at, n in zip(offset, held.shape, strict=True))
    return shape == tuple(whole.shape) and torch.equal(whole[there], held)


def of_each() -> dict[str, Any]:
    mesh = join(Parallel(shard=2, tensor=2), torch.device("cpu"))
    assert mesh.device_mesh is not None
    device_mesh, found = mesh.device_mesh["shard", "tensor"], {}
    for shape in ((8, 6), (7, 5), (3, 2), (1, 9)):
        whole = numbered(shape)
        for placements in (
            [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Shard(0)],
            [Shard(1), Replicate()], [Replicate(), Replicate()],
        ):  # fmt: skip
            split = distribute_tensor(whole, device_mesh, placements)
            found[f"{shape} {placements}"] = lies_right(split, whole)
            empty = distribute_tensor(torch.zeros(shape), device_mesh, placements)
            fill(empty, lambda offset, size, whole=whole: whole[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))])  # fmt: skip
            found[f"{shape} {placements} filled"] = torch.equal(empty.full_tensor(), whole)
    for size in (8, 7, 5, 3, 2):  # FSDP2 over tensor parallelism on the same, only dimension; uneven, and empty on some
        module, whole = nn.Module(), numbered((size,))
        module.weight = nn.Parameter(distribute_tensor(whole, device_mesh["tensor"], [Shard(0)]))
        fully_shard(module, mesh=device_mesh["shard"])
        assert isinstance(module.weight, DTensor)
        found[f"fsdp over tensor, {size}"] = lies_right(module.weight, whole)
        state = torch.full_like(local(module.weight), mesh.rank)
        split = as_shard_of(module.weight, state)
        assert isinstance(split, DTensor)
        found[f"state as part, {size}"] = (
            local_shard(split)[:2] == local_shard(module.weight)[:2]
            and local_shard(split)[2].data_ptr() == state.data_ptr()
        )
        # Offloaded, so that the mesh is of another device: the values are filled, and not a copy of them there.
        with patch.object(type(device_mesh), "device_type", "meta"):
            values = torch.full_like(state, -1)
            fill(as_shard_of(module.weight, values), lambda at, size, whole=whole: whole[at[0] : at[0] + size[0]])
        found[f"offloaded, {size}"] = torch.equal(values, local(module.weight))
        found[f"count, {size}"] = as_shard_of(module.weight, torch.tensor(3.0)).shape == ()
    refused = []
    for placements in ([Partial(), Replicate()], [_StridedShard(0, split_factor=2), Replicate()]):
        try:
            local_shard(DTensor.from_local(torch.ones(4, 2), device_mesh, placements, run_check=False))
        except BessemerError as error:
            refused.append(str(error))
    found["refused"] = len(refused) == 2 and "not reduced" in refused[0] and "not one box" in refused[1]
    return found


def test_every_process_knows_what_it_holds() -> None:
    for rank, found in enumerate(run_on(4, of_each)):
        wrong = [name for name, right in found.items() if not right]
        assert not wrong, (rank, wrong)
        assert len(found) == 4 * 6 * 2 + 5 * 4 + 1


def test_a_plain_tensor_is_all_its_own() -> None:
    tensor = torch.zeros(3, 2)
    assert local(tensor) is tensor
    shape, offset, held = local_shard(tensor)
    assert (shape, offset, held.data_ptr()) == ((3, 2), (0, 0), tensor.data_ptr())
    fill(tensor, lambda offset, size: torch.ones(size))
    assert tensor.sum() == 6
    scalar = torch.tensor(0.0)
    fill(scalar, lambda offset, size: torch.full(size, 5.0))
    assert scalar == 5
    assert as_shard_of(tensor, torch.ones(3, 2)).shape == (3, 2)
