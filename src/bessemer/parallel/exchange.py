"""What the processes of a tensor group exchange while they compute, each exchange with its own way back.

Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): between the products each process holds T / t of the tokens.
g, the gather before a product, sums the gradients on the way back and leaves each process its tokens'; its mirror sums the
partial results after a product and leaves each its tokens'. The functional collectives are used, since torch.compile knows
them, as operators, since their Python wrappers have changed names between torch 2.11 and 2.13.

Shapes: B sequences, T tokens, t processes of the group, D any last dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from bessemer.errors import InputError

collectives = torch.ops._c10d_functional


@dataclass(frozen=True)
class Share:
    """This process's part of a tensor group. place: its number, from 0; size: processes of the group; group: its name."""

    place: int
    size: int
    group: GroupName

    def tokens(self, x_BT: Tensor) -> Tensor:
        """This process's part of the last dimension, (..., T / t). Raises InputError when t does not divide T."""
        require_tokens(x_BT.shape[-1], self.size)
        return x_BT.chunk(self.size, dim=-1)[self.place]

    def rows(self, whole: int) -> tuple[int, int]:
        """First and number of this process's rows of a dimension of `whole`: all have as many, but for the last ones."""
        each = -(-whole // self.size)
        first = min(self.place * each, whole)
        return first, min(each, whole - first)


def require_tokens(tokens: int, size: int) -> None:
    """Raise InputError, with the nearest lengths that do, when sequences of `tokens` do not divide by `size`."""
    if tokens % size:
        low = tokens // size * size
        nearest = f"{low} and {low + size}" if low else str(low + size)
        raise InputError(
            f"parallel.tensor: sequences of {tokens} tokens do not divide by {size} processes; the nearest lengths that "
            f"do are {nearest} (tokens.sequence_length, over parallel.context)"
        )


def gather_tokens(x_BTD: Tensor, share: Share, *, alike: bool = False) -> Tensor:
    """(B, T / t, D) of each process to (B, T, D) on every one.

    On the way back the processes' gradients are summed; alike: all of them hold the same whole gradient, because they
    compute the same from here on, and each takes its tokens' part of it.
    """
    gathered: Tensor = _GatherTokens.apply(x_BTD, share, alike)  # type: ignore[no-untyped-call]
    return gathered


def scatter_tokens(x_BTD: Tensor, share: Share) -> Tensor:
    """The sum of the processes' (B, T, D), of which each keeps its tokens, (B, T / t, D)."""
    scattered: Tensor = _ScatterTokens.apply(x_BTD, share)  # type: ignore[no-untyped-call]
    return scattered


def gather_columns(x: Tensor, share: Share, whole: int) -> Tensor:
    """(..., columns of this process, see Share.rows) to (..., whole) on every one. On the way back each process takes its
    columns of a gradient that all of them hold alike."""
    gathered: Tensor = _GatherColumns.apply(x, share, whole)  # type: ignore[no-untyped-call]
    return gathered


def sum_over(x: Tensor, share: Share) -> Tensor:
    """The sum over the processes, on every one, of which each uses its own part's share: gradients are summed too."""
    total: Tensor = _SumOver.apply(x, share)  # type: ignore[no-untyped-call]
    return total


def all_reduce(x: Tensor, operator: str, group: GroupName) -> Tensor:
    """The sum or max over a group; not differentiable."""
    return _done(collectives.all_reduce(x, operator, group))


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, share: Share, alike: bool) -> Tensor:
        ctx.share, ctx.alike = share, alike
        return _gathered(x_BTD, share)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        share = ctx.share
        if ctx.alike:
            return gradients[0].chunk(share.size, dim=1)[share.place].contiguous(), None, None
        return _scattered(gradients[0], share), None, None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, share: Share) -> Tensor:
        ctx.share = share
        require_tokens(x_BTD.shape[1], share.size)
        return _scattered(x_BTD, share)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradients[0], ctx.share), None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share, whole: int) -> Tensor:
        ctx.columns = share.rows(whole)
        padded = torch.nn.functional.pad(x, (0, -(-whole // share.size) - x.shape[-1]))
        flat = collectives.all_gather_into_tensor(padded.unsqueeze(0).contiguous(), share.size, share.group)
        # Only the last process has fewer columns than the others, so what pads lies at the end.
        return _done(flat).movedim(0, -2).flatten(-2)[..., :whole].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].narrow(-1, *ctx.columns), None, None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share) -> Tensor:
        ctx.group = share.group
        return all_reduce(x, "sum", share.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0].contiguous(), "sum", ctx.group), None


def _gathered(x_BTD: Tensor, share: Share) -> Tensor:
    parts = _done(collectives.all_gather_into_tensor(x_BTD.contiguous(), share.size, share.group))
    return parts.unflatten(0, (share.size, -1)).transpose(0, 1).flatten(1, 2)  # type: ignore[no-untyped-call,no-any-return]


def _scattered(x_BTD: Tensor, share: Share) -> Tensor:
    parts = x_BTD.unflatten(1, (share.size, -1)).transpose(0, 1).flatten(0, 1)  # type: ignore[no-untyped-call]
    return _done(collectives.reduce_scatter_tensor(parts.contiguous(), "sum", share.size, share.group))


def _done(x: Tensor) -> Tensor:
    """The result of a functional collective, waited for."""
    waited: Tensor = collectives.wait_tensor(x)
    return waited
