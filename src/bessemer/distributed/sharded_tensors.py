"""Operations on sharded tensors: local shards, gathers, global norms, layout-independent hashes and comparison of replicas.

FSDP2 and tensor parallelism, alone or together, make every sharded parameter a DTensor whose local shard is one box of the
full tensor. Processes that hold the same weights must hold the same bits.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from bessemer.common.errors import BessemerError
from bessemer.distributed.mesh import COPIES, EXPERT, MESH_AXES, SHARD_CONTEXT, ProcessMesh
from bessemer.model.dropout import splitmix64_finaliser

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Box = tuple[int, ...]  # an offset or a shape
Key = tuple[str, Box, Box]  # name, offset and size of a shard
Sums = dict[Key, int]
HASH_CHUNK = 1 << 14  # elements hashed at a time: about 64 bytes of intermediates each, so that they fit a core's cache
DEVICE_CHUNKS = 64  # chunks hashed at a time on a device, where larger kernels are faster


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return True for a DTensor, without importing torch's DTensor module, which takes half a second.

    If the module is not loaded, no DTensor exists.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, sharing its memory, or the tensor itself if it is not a DTensor."""
    if not is_dtensor(tensor):
        return tensor
    shard: Tensor = tensor.to_local()
    return shard


@torch.no_grad()
def local_shard(tensor: Tensor) -> tuple[Box, Box, Tensor]:
    """Return the shape of the full tensor, the offset of the local shard in it, and the local shard.

    The shard is empty if a dimension has fewer entries than shards, or if the process is outside the tensor's mesh. Raises
    BessemerError for a Partial tensor, and for a shard that is not one box: a `_StridedShard` whose split factor is not the
    number of shards that the later mesh axes make of the same dimension.
    """
    whole = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return whole, (0,) * len(whole), tensor.detach()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    shard, device_mesh, placements = local(tensor).detach(), tensor.device_mesh, tensor.placements
    if device_mesh.get_coordinate() is None:
        return whole, (0,) * len(whole), shard.new_empty((0,) * max(len(whole), 1))
    for number, placement in enumerate(placements):
        if placement.is_partial():
            raise BessemerError(f"parallel: a tensor of shape {list(whole)} is not reduced yet ({placements})")
        if isinstance(placement, _StridedShard):
            inner = 1
            for later, other in enumerate(placements[number + 1 :], number + 1):
                same = isinstance(other, (Shard, _StridedShard)) and other.dim == placement.dim
                inner *= device_mesh.size(later) if same else 1
            if placement.split_factor != inner:
                raise BessemerError(f"parallel: a shard of a tensor of {list(whole)} is not one box ({placements})")
    shape, offset = compute_local_shape_and_global_offset(whole, device_mesh, placements)
    if tuple(shape) != tuple(shard.shape):
        what = f"a shard of a tensor of shape {list(whole)} is {list(shard.shape)}"
        raise BessemerError(f"parallel: {what}, but its placements {placements} imply {list(shape)}")
    return whole, tuple(int(start) for start in offset), shard


@torch.no_grad()
def as_shard_of(parameter: Tensor, values: Tensor) -> Tensor:
    """Return a DTensor placed like the parameter whose local shard is `values`, sharing memory.

    If the parameter is no DTensor, it returns `values`. Raises BessemerError if the parameter's local shard has another
    shape.
    """
    if values.shape != local(parameter).shape:
        expected = f"that of its parameter {list(local(parameter).shape)}"
        raise BessemerError(f"optimizer: a shard of the state has shape {list(values.shape)}, {expected}")
    if not is_dtensor(parameter):
        return values
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # `from_local` would copy offloaded values to the mesh's device, and restoring into that copy would have no effect.
    meta = TensorMeta(parameter.shape, parameter.stride(), values.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, meta)
    return DTensor(values.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]


