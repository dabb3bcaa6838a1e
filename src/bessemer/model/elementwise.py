"""What lies between the matrix products, for a CPU: each operation in few passes, keeping little for its backward.

Eager torch composes a norm, a rotation or a gate from many elementwise calls, each a pass over memory, and keeps their
intermediate results. The functions here do the same arithmetic in fewer passes and recompute instead of keeping. They
serve fp32 and fp64 on a CPU in eager mode; anywhere else (CUDA, autocast to bf16, torch.compile, which fuses better) the
same function is the textbook formula. Differentiable once.

Shapes: ... any leading dimensions, D width, B sequences, T tokens, H heads, K width of a head, F hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Rotation = tuple[Tensor, Tensor]


def is_plain_cpu(*tensors: Tensor) -> bool:
    """Whether the CPU's own way serves: eager fp32 or fp64 on a CPU, all tensors of one type."""
    first = tensors[0]
    return (
        first.device.type == "cpu"
        and first.dtype in (torch.float32, torch.float64)
        and all(x.dtype == first.dtype for x in tensors)
        and not torch.compiler.is_compiling()
    )


def widened(x: Tensor) -> Tensor:
    """x in the precision of sums over the width: fp32, or fp64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019); in fp32 for narrow types."""
    if is_plain_cpu(x, weight_D):
        normed: Tensor = _RMSNorm.apply(x, weight_D, eps)  # type: ignore[no-untyped-call]
        return normed
    return F.rms_norm(widened(x), weight_D.shape, weight_D, eps).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """Keeps the input and one number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        return torch.mul(x, scale).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # With s = scale, g = gradient * weight: dx = s g - x s^3 / D * sum(g x); dweight = sum of gradient * x * s.
        x, weight_D, scale = ctx.saved_tensors
        gradient = gradients[0]
        product = torch.mul(gradient, x)
        rows_MD, scale_M = product.flatten(0, -2), scale.flatten()
        weight_grad = torch.mv(rows_MD.T, scale_M) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, weight_grad, None
        dot = torch.mv(rows_MD, weight_D).view(scale.shape)
        shrink = scale.pow(3).mul_(dot).div_(x.shape[-1])
        x_grad = torch.mul(gradient, weight_D, out=product).mul_(scale).addcmul_(x, shrink, value=-1)
        return x_grad, weight_grad, None


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020) of (..., 2F), gate first. Returns (..., F)."""
    if is_plain_cpu(gate_up):
        hidden: Tensor = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
        return hidden
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    """Keeps gate and up; the gradient of both is written where the product's backward reads it."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gradient = torch.empty_like(gate_up)
        gate_grad, up_grad = gradient.chunk(2, dim=-1)
        torch.mul(gradients[0], up, out=gate_grad)
        torch.ops.aten.silu_backward.grad_input(gate_grad, gate, grad_input=gate_grad)
        torch.ops.aten.silu.out(gate, out=up_grad)
        up_grad.mul_(gradients[0])
        return gradient


def rotate(x_BTHK: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (i, i + P/2) of each head by their angle: the halves' layout of Llama in `transformers`.

    rotation: cosines and sines, each broadcastable to (B, T, H, P/2). What a head has beyond its first P dimensions
    stays as it is (partial rotary positions).
    """
    if is_plain_cpu(x_BTHK, *rotation):
        turned: Tensor = _Rotate.apply(x_BTHK, *rotation)  # type: ignore[no-untyped-call]
        return turned
    cos, sin = (part.to(x_BTHK.dtype) for part in rotation)
    first, second, rest = _halves(x_BTHK, cos)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, *rest], dim=-1)


def _halves(x_BTHK: Tensor, cos: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The two halves of what is rotated, and what is not, if anything."""
    half, width = cos.shape[-1], x_BTHK.shape[-1]
    sizes = [half, half, width - 2 * half] if width > 2 * half else [half, half]
    first, second, *rest = torch.split(x_BTHK, sizes, dim=-1)
    return first, second, tuple(rest)


def by_head(x_BTHK: Tensor) -> Tensor:
    """(B, H, T, K). On a CPU in memory of its own, so that values do not keep the whole product of queries, keys and values."""
    x_BHTK = x_BTHK.transpose(1, 2)
    return x_BHTK.contiguous() if is_plain_cpu(x_BTHK) else x_BHTK


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back: nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_BTHK, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, sin, -1.0), None, None


def _turned(x_BTHK: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    # Laid out by head, as attention reads it.
    batch, length, heads, width = x_BTHK.shape
    out_BTHK = x_BTHK.new_empty(batch, heads, length, width).transpose(1, 2)
    first, second, rest = _halves(x_BTHK, cos)
    new_first, new_second, new_rest = _halves(out_BTHK, cos)
    for new, old in zip(new_rest, rest, strict=True):
        new.copy_(old)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin, value=direction)
    return out_BTHK
