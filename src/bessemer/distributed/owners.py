"""Updates that need full tensors of sharded parameters: one process, the owner, computes each and sends it to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bessemer.distributed.sharded_tensors import as_shard_of, gather, local, own_experts, put

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def owner_updates(
    weights: Sequence[DTensor], shard_of: Callable[[int], Tensor], update_of: Callable[[int, Tensor], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield (index in `weights`, local shard of the update) for each sharded parameter. Collective.

    Each parameter's update is computed in full by one process, its owner, which broadcasts it. All processes of a mesh
    compute at the same time, on parameters of about equal size ("Distributed Muon": Liu et al. 2025, "Muon is Scalable
    for LLM Training", section 2.3). The order depends on shapes alone, so it is the same on every process and in every
    run.

    Args:
        weights: The sharded parameters.
        shard_of: Returns, for an index in `weights`, the local shard of the input of the update, such as a gradient.
        update_of: Returns the full update from (index, full input); called on the owner.
    """
    weights = [own_experts(weight) for weight in weights]
    meshes: dict[DeviceMesh, list[int]] = {}
    for number, weight in enumerate(weights):
        meshes.setdefault(weight.device_mesh, []).append(number)
    for mesh, numbers in meshes.items():
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "a process updates parameters of its own mesh"
        own_number = int(np.ravel_multi_index(coordinate, mesh.shape))
        largest_first = sorted(numbers, key=lambda number: (-weights[number].numel(), number))
        for first in range(0, len(numbers), mesh.size()):
            owners = {number: owner for owner, number in enumerate(largest_first[first : first + mesh.size()])}
            owned: dict[int, Tensor] = {}
            for number, owner in owners.items():
                whole = gather(weights[number], shard_of(number))
                device = whole.device  # the mesh's device: with parallel.offload the weights are on the CPU
                if owner == own_number:
                    owned[number] = whole
            owned = {number: update_of(number, whole) for number, whole in owned.items()}
            for number, owner in owners.items():
                shard = local(weights[number])
                update = owned.pop(number, None)
                if update is None:
                    update = shard.new_empty(weights[number].shape, device=device)
                for dimension, position in enumerate(np.unravel_index(owner, mesh.shape)):
                    torch.distributed.broadcast(update, group=mesh.get_group(dimension), group_src=int(position))
                own_shard = torch.empty_like(shard)
                put(as_shard_of(weights[number], own_shard), update)
                yield number, own_shard