@torch.no_grad()
def own_experts(parameter: DTensor) -> DTensor:
    """Return this process's experts of a parameter, sharing memory, as a DTensor over the processes that hold the same ones.

    Other parameters are returned as they are.
    """
    device_mesh = parameter.device_mesh
    if EXPERT not in (device_mesh.mesh_dim_names or ()):
        return parameter
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    shape = torch.Size([len(local(parameter)), *parameter.shape[1:]])
    meta = TensorMeta(shape, parameter.stride(), parameter.dtype)
    spec = DTensorSpec(device_mesh[COPIES], parameter.placements[:1], meta)
    return DTensor(local(parameter).detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]


@torch.no_grad()
def gather(parameter: DTensor, values: Tensor) -> Tensor:
    """Return the full tensor of local shards placed like the parameter's, on the device of its mesh. Collective."""
    from torch.distributed.tensor import DTensor

    placed = DTensor.from_local(
        values, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )  # fmt: skip
    whole: Tensor = placed.full_tensor()
    return whole


@torch.no_grad()
def fill(tensor: Tensor, read: Callable[[Box, Box], Tensor]) -> None:
    """Set the local shard of a tensor to `read(offset, shape)`, which returns that box of the full tensor."""
    _, offset, shard = local_shard(tensor)
    if shard.numel():
        shard.copy_(read(offset, tuple(shard.shape)))


@torch.no_grad()
def put(tensor: Tensor, whole: Tensor) -> None:
    """Copy this process's slice of `whole` into the local shard of a tensor of the same shape."""
    fill(tensor, lambda offset, shape: whole[tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))])


def num_shards(tensor: Tensor) -> int:
    """Return the number of shards of a tensor, without replicas."""
    if not is_dtensor(tensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_shard())


def num_replicas(parameter: Tensor, mesh: ProcessMesh) -> int:
    """Return the number of processes that hold the same shard of a parameter."""
    return mesh.world // mesh.layout.pipeline // num_shards(parameter)


@torch.no_grad()
def sum_of_squares(tensors: Sequence[tuple[Tensor, Tensor]], mesh: ProcessMesh) -> Tensor:
    """Return this process's share of the global sum of squares: a float64 scalar on the device, without waiting for it.

    Shards are weighted so that the sum over all processes counts each element once. `tensors` are pairs of a parameter and
    its gradient, its update or the parameter itself, placed in the same way.
    """
    shards = [local(tensor) for _, tensor in tensors]
    if not shards:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(shards)).double()
    weights = [1.0 / num_replicas(parameter, mesh) for parameter, _ in tensors]
    on_host = torch.tensor(weights, dtype=torch.float64, pin_memory=norms.is_cuda)
    return (norms.square() * on_host.to(norms.device, non_blocking=True)).sum()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float, norm: Tensor) -> None:
    """Scale gradients of global norm `norm`, a scalar, to at most `clip_norm`, as torch's `clip_grads_with_norm_` does."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        factor = clip_norm / (norm.to(gradients[0].device, gradients[0].dtype) + 1e-6)
        torch._foreach_mul_(gradients, factor.clamp(max=1.0))


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of each element as an integer of the same width."""
    widths = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return tensor.contiguous().view(widths[tensor.element_size()])


@torch.no_grad()
def tensors_digest(named: Iterable[tuple[str, Tensor]], mesh: ProcessMesh) -> str:
    """Return a 128-bit hexadecimal hash of all tensors that changes with any bit and not with the layout.

    It sums hashes of each element's bits, index and tensor name modulo 2^64, with two seeds, so that each shard can be
    summed separately. It detects differences and damage, not tampering.
    """
    total = torch.zeros(2, dtype=torch.int64)
    for name, tensor in named:
        shape, offset, shard = local_shard(tensor)
        if shard.numel() and _is_first_replica(tensor, mesh):
            total += _hash_sums(name, shape, offset, shard)
    return "".join(f"{value & (2**64 - 1):016x}" for value in mesh.sum(total).tolist())


