"""Data parallelism: each rank computes gradients of its part of the batch, and gradients are summed over ranks.

DDP is used when every rank holds the full model, FSDP2 when a group of ranks shards one copy: its optimizer state (ZeRO 1;
Rajbhandari et al. 2020, section 5), its gradients too (ZeRO 2), or its weights too (ZeRO 3). Gradients are summed, not
averaged: each rank divides its loss by the number of targets in the full batch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from bessemer.distributed.mesh import SHARD_CONTEXT, ProcessMesh, set_timeout
from bessemer.distributed.sharded_tensors import is_dtensor
from bessemer.distributed.shards import zero_stage

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import Shard


def is_fsdp(module: object) -> TypeGuard[FSDPModule]:
    """Return True for a module that FSDP2 wraps, without importing FSDP2 if it is not loaded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def apply_fsdp(root: nn.Module, blocks: list[nn.Module], mesh: ProcessMesh, compute_dtype: torch.dtype | None) -> None:
    """Apply FSDP2 to each block and to the rest of `root`, in place.

    Weights are gathered and computed in `compute_dtype`; None keeps their dtype. Gradients are reduced in fp32 (fp64 for
    fp64). Experts that are divided over ranks have a mesh of their own (`expert.apply_ep`).
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    layout = mesh.layout
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    pinned = torch.cuda.is_available()
    options: dict[str, Any] = {
        "mesh": _data_mesh(mesh),
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if layout.offload else OffloadPolicy(),
        "shard_placement_fn": functools.partial(shard_placement, num_shards=layout.state_shards),
        # The bias of a router stays whole and in fp32.
        "ignored_params": {parameter for name, parameter in root.named_parameters() if name.endswith("router.bias")},
    }
    reshard_after_forward = zero_stage(layout) == 3
    for module in list(root.modules()):
        own_mesh: DeviceMesh | None = getattr(module, "fsdp_mesh", None)
        if own_mesh is not None:
            placement = functools.partial(shard_placement, num_shards=own_mesh.size())
            own = {"mesh": own_mesh, "shard_placement_fn": placement}
            fully_shard(module, reshard_after_forward=reshard_after_forward, **(options | own))
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    # Embedding and head are needed at both ends of a pass, so they are not resharded in between.
    fully_shard(root, reshard_after_forward=False, **options)
    for module in root.modules():
        if is_fsdp(module):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def apply_ddp(root: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Wrap `root` in DDP, whose all-reduce sums gradients and overlaps the backward pass."""
    ids = [device.index or 0] if device.type == "cuda" else None
    has_new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # torch 2.13
    buffers: dict[str, Any] = {"forward_sync_buffers" if has_new_name else "broadcast_buffers": False}
    wrapped = DistributedDataParallel(root, device_ids=ids, gradient_as_bucket_view=True, **buffers)
    wrapped.register_comm_hook(None, _sum)  # type: ignore[arg-type]
    return wrapped


def gradient_sync(root: nn.Module, mesh: ProcessMesh, *, last: bool) -> AbstractContextManager[Any]:
    """Return the context of one micro-batch's forward and backward pass, which defers gradient reduction if possible.

    DDP and ZeRO 1 reduce after the last micro-batch. ZeRO 2 and 3 reduce-scatter after each micro-batch, since no rank may
    hold full gradients, and all-reduce over replicas after the last. ZeRO 1 and 2 keep weights gathered between
    micro-batches.
    """
    if isinstance(root, DistributedDataParallel):
        return contextlib.nullcontext() if last else root.no_sync()
    if is_fsdp(root):
        zero = zero_stage(mesh.layout)
        root.set_requires_gradient_sync(last or zero > 1)
        root.set_requires_all_reduce(last)
        root.set_reshard_after_backward(last or zero == 3)
        root.set_is_last_backward(last)
    return contextlib.nullcontext()


def reshard(root: nn.Module) -> None:
    """Reshard FSDP2 parameters after a forward-only pass such as validation.

    Until then they stay unsharded, and code that reads them would not see the optimizer's shards.
    """
    for module in root.modules():
        if is_fsdp(module):
            module.reshard()


def shard_placement(parameter: Tensor, num_shards: int) -> Shard:
    """Return the placement of FSDP's shards: the first free dimension that divides evenly, else dimension 0.

    Dimensions that tensor parallelism shards are not free. Dimension 0 needs no copy around collectives, so it may be
    uneven when no other dimension divides. Assumes that `validity.require_shards` has passed.
    """
    from torch.distributed.tensor import Shard

    dims = {p.dim for p in parameter.placements if isinstance(p, Shard)} if is_dtensor(parameter) else set()
    free = [dim for dim in range(parameter.dim()) if dim not in dims]
    for dim in free:
        if parameter.shape[dim] % num_shards == 0:
            return Shard(dim)
    assert 0 in free, f"{list(parameter.shape)} has no dimension that {num_shards} divides"
    return Shard(0)


def _data_mesh(mesh: ProcessMesh) -> DeviceMesh:
    assert mesh.device_mesh is not None, "a single process shards nothing"
    layout, device_mesh = mesh.layout, mesh.device_mesh
    if layout.context == 1:
        return device_mesh["replicate", "shard"] if layout.replicate > 1 else device_mesh["shard"]
    if layout.replicate == 1 and layout.shard == 1:
        return device_mesh["context"]
    device_mesh["shard", "context"]._flatten(SHARD_CONTEXT)
    set_timeout(device_mesh.get_group(SHARD_CONTEXT))
    return device_mesh["replicate", SHARD_CONTEXT] if layout.replicate > 1 else device_mesh[SHARD_CONTEXT]


def _sum(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """All-reduce a DDP bucket without DDP's division by the number of ranks (a communication hook)."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


# DDP compares the annotations with types, but `from __future__ import annotations` makes them strings.
_sum.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
