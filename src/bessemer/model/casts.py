"""Weights of fp32 in steps of bf16 on one process: cast once a step, and their gradients kept as they come out of the matmuls,
in bf16, until they are added to the sum over micro-batches, in fp32. Autograd would widen, scale and sum each in passes of
their own over memory of twice the size.

Shapes: M tokens, I inputs and O outputs of a weight, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Additions = list[Callable[[], object]]  # of a micro-batch: each adds a gradient to the `.grad` of its parameter

_kept: dict[tuple[int, torch.Size], Tensor] | None = None  # weights in bf16, by address and shape
# Parameters whose gradients need not go through autograd, by the address of their memory.
_owners: dict[int, Tensor] = {}
_COLLECTED: ContextVar[Additions | None] = ContextVar("_COLLECTED", default=None)


@contextmanager
def casts_kept(parameters: Sequence[Tensor] = ()) -> Iterator[None]:
    """Within, a weight is cast to bf16 once, not for each micro-batch, and `additions` collects gradients of
    `parameters`. No weight may change within."""
    global _kept, _owners
    before = _kept, _owners
    whole = [p for p in parameters if p.is_contiguous() and p.untyped_storage().nbytes() == p.nbytes]
    _kept, _owners = {}, {p.untyped_storage().data_ptr(): p for p in whole}
    try:
        yield
    finally:
        _kept, _owners = before


def are_kept() -> bool:
    """Whether `casts_kept` is in force."""
    return _kept is not None


def cast_weight(weight: Tensor) -> Tensor:
    """The weight in bf16: the copy that `casts_kept` has, if it is in force. Two threads that come at once both make it."""
    if _kept is None or type(weight) not in (Tensor, torch.nn.Parameter):
        return weight.to(torch.bfloat16)
    key = (weight.data_ptr(), weight.shape)
    cast = _kept.get(key)
    if cast is None:
        cast = _kept[key] = weight.detach().to(torch.bfloat16)
    return cast


@contextmanager
def additions() -> Iterator[Additions]:
    """Within, in this thread, gradients that autograd need not carry go into the list; call each in order, after the gradients
    that autograd gave are in the parameters' `.grad`."""
    found: Additions = []
    token = _COLLECTED.set(found)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)


def are_collected(weight: Tensor) -> bool:
    """Whether `additions` may collect the gradients of a weight, a parameter or a view of one."""
    return bool(_owners) and weight.untyped_storage().data_ptr() in _owners


def collect(weight: Tensor, gradient: Tensor, scale: Tensor | None = None) -> bool:
    """Whether the gradient of a weight, to be multiplied by a number, was collected; else autograd must carry it."""
    collected = _COLLECTED.get()
    if collected is None or not are_collected(weight):
        return False
    collected.append(partial(_add, weight.detach(), gradient, scale))
    return True


def _sum_of(weight: Tensor) -> Tensor:
    """The part of its parameter's `.grad` that belongs to a weight."""
    owner = _owners[weight.untyped_storage().data_ptr()]
    if owner.grad is None:
        owner.grad = torch.zeros_like(owner)
    first = owner.grad.storage_offset() + weight.storage_offset() - owner.storage_offset()
    return owner.grad.as_strided(weight.shape, weight.stride(), first)


def _add(weight: Tensor, gradient: Tensor, scale: Tensor | None) -> None:
    total, factor = _sum_of(weight), 1.0 if scale is None else float(scale)
    if gradient.dtype == torch.bfloat16 and total.is_contiguous() and gradient.is_contiguous():
        from bessemer.model import bf16

        bf16.add_to(total, gradient, factor)
    else:
        total.add_(gradient, alpha=factor)


def look_up(tokens: Tensor, weight_VD: Tensor) -> Tensor:
    """F.embedding; its gradient goes into the rows of the sum, without a matrix of its own for each micro-batch."""
    if not (torch.is_grad_enabled() and weight_VD.requires_grad and are_collected(weight_VD)):
        return F.embedding(tokens, weight_VD)
    return _LookUp.apply(tokens, weight_VD)  # type: ignore[no-any-return, no-untyped-call]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.tokens, ctx.weight_VD = tokens, weight_VD.detach()
        return F.embedding(tokens, weight_VD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight_VD, gradient_MD = ctx.tokens.flatten(), ctx.weight_VD, gradients[0].flatten(0, -2)
        collected = _COLLECTED.get()
        if collected is None:
            return None, torch.zeros_like(weight_VD).index_add_(0, tokens, gradient_MD.to(weight_VD.dtype))
        collected.append(lambda: _sum_of(weight_VD).index_add_(0, tokens, gradient_MD.to(weight_VD.dtype)))
        return None, None
