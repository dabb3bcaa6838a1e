"""Differentiable collectives over a tensor or context group, and the vocabulary shard built on them.

Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): between matmuls each rank holds T / t of the tokens. The
all-gather before a matmul has a reduce-scatter as its backward, and the reduce-scatter after a matmul an all-gather. These
are functional collectives, which torch.compile traces. They are called as operators because their Python wrappers have
different names in torch 2.11 and 2.13.

Shapes: B sequences, T tokens, L = T / t of them on each of t ranks, D any last dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from bessemer.common.errors import InputError
from bessemer.distributed.mesh import ProcessMesh
from bessemer.distributed.schedules import nearest_that_fit
from bessemer.distributed.stages import rank_rows

functional = torch.ops._c10d_functional
Operation = Literal["all_gather", "reduce_scatter", "slice", "sum"]


@dataclass(frozen=True)
class RankGroup:
    """A process group along one axis of the mesh: this process's rank in it, its size and its name."""

    rank: int
    size: int
    name: GroupName

    @classmethod
    def from_mesh(cls, mesh: ProcessMesh, axis: str) -> RankGroup:
        return cls(mesh.coordinate(axis), mesh.size(axis), mesh.group(axis).group_name)

    def token_shard(self, x_BT: Tensor) -> Tensor:
        """Return this rank's shard of the last dimension, (..., T / t). Raises InputError when t does not divide T."""
        require_divisible_tokens(x_BT.shape[-1], self.size)
        return x_BT.chunk(self.size, dim=-1)[self.rank]

    def row_range(self, num_rows: int) -> tuple[int, int]:
        """Return the first row and the number of rows of this rank's shard; the last ranks may have fewer rows."""
        per_rank = rank_rows(num_rows, self.size)
        first = min(self.rank * per_rank, num_rows)
        return first, min(per_rank, num_rows - first)


@dataclass(frozen=True)
class VocabularyShard:
    """The token ids [first, first + size) that this rank holds of a vocabulary of `total` ids.

    The vocabulary is split over a tensor group (Shoeybi et al. 2019, section 3). Each rank holds the embedding and output
    rows of its ids, and computes only their logits. `max_size` is the number of ids of the largest shard.
    """

    first: int
    size: int
    total: int
    max_size: int
    group: GroupName

    @classmethod
    def from_group(cls, total: int, group: RankGroup) -> VocabularyShard:
        return cls(*group.row_range(total), total, rank_rows(total, group.size), group.name)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local row of each id (0 for ids of other ranks) and a mask of the local ids."""
        rows = ids - self.first
        is_local = (rows >= 0) & (rows < self.size)
        return torch.where(is_local, rows, 0), is_local

    def max(self, x: Tensor) -> Tensor:
        return all_reduce(x, "max", self.group)

    def sum(self, x: Tensor) -> Tensor:
        return all_reduce(x, "sum", self.group)


def require_divisible_tokens(tokens: int, size: int) -> None:
    """Raise InputError, with the nearest lengths that divide, when sequences of `tokens` do not divide by `size`."""
    if tokens % size:
        lengths = " or ".join(nearest_that_fit(tokens, lambda n: n % size == 0))
        what = f"{size} processes do not divide sequences of {tokens} tokens"
        raise InputError(f"parallel.tensor: {what}; set tokens.sequence_length to {lengths}")


def all_reduce(x: Tensor, operator: str, group: GroupName) -> Tensor:
    """Return the sum or maximum over a group, as a new tensor; not differentiable."""
    return wait(functional.all_reduce(x, operator, group))


def wait(x: Tensor) -> Tensor:
    """Wait for a functional collective and return its result."""
    return functional.wait_tensor(x)  # type: ignore[no-any-return]


def all_gather(x: Tensor, group: RankGroup, dim: int) -> Tensor:
    """All-gather and concatenate along `dim`; not differentiable. The torch operator itself gathers along dimension 0 only."""
    whole = wait(functional.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    return torch.cat(whole.chunk(group.size), dim) if dim else whole


def gather_tokens(x_BLD: Tensor, group: RankGroup, *, replicated: bool = False) -> Tensor:
    """All-gather each rank's (B, L, D) to (B, T, D).

    The backward sums the ranks' gradients (reduce-scatter). With `replicated`, all ranks compute the same values from this
    point and hold the same gradient, so the backward only slices it.
    """
    return collective(x_BLD, group, 1, "all_gather", "slice" if replicated else "reduce_scatter")


def scatter_tokens(x_BTD: Tensor, group: RankGroup) -> Tensor:
    """Reduce-scatter the ranks' (B, T, D) to each rank's (B, L, D); the backward is an all-gather."""
    require_divisible_tokens(x_BTD.shape[1], group.size)
    return collective(x_BTD, group, 1, "reduce_scatter", "all_gather")


def gather_columns(x: Tensor, group: RankGroup, num_columns: int) -> Tensor:
    """All-gather column shards (see `row_range`) to (..., num_columns); the backward slices a replicated gradient."""
    padded = torch.nn.functional.pad(x, (0, rank_rows(num_columns, group.size) - x.shape[-1]))
    # Only the last ranks have fewer columns than the others, so padding is at the end.
    return collective(padded, group, -1, "all_gather", "slice")[..., :num_columns].contiguous()


def sum_over(x: Tensor, group: RankGroup) -> Tensor:
    """Sum over a group with an all-reduce, whose backward sums the gradients too.

    Each rank uses the result for its own shard, so each holds only a part of the gradient.
    """
    return collective(x, group, 0, "sum", "sum")


def collective(x: Tensor, group: RankGroup, dim: int, forward: Operation, backward: Operation) -> Tensor:
    """Run a collective along `dim` whose backward pass runs `backward` on the gradient."""
    return _Collective.apply(x, group, dim, forward, backward)  # type: ignore[no-any-return, no-untyped-call]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup, dim: int, forward: Operation, backward: Operation) -> Tensor:
        ctx.group, ctx.dim, ctx.operation = group, dim, backward
        return _run(forward, x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _run(ctx.operation, gradients[0], ctx.group, ctx.dim), None, None, None, None


def _run(operation: Operation, x: Tensor, group: RankGroup, dim: int) -> Tensor:
    if operation == "sum":
        return all_reduce(x.contiguous(), "sum", group.name)
    if operation == "slice":
        return x.chunk(group.size, dim)[group.rank].contiguous()
    if operation == "all_gather":
        return all_gather(x, group, dim)
    parts = torch.cat(x.chunk(group.size, dim)) if dim else x.contiguous()
    return wait(functional.reduce_scatter_tensor(parts, "sum", group.size, group.name))
