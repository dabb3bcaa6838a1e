"""Casts of fp32 weights in single-process bf16 training, and collection of their gradients.

Weights are cast once per step. Their gradients stay in bf16, as the matmuls return them, until they are added to the fp32
sum over micro-batches. Autograd would convert, scale and sum each gradient in separate passes over twice the memory.

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

Additions = list[Callable[[], object]]  # for one micro-batch: each call adds a gradient to the `.grad` of its parameter

_kept: dict[tuple[int, torch.Size], Tensor] | None = None  # weights in bf16, by address and shape
# Parameters whose gradients may bypass autograd, by the address of their memory.
_owners: dict[int, Tensor] = {}
_COLLECTED: ContextVar[Additions | None] = ContextVar("_COLLECTED", default=None)


@contextmanager
def keep_casts(parameters: Sequence[Tensor] = ()) -> Iterator[None]:
    """Cast each weight to bf16 only once inside this context; weights must not change in it.

    Gradients of `parameters` bypass autograd there: `additions` collects them instead.
    """
    global _kept, _owners
    before = _kept, _owners
    whole = [p for p in parameters if p.is_contiguous() and p.untyped_storage().nbytes() == p.nbytes]
    _kept, _owners = {}, {p.untyped_storage().data_ptr(): p for p in whole}
    try:
        yield
    finally:
        _kept, _owners = before


def are_kept() -> bool:
    """Return True inside a `keep_casts` context."""
    return _kept is not None


def cast_weight(weight: Tensor) -> Tensor:
    """Return the weight in bf16, reusing the copy of a `keep_casts` context. Two threads may both make that copy."""
    if _kept is None or type(weight) not in (Tensor, torch.nn.Parameter):
        return weight.to(torch.bfloat16)
    key = (weight.data_ptr(), weight.shape)
    cast = _kept.get(key)
    if cast is None:
        cast = _kept[key] = weight.detach().to(torch.bfloat16)
    return cast


@contextmanager
def additions() -> Iterator[Additions]:
    """Collect this thread's gradients that bypass autograd, as functions that each add one gradient to a `.grad`.

    Call the functions of the list in order, after autograd has set the `.grad` of the parameters.
    """
    result: Additions = []
    token = _COLLECTED.set(result)
    try:
        yield result
    finally:
        _COLLECTED.reset(token)


def defer(call: Callable[[], object]) -> None:
    """Append `call` to this thread's `additions`, to run after the backward pass; without that context, run it at once."""
    collected = _COLLECTED.get()
    if collected is None:
        call()
    else:
        collected.append(call)


def are_collected(weight: Tensor) -> bool:
    """Return True if gradients of this weight may bypass autograd: it is, or views, one of the `keep_casts` parameters."""
    return bool(_owners) and weight.untyped_storage().data_ptr() in _owners


def collect(weight: Tensor, gradient: Tensor, scale: Tensor | None = None) -> bool:
    """Add `scale` times a weight's gradient to this thread's `additions`; return False if autograd must handle it instead."""
    collected = _COLLECTED.get()
    if collected is None or not are_collected(weight):
        return False
    collected.append(partial(_add, weight.detach(), gradient, scale))
    return True


def _sum_of(weight: Tensor) -> Tensor:
    """Return the `.grad` of the parameter that this weight is or views, as a view with the weight's shape and offset."""
    owner = _owners[weight.untyped_storage().data_ptr()]
    if owner.grad is None:
        owner.grad = torch.zeros_like(owner)
    first = owner.grad.storage_offset() + weight.storage_offset() - owner.storage_offset()
    return owner.grad.as_strided(weight.shape, weight.stride(), first)


def _add(weight: Tensor, gradient: Tensor, scale: Tensor | None) -> None:
    total, factor = _sum_of(weight), 1.0 if scale is None else float(scale)
    if gradient.dtype == torch.bfloat16 and total.is_contiguous() and gradient.is_contiguous():
        from bessemer.model import fused

        fused.add_to(total, gradient, factor)
    else:
        total.add_(gradient, alpha=factor)


def look_up(tokens: Tensor, weight_VD: Tensor) -> Tensor:
    """Look up embeddings, as F.embedding does.

    Where the gradient bypasses autograd (`are_collected`), it is added to the tokens' rows of the weight's `.grad`,
    without a (V, D) gradient for each micro-batch.
    """
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
