"""Numbers over all processes: norms of what is divided among them, and a fingerprint that knows no layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from bessemer.parallel.local import cuts, local, piece_of
from bessemer.parallel.team import Team


def copies(parameter: Tensor, team: Team) -> int:
    """How many processes hold the same part of a parameter."""
    return team.world // team.layout.pipeline // cuts(parameter)


@torch.no_grad()
def squares(tensors: Sequence[tuple[Tensor, Tensor]], team: Team) -> float:
    """Sum of the squares of this process's part of some tensors, so that the sum over all processes counts each element once.

    tensors: (parameter, what belongs to it: its gradient, its update, itself), of equal placement.
    """
    found = [local(tensor) for _, tensor in tensors]
    shares = torch.tensor([1.0 / copies(parameter, team) for parameter, _ in tensors], dtype=torch.float64)
    if not found:
        return 0.0
    norms = torch.stack(torch._foreach_norm(found)).double().cpu()
    return float((norms.square() * shares).sum())


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], clip_norm: float, norm: float) -> None:
    """Scale the gradients to a global norm of `clip_norm`, where `norm` is larger; as torch's clip_grads_with_norm_."""
    found = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if found:
        share = clip_norm / (torch.tensor(norm, dtype=found[0].dtype, device=found[0].device) + 1e-6)
        torch._foreach_mul_(found, share.clamp(max=1.0))


@torch.no_grad()
def fingerprint(named: Iterable[tuple[str, Tensor]], team: Team) -> str:
    """128 bits of hexadecimal digits that change with any bit of any tensor, and not with how they are divided.

    A hash of each element's bits, its place and its tensor's name, summed modulo 2^64, twice: sums may be made by parts. It
    finds differences and damage; it is no protection against intent.
    """
    total = torch.zeros(2, dtype=torch.int64)
    for name, tensor in named:
        shape, offset, part = piece_of(tensor)
        if part.numel() == 0 or not _tells(tensor, team):
            continue
        total += _sums(name, shape, offset, part)
    return "".join(f"{value & (2**64 - 1):016x}" for value in team.sum(total).tolist())


def _tells(parameter: Tensor, team: Team) -> bool:
    """Whether this process is the one of those with equal parts that counts."""
    if team.is_alone:
        return True
    from torch.distributed.tensor import DTensor, Shard

    divided = set()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        divided = {name for name, p in zip(names, parameter.placements, strict=True) if isinstance(p, Shard)}
        if "shard_context" in divided:
            divided |= {"shard", "context"}
    return all(team.place(axis) == 0 for axis in ("replicate", "shard", "context", "tensor") if axis not in divided)


CHUNK = 1 << 18  # elements hashed at a time, each with some 64 bytes beside it


def _sums(name: str, shape: tuple[int, ...], offset: tuple[int, ...], part: Tensor) -> Tensor:
    """Two sums of hashes over a part, (2,) int64, wrapping."""
    import hashlib

    seeds = [int.from_bytes(hashlib.blake2b(f"{n}{name}".encode(), digest_size=7).digest(), "little") for n in (0, 1)]
    bits = part.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[part.element_size()])
    flat, total = bits.reshape(-1), torch.zeros(2, dtype=torch.int64)
    for start in range(0, flat.numel(), CHUNK):
        some = flat[start : start + CHUNK].to(torch.int64)
        where = _places(start, len(some), shape, offset, part)
        for number, seed in enumerate(seeds):
            total[number] += _mixed(some ^ _mixed(where + seed)).sum().cpu()
    return total


def _places(start: int, count: int, shape: tuple[int, ...], offset: tuple[int, ...], part: Tensor) -> Tensor:
    """Places in the whole tensor, counted in row-major order, of `count` elements of a part from its element `start` on."""
    index = torch.arange(start, start + count, device=part.device)
    if shape == tuple(part.shape):
        return index
    place, stride = torch.zeros_like(index), 1
    for dim in reversed(range(len(shape))):
        place += (index % part.shape[dim] + offset[dim]) * stride
        index //= part.shape[dim]
        stride *= shape[dim]
    return place


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014), on wrapping int64."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xbf58476d1ce4e5b9
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94d049bb133111eb
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
