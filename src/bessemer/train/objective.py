"""Next-token cross-entropy that never holds the full logits.

Shapes: N tokens, D width, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """total: differentiable sum over the valid targets, z-loss included; nats_N: each token's cross-entropy, 0 where the
    target does not count, detached."""

    total: Tensor
    nats_N: Tensor


def chunked_cross_entropy(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, *, chunk: int, z_loss: float = 0.0
) -> Loss:
    """Cross-entropy of softmax(hidden @ head.T) in nats, summed over targets >= 0.

    Logits exist for `chunk` tokens at a time. Their gradient is formed in the same pass, in place of the logits, and
    carried straight on to `hidden` and `head`, so the backward pass computes nothing again. z_loss weighs the square
    of the log partition function (Chowdhery et al. 2022, section 5). The sums are in fp32 whatever the inputs.
    """
    total, nats_N = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head_VD, targets_N, chunk, z_loss
    )
    return Loss(total, nats_N)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, chunk: int, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden_ND.device.type, enabled=False):
            wants_hidden, wants_head = ctx.needs_input_grad[:2]
            head = head_VD.to(hidden_ND.dtype)
            nats_N = torch.zeros(len(targets_N), dtype=torch.float32, device=hidden_ND.device)
            penalty = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
            hidden_grad = torch.empty_like(hidden_ND) if wants_hidden else None
            head_grad = torch.zeros_like(head_VD, dtype=torch.float32) if wants_head else None
            for start in range(0, len(targets_N), chunk):
                part = slice(start, start + chunk)
                hidden_CD, targets_C = hidden_ND[part], targets_N[part]
                counts_C = targets_C >= 0
                target_C1 = targets_C.clamp(min=0)[:, None]
                logits_CV = (hidden_CD @ head.T).float()
                log_sum_C = logits_CV.logsumexp(dim=1)
                nats_N[part] = torch.where(counts_C, log_sum_C - logits_CV.gather(1, target_C1)[:, 0], 0.0)
                if z_loss:
                    penalty += z_loss * torch.where(counts_C, log_sum_C.square(), 0.0).sum()
                if hidden_grad is None and head_grad is None:
                    continue
                gradient_CV = logits_CV.sub_(log_sum_C[:, None]).exp_()  # the softmax, where the logits were
                if z_loss:
                    gradient_CV.mul_((1.0 + 2.0 * z_loss * log_sum_C)[:, None])
                gradient_CV.scatter_add_(1, target_C1, gradient_CV.new_full(target_C1.shape, -1.0))
                if not bool(counts_C.all()):
                    gradient_CV.masked_fill_(~counts_C[:, None], 0.0)
                narrow_CV = gradient_CV.to(hidden_ND.dtype)
                if hidden_grad is not None:
                    torch.mm(narrow_CV, head, out=hidden_grad[part])
                if head_grad is not None and head_grad.dtype == hidden_ND.dtype:
                    head_grad.addmm_(narrow_CV.T, hidden_CD)
                elif head_grad is not None:
                    head_grad += narrow_CV.T @ hidden_CD
            ctx.save_for_backward(hidden_grad, head_grad)
            ctx.mark_non_differentiable(nats_N)
            return nats_N.sum() + penalty, nats_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_grad, head_grad = ctx.saved_tensors
        scale = gradients[0]
        return (
            None if hidden_grad is None else hidden_grad * scale.to(hidden_grad.dtype),
            None if head_grad is None else head_grad.mul_(scale),
            None, None, None,
        )  # fmt: skip
