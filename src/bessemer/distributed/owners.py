"""Updates that need whole tensors of sharded parameters: each is computed by one process, its owner, and sent to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bessemer.distributed.sharded_tensors import as_shard_of, gather, local, put

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def owner_updates(
    weights: Sequence[DTensor], shard_of: Callable[[int], Tensor], update_of: Callable[[int, Tensor], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of each parameter and the local shard of its update. Collective.

    All processes of a mesh work at once, on parameters of about equal size (Liu et al. 2025, "Muon is Scalable for LLM Training",
    section 2.3, "Distributed Muon"). The order follows from shapes alone: it is the same on every process and in every run.

    Args:
        shard_of: Returns the local shard of what an update is computed from, such as a gradient.
        update_of: Returns the update, from the whole tensor; called on the owner.
    """
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
                device = whole.device  # the mesh's: weights that parallel.offload keeps are on the CPU
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