def _is_first_replica(parameter: Tensor, mesh: ProcessMesh) -> bool:
    """Return True on exactly one of the processes that hold the same shard."""
    if mesh.is_single:
        return True
    sharded = set()
    if is_dtensor(parameter):
        names = parameter.device_mesh.mesh_dim_names or ()
        sharded = {name for name, p in zip(names, parameter.placements, strict=True) if not p.is_replicate()}
        if SHARD_CONTEXT in sharded:
            sharded |= {"shard", "context"}
        if EXPERT in sharded:  # divided over all processes of a pipeline stage
            return True
    return all(mesh.coordinate(axis) == 0 for axis in MESH_AXES if axis not in sharded | {"pipeline"})


def _hash_sums(name: str, shape: Box, offset: Box, shard: Tensor) -> Tensor:
    """Return the sums, modulo 2^64, of a hash of each element of a shard with two seeds, (2,) int64.

    `name` and `shape` are those of the full tensor, and `offset` is the shard's in it; the hash of an element depends
    on the name, its bits and its index in the full tensor.
    """
    seeds = [int.from_bytes(hashlib.blake2b(f"{n}{name}".encode(), digest_size=7).digest(), "little") for n in (0, 1)]
    bits, strides = bits_of(shard).reshape(-1), [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    total = torch.zeros(2, dtype=torch.int64)
    size = HASH_CHUNK * (1 if shard.device.type == "cpu" else DEVICE_CHUNKS)
    for start in range(0, bits.numel(), size):
        chunk = bits[start : start + size].to(torch.int64)
        index = torch.arange(start, start + len(chunk), device=shard.device)
        if shape != tuple(shard.shape):  # row-major in the whole tensor
            axes = zip(torch.unravel_index(index, shard.shape), offset, strides, strict=True)
            index = torch.stack([(position + first) * stride for position, first, stride in axes]).sum(dim=0)
        for number, seed in enumerate(seeds):
            total[number] += splitmix64_finaliser(chunk ^ splitmix64_finaliser(index + seed)).sum().cpu()
    return total


@dataclass(frozen=True)
class Difference:
    """A shard whose replicas differ between ranks.

    Attributes:
        name: Name of the shard's tensor.
        key: Name, offset and shape of the shard, as in `bit_sums`.
        sums: The sum of its elements' bits (`bit_sums`) on each rank.
    """

    name: str
    key: Key
    sums: dict[int, int]

    @property
    def suspects(self) -> list[int]:
        """The ranks that differ from the majority, or all ranks if no value has a majority."""
        values = list(self.sums.values())
        common = max(set(values), key=values.count)
        if 2 * values.count(common) <= len(values):
            return sorted(self.sums)
        return self.differing_from(common)

    def differing_from(self, right: int) -> list[int]:
        """Return the ranks whose sum is not `right`."""
        return sorted(rank for rank, value in self.sums.items() if value != right)


@torch.no_grad()
def bit_sums(named: Iterable[tuple[str, Tensor]]) -> Sums:
    """Return a dict from (name, offset, shape) of each local shard to the sum of its elements' bits, taken as integers.

    Any flipped bit changes the sum.
    """
    keys, sums = [], []
    for name, tensor in named:
        _, offset, shard = local_shard(tensor)
        if shard.numel():
            keys.append((name, offset, tuple(shard.shape)))
            sums.append(bits_of(shard).sum(dtype=torch.int64))
    return dict(zip(keys, torch.stack(sums).tolist(), strict=True)) if sums else {}  # one transfer from the device


def differences(by_rank: list[Sums]) -> list[Difference]:
    """Return the shards that several processes hold with different bits; `by_rank` has the `bit_sums` of each rank."""
    holders: dict[Key, dict[int, int]] = {}
    for rank, sums in enumerate(by_rank):
        for key, value in sums.items():
            holders.setdefault(key, {})[rank] = value
    return [Difference(key[0], key, sums) for key, sums in holders.items() if len(set(sums.values())) > 1]
