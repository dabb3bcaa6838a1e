"""Causal attention on a CPU by blocks of queries, for sequences that torch's fused kernel treats as one block.

torch's CPU kernel computes a short sequence's scores in full and then masks the upper half. Here a block of queries meets
only the keys that it may see, as batched products over all heads; scores exist for one block at a time, and the backward
computes them again. Nothing but queries, keys and values is kept.

Shapes: B sequences, H query heads, G key/value heads, R = H / G, T tokens, K width of a head, Q queries of a block,
S keys that a block sees, P = B * G.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 64  # queries: smaller ones waste fewer masked scores, larger ones run faster (docs/notes/cpu-step.md)
# Tokens between which this way was measured to be faster than torch's kernel: 14 to 30% for 256 to 512 tokens, forward and
# backward, 12% at 1,024; slower below 128, where the calls themselves cost more.
SHORTEST, LONGEST = 192, 1024


def fits(q_BHTK: Tensor, k_BGTK: Tensor) -> bool:
    """Whether this way serves: eager fp32 or fp64 self-attention on a CPU over a sequence of a few blocks."""
    return (
        q_BHTK.device.type == "cpu"
        and q_BHTK.dtype in (torch.float32, torch.float64)
        and SHORTEST <= q_BHTK.shape[2] == k_BGTK.shape[2] <= LONGEST
        and not torch.compiler.is_compiling()
    )


def block_causal_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K)) v over earlier tokens, (B, H, T, K). Differentiable once."""
    values: Tensor = _BlockCausal.apply(q_BHTK, k_BGTK, v_BGTK)  # type: ignore[no-untyped-call]
    return values


def _forward(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    out_BHTK = torch.empty_like(q_BHTK)
    q_PRTK, out_PRTK = (_by_group(x, k_BGTK.shape[1]) for x in (q_BHTK, out_BHTK))
    v_PTK = v_BGTK.flatten(0, 1)
    for here, weights in _blocks(q_PRTK, k_BGTK.flatten(0, 1)):
        _product(weights, v_PTK[:, : here.stop], out_PRTK[:, :, here])
    return out_BHTK


# One operator to those who watch operators, so that activation recompute can keep what it gives.
_operator = torch.library.custom_op("bessemer::block_causal_attention", _forward, mutates_args=())


class _BlockCausal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        q_BHTK, k_BGTK, v_BGTK = (x.contiguous() for x in (q_BHTK, k_BGTK, v_BGTK))
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK)
        out_BHTK: Tensor = _operator(q_BHTK, k_BGTK, v_BGTK)
        return out_BHTK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BHTK, k_BGTK, v_BGTK = ctx.saved_tensors
        groups, scale = k_BGTK.shape[1], q_BHTK.shape[-1] ** -0.5
        q_grad, k_grad, v_grad = torch.empty_like(q_BHTK), torch.zeros_like(k_BGTK), torch.zeros_like(v_BGTK)
        q_PRTK, q_grad_PRTK = _by_group(q_BHTK, groups), _by_group(q_grad, groups)
        gradient_PRTK = _by_group(gradients[0].contiguous(), groups)
        k_PTK, v_PTK, k_grad_PTK, v_grad_PTK = (x.flatten(0, 1) for x in (k_BGTK, v_BGTK, k_grad, v_grad))
        for here, weights in _blocks(q_PRTK, k_PTK):
            seen = slice(0, here.stop)
            upstream = gradient_PRTK[:, :, here].flatten(1, 2)
            v_grad_PTK[:, seen] += torch.bmm(weights.transpose(1, 2), upstream)
            score_grad = torch.bmm(upstream, v_PTK[:, seen].transpose(1, 2))
            score_grad = torch._softmax_backward_data(score_grad, weights, -1, weights.dtype)
            _product(score_grad, k_PTK[:, seen], q_grad_PRTK[:, :, here], scale)
            k_grad_PTK[:, seen] += torch.bmm(score_grad.transpose(1, 2), q_PRTK[:, :, here].flatten(1, 2)).mul_(scale)
        return q_grad, k_grad, v_grad


def _blocks(q_PRTK: Tensor, k_PTK: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Each block's queries as a slice, and their attention weights (P, R * Q, S)."""
    groups, heads, length, width = q_PRTK.shape
    for start in range(0, length, BLOCK):
        here = slice(start, min(start + BLOCK, length))
        queries = q_PRTK[:, :, here].flatten(1, 2)
        scores = queries.new_empty(groups, queries.shape[1], here.stop)
        torch.baddbmm(scores, queries, k_PTK[:, : here.stop].transpose(1, 2), beta=0, alpha=width**-0.5, out=scores)
        scores.view(groups, heads, -1, here.stop)[..., start:].add_(_mask(here.stop - start, scores))
        yield here, torch.softmax(scores, dim=-1)


def _mask(size: int, like: Tensor) -> Tensor:
    """-inf above the diagonal, 0 elsewhere."""
    return torch.full((size, size), float("-inf"), dtype=like.dtype).triu_(1)


def _product(left_PXS: Tensor, right_PSK: Tensor, out_PRQK: Tensor, scale: float = 1.0) -> None:
    """out = scale * left @ right, straight into place where a group has one query head."""
    if out_PRQK.shape[1] == 1:
        torch.bmm(left_PXS, right_PSK, out=out_PRQK[:, 0])
        if scale != 1.0:
            out_PRQK.mul_(scale)
    else:
        out_PRQK.copy_(torch.bmm(left_PXS, right_PSK).mul_(scale).view(out_PRQK.shape))


def _by_group(x_BHTK: Tensor, groups: int) -> Tensor:
    batch, heads, length, width = x_BHTK.shape
    return x_BHTK.view(batch * groups, heads // groups, length, width)
