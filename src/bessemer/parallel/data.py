"""Data parallelism: every process has its own part of the batch, and the gradients of all are added up.

DDP where each holds the whole model; FSDP2 where a group shares one copy: its optimizer state (zero 1: Rajbhandari et al.
2020, "ZeRO", section 5), its gradients too (2), its weights too (3). Gradients are sums and never means: each process
divides its loss by the targets of the whole batch.
"""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from bessemer.errors import InputError
from bessemer.parallel.team import Team


def uses_ddp(team: Team) -> bool:
    """Whether plain copies are all there is."""
    layout = team.layout
    return layout.replicate > 1 and layout.shard * layout.context * layout.tensor * layout.pipeline == 1


def uses_fsdp(team: Team) -> bool:
    """Whether gradients are added up by FSDP2: wherever there is more than one part of the batch, but for plain copies."""
    return team.layout.data * team.layout.context > 1 and not uses_ddp(team)


def shard(root: nn.Module, blocks: list[nn.Module], team: Team, narrow: torch.dtype | None) -> None:
    """Apply FSDP2 to each block and to the rest of `root`, in place.

    narrow: the type in which weights are gathered and computed with, where it is not theirs; gradients are added up in fp32
    (fp64 for fp64).
    """
    mesh, layout = _mesh(team), team.layout
    ways = layout.shard * layout.context
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32) if narrow else MixedPrecisionPolicy()
    pinned = torch.cuda.is_available()
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if layout.offload else OffloadPolicy(),
        "shard_placement_fn": lambda parameter: cut_of(parameter, ways),
    }
    # Split backward passes with weights given back after the forward pass compute wrong gradients (torch 2.13).
    again = layout.zero == 3 and not layout.is_v_shaped
    for block in blocks:
        fully_shard(block, reshard_after_forward=again, **options)
    fully_shard(root, reshard_after_forward=False, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def copy(root: nn.Module, device: torch.device) -> DistributedDataParallel:
    """DDP around `root`: gradients are added up while the backward pass goes on."""
    ids = [device.index or 0] if device.type == "cuda" else None
    has_new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # torch 2.13
    buffers: dict[str, Any] = {"forward_sync_buffers" if has_new_name else "broadcast_buffers": False}
    wrapped = DistributedDataParallel(root, device_ids=ids, gradient_as_bucket_view=True, **buffers)
    wrapped.register_comm_hook(None, _sum)  # type: ignore[arg-type]
    return wrapped


def micro_batch(root: nn.Module, team: Team, *, last: bool) -> AbstractContextManager[Any]:
    """Around the forward and backward pass of one micro-batch: gradients cross the network no sooner than they must.

    Copies wait for the last micro-batch. With zero 1 so do shards; with 2 and 3 each micro-batch's gradients are divided at
    once, since none may hold them whole, and the copies of a shard wait for the last. Weights stay gathered over the
    micro-batches with zero 1 and 2.
    """
    if isinstance(root, DistributedDataParallel):
        return contextlib.nullcontext() if last else root.no_sync()
    if isinstance(root, FSDPModule):
        zero = team.layout.zero
        root.set_requires_gradient_sync(last or zero > 1)
        root.set_requires_all_reduce(last)
        root.set_reshard_after_backward(last or zero == 3)
        root.set_is_last_backward(last)
    return contextlib.nullcontext()


def give_back(root: nn.Module) -> None:
    """Give gathered weights back after a forward pass that no backward pass follows: until then, who looks at the parameters
    would see the whole ones and not those that the optimizer knows."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def cut_of(parameter: Tensor, ways: int) -> Shard:
    """Along which dimension FSDP divides a parameter: one that tensor parallelism leaves whole, the first of an even size.

    The first dimension needs no copy around a collective, and may be uneven when no other is even.
    """
    taken = {p.dim for p in parameter.placements if isinstance(p, Shard)} if isinstance(parameter, DTensor) else set()
    free = [dim for dim in range(parameter.dim()) if dim not in taken]
    for dim in free:
        if parameter.shape[dim] % ways == 0:
            return Shard(dim)
    if 0 in free:
        return Shard(0)
    raise InputError(
        f"parallel.shard x parallel.context = {ways}: a tensor of {list(parameter.shape)} divides along none of the dimensions "
        "that parallel.tensor leaves; take a divisor of model.width"
    )


def _mesh(team: Team) -> DeviceMesh:
    assert team.mesh is not None, "a process alone shares nothing"
    layout, mesh = team.layout, team.mesh
    if layout.context == 1:
        return mesh["replicate", "shard"] if layout.replicate > 1 else mesh["shard"]
    if layout.replicate == 1 and layout.shard == 1:
        return mesh["context"]
    mesh["shard", "context"]._flatten("shard_context")
    return mesh["replicate", "shard_context"] if layout.replicate > 1 else mesh["shard_context"]


def _sum(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own hook would divide by the number of processes."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(_first)
    return future


# DDP looks at the types themselves, which are only their names here.
_sum.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]
