"""Next-token cross-entropy that never holds the full logits.

Shapes: N tokens, D width, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bessemer.distributed.chunks import loss_chunk
from bessemer.distributed.collectives import VocabularyShard
from bessemer.model import casts
from bessemer.model.kernels import linear_kernel, runs_fused


@dataclass(frozen=True)
class Loss:
    """The loss of the tokens of a micro-batch.

    Attributes:
        total: The differentiable sum over the valid targets, with the z-loss.
        nats_N: The detached cross-entropy of each token without the z-loss; 0 without a target.
    """

    total: Tensor
    nats_N: Tensor


def chunked_cross_entropy(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, *, bias_V: Tensor | None = None, chunk: int,
    z_loss: float = 0.0, soft_cap: float | None = None, vocabulary: VocabularyShard | None = None,
) -> Loss:  # fmt: skip
    """Return the cross-entropy of softmax(hidden @ head.T + bias) in nats, summed over targets >= 0.

    Logits exist for `chunk` tokens at a time, and on a CPU for no more than fit its cache. Their gradient is computed in the
    same pass, in place of the logits, and propagated to `hidden`, `head` and `bias`, so that the backward pass recomputes
    nothing. Sums are in fp32 (fp64 for fp64). On a CPU, tokens without a target are removed before the matmul.

    Args:
        hidden_ND: The final hidden states.
        head_VD: The weight of the head.
        targets_N: The target ids; negative for none.
        bias_V: The bias of the head.
        chunk: The largest number of tokens whose logits exist at a time.
        z_loss: The weight of the squared log partition function (Chowdhery et al. 2022, section 5).
        soft_cap: The bound c of the logits, c * tanh(logits / c) (Gemma Team 2024, section 2).
        vocabulary: The vocabulary shard whose rows `head` and `bias` hold. The other ranks of its group call this function with
            the same tokens. Logits stay sharded; for each token, one number is all-reduced by maximum and two by sum. The loss
            and the gradients of `head` and `bias` are complete on every rank, and that of `hidden` is a partial sum (Shoeybi et
            al. 2019, section 3).
    """
    rows, valid_N = None, targets_N
    if targets_N.device.type == "cpu" and not bool((targets_N >= 0).all()):
        rows = (targets_N >= 0).nonzero()[:, 0]
        hidden_ND, valid_N = hidden_ND[rows], targets_N[rows]
    total, nats_N = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head_VD, bias_V, valid_N, chunk, z_loss, soft_cap, vocabulary
    )
    if rows is not None:
        nats_N = nats_N.new_zeros(targets_N.shape).index_copy_(0, rows, nats_N)
    return Loss(total, nats_N)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, max_chunk: int, z_loss: float,
        soft_cap: float | None, vocabulary: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        with torch.autocast(hidden_ND.device.type, enabled=False):
            needs_hidden, needs_head, needs_bias = ctx.needs_input_grad[:3]
            needs_gradient = any(ctx.needs_input_grad)
            wide = torch.promote_types(hidden_ND.dtype, torch.float32)
            head = casts.cast_weight(head_VD) if hidden_ND.dtype == torch.bfloat16 else head_VD.to(hidden_ND.dtype)
            bias = None if bias_V is None else bias_V.to(wide)
            count, rows, device = len(targets_N), len(head_VD), hidden_ND.device
            nats_N = torch.empty(count, dtype=wide, device=device)
            extra = torch.zeros((), dtype=wide, device=device)
            hidden_grad = torch.empty_like(hidden_ND) if needs_hidden else None
            head_grad = None
            bias_grad = torch.zeros(rows, dtype=wide, device=device) if needs_bias else None
            # Every rank must use the same chunks.
            max_rows = rows if vocabulary is None else vocabulary.max_size
            chunk = loss_chunk(max_chunk, max_rows, device.type != "cpu")
            is_fused = bias is None and not soft_cap and vocabulary is None and runs_fused(hidden_ND)
            if is_fused:
                from bessemer.model import fused

                # In bf16, logits take 2 bytes instead of 8: larger chunks fit the same memory, and add to the head less often.
                chunk = chunk if hidden_ND.dtype == wide else min(max_chunk, 4 * chunk)
            for start in range(0, count, chunk):
                part = slice(start, start + chunk)
                hidden_CD, targets_C = hidden_ND[part], targets_N[part]
                logits_CV, slope_CV = linear_kernel(hidden_CD, head), None
                if is_fused:
                    nats_C, extra_C = fused.loss_and_gradient(logits_CV, targets_C, z_loss, needs_gradient)
                else:
                    logits_CV = logits_CV.to(wide)
                    if bias is not None:
                        logits_CV.add_(bias)
                    slope_CV = _cap(logits_CV, soft_cap) if soft_cap else None
                    nats_C, extra_C = _to_gradient(logits_CV, targets_C, z_loss, vocabulary, needs_gradient)
                nats_N[part] = nats_C
                extra += extra_C.sum()
                if not needs_gradient:
                    continue
                if slope_CV is not None:
                    logits_CV.mul_(slope_CV)
                if bias_grad is not None:
                    bias_grad += logits_CV.sum(dim=0)
                narrow_CV = logits_CV.to(hidden_ND.dtype)
                if hidden_grad is not None:
                    hidden_grad[part] = linear_kernel(narrow_CV, head.T)
                if needs_head and count <= chunk and casts.are_collected(head_VD):
                    head_grad = torch.mm(narrow_CV.T, hidden_CD)
                elif needs_head:
                    head_grad = torch.empty_like(head_VD, dtype=wide) if head_grad is None else head_grad
                    _add_matmul(head_grad, narrow_CV, hidden_CD, first=start == 0)
                del logits_CV, narrow_CV, slope_CV  # so that the next chunk reuses their memory
            if needs_head and head_grad is None:
                head_grad = torch.zeros_like(head_VD, dtype=wide)
            ctx.save_for_backward(hidden_grad, head_grad, bias_grad)
            ctx.head_VD = head_VD.detach()
            ctx.mark_non_differentiable(nats_N)
            return nats_N.sum() + extra, nats_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0]
        # A pipeline that splits its backward pass runs this twice. Only the last run may overwrite the saved gradients.
        runs_again = torch._C._autograd._get_current_graph_task_keep_graph()
        hidden, head, bias = ctx.saved_tensors
        if head is not None and not runs_again and casts.collect(ctx.head_VD, head, scale):
            head = None
        hidden, head, bias = (
            None if x is None else x * scale.to(x.dtype) if runs_again else x.mul_(scale.to(x.dtype))
            for x in (hidden, head, bias)
        )
        return hidden, head, bias, None, None, None, None, None


def _cap(logits_CV: Tensor, soft_cap: float) -> Tensor:
    """Cap the logits in place, and return the derivative, 1 - tanh(logits / cap)^2."""
    logits_CV.div_(soft_cap).tanh_()
    slope_CV = torch.mul(logits_CV, logits_CV).neg_().add_(1.0)
    logits_CV.mul_(soft_cap)
    return slope_CV


def _to_gradient(
    logits_CV: Tensor, targets_C: Tensor, z_loss: float, shard: VocabularyShard | None, has_grad: bool
) -> tuple[Tensor, Tensor]:
    """Turn a chunk's logits into the gradient of the loss with respect to them, in place, with one exponential per element.

    Returns each token's cross-entropy and its z-loss, both 0 without a target. Without `has_grad`, the logits are
    overwritten with exp(logit - largest) instead of the gradient.
    """
    counts_C = local_C = targets_C >= 0
    target_C1 = targets_C.clamp(min=0)[:, None]
    if shard is not None:
        target_C1, local_C1 = shard.local(target_C1)
        local_C = counts_C & local_C1[:, 0]
    target_logit_C = logits_CV.gather(1, target_C1)[:, 0]
    largest_C1 = logits_CV.amax(dim=1, keepdim=True)
    if shard is not None:
        largest_C1 = shard.max(largest_C1)
    sums_C = logits_CV.sub_(largest_C1).exp_().sum(dim=1)
    if shard is not None:
        sums_C, target_logit_C = shard.sum(torch.stack([sums_C, torch.where(local_C, target_logit_C, 0.0)])).unbind(0)
    log_sum_C = largest_C1[:, 0] + sums_C.log()
    nats_C = torch.where(counts_C, log_sum_C - target_logit_C, 0.0)
    extra_C = torch.zeros_like(nats_C)
    if z_loss:
        extra_C += torch.where(counts_C, z_loss * log_sum_C.square(), 0.0)
    if has_grad:
        # The derivative of log_sum is the softmax. Rows without a target become 0.
        scale_C = (1.0 + 2.0 * z_loss * log_sum_C) / sums_C
        logits_CV.mul_(torch.where(counts_C, scale_C, 0.0)[:, None])
        logits_CV.scatter_add_(1, target_C1, -local_C.to(logits_CV.dtype)[:, None])
    return nats_C, extra_C


def _add_matmul(total_VD: Tensor, gradient_CV: Tensor, hidden_CD: Tensor, *, first: bool) -> None:
    """Add gradient.T @ hidden to `total_VD`, or overwrite it if `first`, in the dtype of the total."""
    if total_VD.dtype != gradient_CV.dtype:
        product = gradient_CV.T @ hidden_CD
        total_VD.copy_(product) if first else total_VD.add_(product)
    elif first:
        torch.mm(gradient_CV.T, hidden_CD, out=total_VD)
    else:
        total_VD.addmm_(gradient_CV.T, hidden_CD)
