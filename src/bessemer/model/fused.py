"""Kernels for fp32 and bf16 on a CPU: the operations between the matmuls, each in one pass over memory.

Torch composes each from several passes. In bf16 it also converts to fp32 and back in separate passes, and a CPU with bf16
units multiplies so fast that these would take most of a step. These kernels read fp32 or bf16, compute in fp32 and round
once (to nearest, ties to even), which is faster and closer to the exact result. Rows are divided among torch's threads. A
row's result depends on that row alone, and sums over rows use blocks of fixed size, so the number of threads does not
change any bit.

Shapes: M rows (tokens), D width, F hidden width, N heads of all sequences, C queries, T keys, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.common.environment import num_cores
from bessemer.model import fused_kernels as kernels
from bessemer.model.fused_kernels import SUM_ROWS, Floats, Rows

MIN_ELEMENTS = 1 << 15  # minimum elements per thread; waking a thread for fewer is not worth it


def _rows(x: Tensor) -> Rows:
    return x.detach().numpy() if x.dtype == torch.float32 else x.detach().view(torch.int16).numpy().view(np.uint16)


def _copied(weight: Tensor) -> Floats:
    """Return a copy in float32: FSDP2 resizes the memory of a weight, which torch forbids while an array shares it."""
    return weight.detach().to(torch.float32, copy=True).numpy()


def _by_rows(kernel: Callable[..., None], rows: int, elements: int, *arguments: Any, block: int = 1) -> None:
    """Call kernel(first, last, *arguments) on ranges of rows in parallel, on as many threads as torch uses.

    The ranges divide the rows in multiples of `block`. `elements` is the amount of work: fewer elements use fewer
    threads.
    """
    blocks = -(-rows // block)
    parts = max(min(torch.get_num_threads(), elements // MIN_ELEMENTS, blocks), 1)
    ends = [min(blocks * part // parts * block, rows) for part in range(parts + 1)]
    pool = _pool(os.getpid())
    others = [pool.submit(kernel, ends[part], ends[part + 1], *arguments) for part in range(1, parts)]
    kernel(ends[0], ends[1], *arguments)
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the thread pool of this process; a forked process must start a new one."""
    return ThreadPoolExecutor(num_cores(), thread_name_prefix="fused")


class FusedNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one number per token for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_MD = x.reshape(-1, x.shape[-1]).contiguous()
        out_MD, scale_M = torch.empty_like(x_MD), torch.empty(len(x_MD), dtype=torch.float32)
        arrays = _rows(x_MD), _copied(weight_D), np.float32(eps), _rows(out_MD), scale_M.numpy()
        _by_rows(kernels.norm, len(x_MD), x_MD.numel(), *arrays)
        ctx.save_for_backward(x_MD, weight_D, scale_M)
        return out_MD.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, weight_D, scale_M = ctx.saved_tensors
        gradient_MD = gradients[0].reshape(x_MD.shape).contiguous()
        x_grad_MD, sums = torch.empty_like(x_MD), torch.zeros(-(-len(x_MD) // SUM_ROWS), x_MD.shape[1])
        _by_rows(
            kernels.norm_backward, len(x_MD), 2 * x_MD.numel(), _rows(gradient_MD), _rows(x_MD),
            _copied(weight_D), scale_M.numpy(), _rows(x_grad_MD), sums.numpy(), block=SUM_ROWS,
        )  # fmt: skip
        return x_grad_MD.view(gradients[0].shape), sums.sum(dim=0).to(weight_D.dtype), None


class FusedGate(torch.autograd.Function):
    """SwiGLU that saves gate and up for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        rows_M2F, out_MF = _rows(gate_up.flatten(0, -2)), _rows(out.flatten(0, -2))
        _by_rows(kernels.gate, len(out_MF), gate_up.numel(), rows_M2F, out_MF)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gradient, gate_up_grad = gradients[0].contiguous(), torch.empty_like(gate_up)
        arrays = [_rows(x.flatten(0, -2)) for x in (gradient, gate_up, gate_up_grad)]
        _by_rows(kernels.gate_backward, len(arrays[0]), 2 * gate_up.numel(), *arrays)
        return gate_up_grad


class FusedHeads(torch.autograd.Function):
    """Split the joint matmul of queries, keys and values, and normalise and rotate queries and keys.

    Maps (B, T, G, R + 2, K) to queries (B, H, T, K) and keys and values (B, G, T, K). Cosines and sines are (T, 1, P/2)
    or (B, T, 1, P/2); with P = 0 nothing is rotated. The norms' weights are (K,); an empty weight turns a norm off.
    """

    @staticmethod
    def forward(
        ctx: Any, joined_BTGEK: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        joined_BTGEK = joined_BTGEK.contiguous()
        ctx.save_for_backward(joined_BTGEK if len(q_weight) else None, cos, sin, q_weight, k_weight)
        ctx.eps = eps
        batch, length, groups, each, width = joined_BTGEK.shape
        heads_of = groups * (each - 2), groups, groups
        q, k, v = (joined_BTGEK.new_empty(batch, heads, length, width) for heads in heads_of)
        for arguments in _parts(joined_BTGEK, (q, k, v), cos, sin, q_weight, k_weight, eps):
            _by_rows(kernels.split_heads, batch * length, 2 * joined_BTGEK.numel() // each, *arguments)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = (x.contiguous() for x in gradients)
        x_BTGEK, cos, sin, q_weight, k_weight = ctx.saved_tensors
        batch, heads, length, width = q.shape
        joined_BTGEK = q.new_empty(batch, length, k.shape[1], heads // k.shape[1] + 2, width)
        rows, x_ME = batch * length, _rows((joined_BTGEK if x_BTGEK is None else x_BTGEK).view(batch * length, -1))
        totals = [torch.zeros(-(-rows // SUM_ROWS), len(weight)) for weight in (q_weight, k_weight, q.new_empty(0))]
        parts = _parts(joined_BTGEK, (q, k, v), cos, sin, q_weight, k_weight, ctx.eps)
        for arguments, sums in zip(parts, totals, strict=True):
            _by_rows(kernels.join_heads, rows, 2 * q.numel(), *arguments, x_ME, sums.numpy(), block=SUM_ROWS)
        q_sum, k_sum, _ = (sums.sum(dim=0).to(q_weight.dtype) for sums in totals)
        return joined_BTGEK, None, None, q_sum, k_sum, None


def _parts(
    joined_BTGEK: Tensor, parts: tuple[Tensor, ...], cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> Iterator[tuple[Any, ...]]:  # fmt: skip
    """Yield the arguments that the kernels `split_heads` and `join_heads` share, for queries, keys and values in turn.

    `parts` are the (B, heads, T, K) tensors of queries, keys and values.
    """
    batch, length, groups, each = joined_BTGEK.shape[:4]
    joined_ME = _rows(joined_BTGEK.view(batch * length, -1))
    angles = [x.detach().float().contiguous().flatten(0, -2).numpy() for x in (cos, sin)]  # each (T, P/2) or (B T, P/2)
    flat, none = np.empty((1, 0), np.float32), joined_BTGEK.new_empty(0)
    for first, part, weight in zip((0, each - 2, each - 1), parts, (q_weight, k_weight, none), strict=True):
        yield (
            joined_ME, first, part.shape[1] // groups, each, _rows(part.flatten(0, 2)), length,
            *([flat, flat] if first == each - 1 else angles), _copied(weight), np.float32(eps),
        )  # fmt: skip


class Bf16Attention(torch.autograd.Function):
    """Softmax attention in bf16 of one document by torch's kernel, with a gradient by batched matmuls over blocks of queries.

    Torch's backward kernel for a CPU does not use the bf16 units. As in that kernel, the softmax is recomputed from its
    saved log-sum, and its weights and their gradient are rounded to bf16 for the matmuls; here the scores are rounded as
    well. Lengths are padded to multiples of PADDED: for every new matmul shape oneDNN keeps about a megabyte of machine
    code, and documents have hundreds of lengths.
    """

    QUERIES = 256  # queries of a head per block
    LENGTHS = range(16, 513)  # queries of full sequences; outside of this range torch's kernel is as fast
    PADDED = 64

    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, causal: bool, scale: float | None) -> Tensor:
        repeats = q_BHTK.shape[1] // k_BGTK.shape[1]
        wide_k, wide_v = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (k_BGTK, v_BGTK))
        out_BHTK, log_sum_BHT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHTK, wide_k, wide_v, 0.0, causal, scale=scale
        )
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, out_BHTK, log_sum_BHT)
        ctx.causal, ctx.scale = causal, q_BHTK.shape[-1] ** -0.5 if scale is None else scale
        return out_BHTK  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, out, log_sum), (gradient,) = ctx.saved_tensors, gradients
        num_queries, seen = q.shape[2], k.shape[2]
        q, gradient, out, log_sum, k, v = map(_padded, (q, gradient, out, log_sum, k, v))
        length, width = q.shape[2:]
        groups, keys = k.shape[1], k.shape[2]
        count, repeats = len(k) * groups, q.shape[1] // groups
        q_NRTK, gradient_NRTK, out_NRTK = (x.reshape(count, repeats, length, width) for x in (q, gradient, out))
        k_NTK, v_NTK = (x.reshape(count, keys, width) for x in (k, v))
        sums_NRT = log_sum.reshape(count, repeats, length)
        parts = []
        for first in range(0, length, Bf16Attention.QUERIES):
            some = slice(first, min(first + Bf16Attention.QUERIES, length))
            end = min(some.stop, keys) if ctx.causal else keys
            q_NCK, gradient_NCK, out_NCK = (x[:, :, some].flatten(1, 2) for x in (q_NRTK, gradient_NRTK, out_NRTK))
            # bmm is slow on strided inputs.
            k_NEK, v_NEK = (x if end == keys else x[:, :end].contiguous() for x in (k_NTK, v_NTK))
            weights_NCE = torch.bmm(q_NCK, k_NEK.mT)
            rests_NCE = torch.baddbmm(weights_NCE, q_NCK, k_NEK.mT, beta=-1)
            slopes_NCE = torch.bmm(gradient_NCK, v_NEK.mT)
            sums = sums_NRT[:, :, some].flatten()
            used = weights_NCE, rests_NCE, slopes_NCE, gradient_NCK, out_NCK
            arrays = [_rows(x.flatten(0, 1).contiguous()) for x in used]
            _by_rows(
                kernels.softmax_backward, len(sums), 4 * weights_NCE.numel(), *arrays, sums.numpy(), np.float32(ctx.scale),
                some.stop - first, first, seen, ctx.causal,
            )  # fmt: skip
            q_part = torch.bmm(slopes_NCE, k_NEK).view(count, repeats, some.stop - first, width)
            parts.append((q_part, torch.bmm(slopes_NCE.mT, q_NCK), torch.bmm(weights_NCE.mT, gradient_NCK)))
        q_parts, k_parts, v_parts = zip(*parts, strict=True)
        q_grad = q_parts[0] if len(parts) == 1 else torch.cat(q_parts, dim=2)
        k_grad, v_grad = (_summed(parts, keys).view(k.shape)[:, :, :seen] for parts in (k_parts, v_parts))
        return q_grad.view(q.shape)[:, :, :num_queries], k_grad, v_grad, None, None


def _padded(x_BHT: Tensor) -> Tensor:
    """Pad the tokens (dimension 2) with zeros to a multiple of PADDED."""
    extra = -x_BHT.shape[2] % Bf16Attention.PADDED
    return F.pad(x_BHT, (0, 0) * (x_BHT.dim() - 3) + (0, extra)) if extra else x_BHT


def _summed(parts: tuple[Tensor, ...], keys: int) -> Tensor:
    """Return the gradient of keys or values, (N, keys, K), as the sum in fp32 of a part from each block of queries.

    N counts the heads of all sequences. With a causal mask, a part covers only the first keys, which its queries see,
    and its second dimension is shorter.
    """
    if len(parts) == 1 and parts[0].shape[1] == keys:
        return parts[0]
    total_NTK = parts[0].new_zeros(len(parts[0]), keys, parts[0].shape[2], dtype=torch.float32)
    for part in parts:
        total_NTK[:, : part.shape[1]] += part
    return total_NTK.to(parts[0].dtype)


def add_to(total: Tensor, summand: Tensor, factor: float = 1.0) -> None:
    """Add `factor` times a bf16 tensor to an fp32 tensor of the same shape, in place; both are contiguous."""
    arrays = total.view(-1).numpy(), _rows(summand.view(-1))
    _by_rows(kernels.add, total.numel(), total.numel(), *arrays, np.float32(factor), block=SUM_ROWS)


def combine(x_MD: Tensor, place_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return the weighted sum of K rows of x for each token, (N, D). `place_NK` has the rows' numbers, flat or (N, K)."""
    out_ND = x_MD.new_empty(len(weight_NK), x_MD.shape[1])
    arrays = _rows(x_MD), place_NK.view(weight_NK.shape).numpy(), weight_NK.detach().float().numpy(), _rows(out_ND)
    _by_rows(kernels.combine, len(out_ND), x_MD.numel(), *arrays)
    return out_ND


def combine_backward(x_MD: Tensor, place_NK: Tensor, weight_NK: Tensor, gradient_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `combine` with respect to x, (M, D), and to the weights, (N, K)."""
    x_grad_MD, weight_grad_NK = torch.empty_like(x_MD), torch.empty(weight_NK.shape, dtype=torch.float32)
    arrays = _rows(x_MD), place_NK.view(weight_NK.shape).numpy(), weight_NK.detach().float().numpy(), _rows(gradient_ND)
    results = _rows(x_grad_MD), weight_grad_NK.numpy()
    _by_rows(kernels.combine_backward, len(gradient_ND), 2 * x_MD.numel(), *arrays, *results)
    return x_grad_MD, weight_grad_NK.to(weight_NK.dtype)


def loss_and_gradient(logits_CV: Tensor, targets_C: Tensor, z_loss: float, has_grad: bool) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy and the z-loss of each token, both (C,) in fp32; a negative target gives 0 for both.

    If `has_grad`, the logits are overwritten with the gradient of the sum of both losses. `z_loss` is the z-loss's
    factor.
    """
    nats_C, extra_C = (torch.empty(len(targets_C), dtype=torch.float32) for _ in range(2))
    _by_rows(
        kernels.cross_entropy, len(targets_C), 4 * logits_CV.numel(), _rows(logits_CV), targets_C.numpy(), np.float32(z_loss),
        has_grad, nats_C.numpy(), extra_C.numpy(),
    )  # fmt: skip
    return nats_C, extra_C
