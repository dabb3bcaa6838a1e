"""Collectives of a tensor-parallel group, each with its own backward, and the vocabulary shard built on them.

Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): between matmuls each rank holds T / t of the tokens. The
all-gather before a matmul has a reduce-scatter as its backward; the reduce-scatter after a matmul has an all-gather.
These are functional collectives, which torch.compile traces, called as operators because their Python wrappers have
different names in torch 2.11 and 2.13.

Shapes: B sequences, T tokens, t ranks of the group, D any last dimension, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from bessemer.errors import InputError

functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class TensorGroup:
    """This process's rank in a tensor-parallel group, the group's size and its name."""

    rank: int
    size: int
    name: GroupName

    def token_shard(self, x_BT: Tensor) -> Tensor:
        """This rank's shard of the last dimension, (..., T / t). Raises InputError when t does not divide T."""
        require_divisible_tokens(x_BT.shape[-1], self.size)
        return x_BT.chunk(self.size, dim=-1)[self.rank]

    def row_range(self, num_rows: int) -> tuple[int, int]:
        """First row and number of rows of this rank's shard; the last ranks may have fewer."""
        per_rank = -(-num_rows // self.size)
        first = min(self.rank * per_rank, num_rows)
        return first, min(per_rank, num_rows - first)


@dataclass(frozen=True)
class VocabularyShard:
    """The ids [first, first + size) of a vocabulary of `total`, split over a tensor group (Shoeybi et al. 2019, section 3).

    Each rank holds the embedding and output rows of its ids, and only their logits. max_size: ids of the largest shard.
    """

    first: int
    size: int
    total: int
    max_size: int
    group: GroupName

    @classmethod
    def of(cls, total: int, group: TensorGroup) -> VocabularyShard:
        """This rank's shard."""
        return cls(*group.row_range(total), total, -(-total // group.size), group.name)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Local rows of ids (0 for those on other ranks), and whether each id is local."""
        rows = ids - self.first
        is_local = (rows >= 0) & (rows < self.size)
        return torch.where(is_local, rows, 0), is_local

    def max(self, x: Tensor) -> Tensor:
        """Elementwise maximum over the group."""
        return all_reduce(x, "max", self.group)

    def sum(self, x: Tensor) -> Tensor:
        """Elementwise sum over the group."""
        return all_reduce(x, "sum", self.group)


def require_divisible_tokens(tokens: int, size: int) -> None:
    """Raise InputError, with the nearest lengths that divide, when sequences of `tokens` do not divide by `size`."""
    if tokens % size:
        low = tokens // size * size
        nearest = f"{low} and {low + size}" if low else str(low + size)
        raise InputError(
            f"parallel.tensor: sequences of {tokens} tokens do not divide by {size} processes; the nearest lengths that "
            f"do are {nearest} (tokens.sequence_length, over parallel.context)"
        )


def all_reduce(x: Tensor, operator: str, group: GroupName) -> Tensor:
    """The sum or max over a group; not differentiable."""
    return _wait(functional.all_reduce(x, operator, group))


def gather_tokens(x_BTD: Tensor, group: TensorGroup, *, replicated: bool = False) -> Tensor:
    """All-gather each rank's (B, T / t, D) to (B, T, D).

    The backward sums the ranks' gradients (reduce-scatter). replicated: all ranks compute the same from here on and hold the
    same gradient, so that the backward only slices it.
    """
    gathered: Tensor = _GatherTokens.apply(x_BTD, group, replicated)  # type: ignore[no-untyped-call]
    return gathered


def scatter_tokens(x_BTD: Tensor, group: TensorGroup) -> Tensor:
    """Reduce-scatter the ranks' (B, T, D) to each rank's (B, T / t, D); the backward is an all-gather."""
    scattered: Tensor = _ScatterTokens.apply(x_BTD, group)  # type: ignore[no-untyped-call]
    return scattered


def gather_columns(x: Tensor, group: TensorGroup, num_columns: int) -> Tensor:
    """All-gather column shards (see `row_range`) to (..., num_columns); the backward slices a replicated gradient."""
    gathered: Tensor = _GatherColumns.apply(x, group, num_columns)  # type: ignore[no-untyped-call]
    return gathered


def sum_over(x: Tensor, group: TensorGroup) -> Tensor:
    """All-reduce sum whose backward sums the gradients too, because each rank uses the result for its own shard."""
    total: Tensor = _SumOver.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: TensorGroup, replicated: bool) -> Tensor:
        ctx.group, ctx.replicated = group, replicated
        return _all_gather(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        group = ctx.group
        if ctx.replicated:
            return gradients[0].chunk(group.size, dim=1)[group.rank].contiguous(), None, None
        return _reduce_scatter(gradients[0], group), None, None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        require_divisible_tokens(x_BTD.shape[1], group.size)
        return _reduce_scatter(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_gather(gradients[0], ctx.group), None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, num_columns: int) -> Tensor:
        ctx.columns = group.row_range(num_columns)
        padded = torch.nn.functional.pad(x, (0, -(-num_columns // group.size) - x.shape[-1]))
        flat = functional.all_gather_into_tensor(padded.unsqueeze(0).contiguous(), group.size, group.name)
        # Only the last rank has fewer columns than the others, so padding is at the end.
        return _wait(flat).movedim(0, -2).flatten(-2)[..., :num_columns].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].narrow(-1, *ctx.columns), None, None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group.name
        return all_reduce(x, "sum", group.name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0].contiguous(), "sum", ctx.group), None


def _all_gather(x_BTD: Tensor, group: TensorGroup) -> Tensor:
    parts = _wait(functional.all_gather_into_tensor(x_BTD.contiguous(), group.size, group.name))
    return parts.unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1, 2)  # type: ignore[no-untyped-call,no-any-return]


def _reduce_scatter(x_BTD: Tensor, group: TensorGroup) -> Tensor:
    parts = x_BTD.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1)  # type: ignore[no-untyped-call]
    return _wait(functional.reduce_scatter_tensor(parts.contiguous(), "sum", group.size, group.name))


def _wait(x: Tensor) -> Tensor:
    result: Tensor = functional.wait_tensor(x)
    return result
