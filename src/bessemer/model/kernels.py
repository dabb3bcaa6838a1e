"""Kernels for a CPU: fp32 matmuls by the faster library, and norm, rotation and gate in few passes over memory.

Eager torch composes a norm, a rotation or a gate from many element-wise calls, each a pass over memory, and keeps their
intermediate results. These functions do the same arithmetic in fewer passes and recompute intermediate results instead of
storing them. They apply to fp32, fp64 and bf16 on a CPU in eager mode. Otherwise (CUDA, or torch.compile, which fuses
better) the same functions use the textbook formula. They are differentiable once.

Torch multiplies fp32 matrices on a CPU with MKL, which runs its AVX2 code on AMD processors even if they have AVX-512.
oneDNN, which torch includes too, does not: on a Zen 4 core its matmuls with a weight run 8 to 28% faster
(docs/background/cpu-step.md). The choice depends on the processor and not on a measurement, so that the same machine always
computes the same bits.

Shapes: ... any leading dimensions, M rows (tokens), I inputs, O outputs, D width, B sequences, T tokens, H heads, K width
of a head, F hidden width.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.model import casts

Rotation = tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def prefers_onednn() -> bool:
    """Return True if oneDNN's fp32 matmuls beat MKL's: on an AMD processor with AVX-512, if torch has both libraries."""
    information = Path("/proc/cpuinfo")
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and information.exists()
        and "AuthenticAMD" in information.read_text(encoding="utf-8", errors="replace")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _onednn_fits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.numel() > 0
        and not torch.compiler.is_compiling()
        and prefers_onednn()
    )


def linear_kernel(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, (M, O). Not differentiable: for use inside autograd functions."""
    if _onednn_fits(x_MI, weight_OI):
        return torch.ops.mkldnn._linear_pointwise(x_MI, weight_OI, bias_O, "none", [], "")  # type: ignore[no-any-return]
    return torch.mm(x_MI, weight_OI.T) if bias_O is None else torch.addmm(bias_O, x_MI, weight_OI.T)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias over the last dimension of x, as F.linear does."""
    is_cast = casts.are_kept() and runs_fused(x, weight_OI) and x.dtype != weight_OI.dtype
    if is_cast or (_onednn_fits(x, weight_OI) and not torch.is_autocast_enabled("cpu")):
        bias = None if bias_O is None else bias_O.to(x.dtype)
        return _Linear.apply(x, weight_OI, bias)  # type: ignore[no-any-return, no-untyped-call]
    return F.linear(x, weight_OI, bias_O)


class _Linear(torch.autograd.Function):
    """A linear layer with an fp32 weight for an input in fp32 or bf16.

    A bf16 input is multiplied with a bf16 copy of the weight, as under autocast, and the weight's gradient is rounded
    to bf16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        cast_OI = weight_OI if x.dtype == weight_OI.dtype else casts.cast_weight(weight_OI)
        ctx.save_for_backward(x, cast_OI)
        ctx.weight_OI = weight_OI.detach()
        return linear_kernel(x.flatten(0, -2), cast_OI, bias_O).view(*x.shape[:-1], len(weight_OI))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, cast_OI = ctx.saved_tensors
        gradient_MO, weight_grad_OI = gradients[0].flatten(0, -2), None
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        x_grad = linear_kernel(gradient_MO, cast_OI.T).view(x.shape) if wants_x else None
        if wants_weight:
            # MKL is faster here: oneDNN would copy the transposed gradient first.
            product_OI = torch.mm(gradient_MO.T, x.flatten(0, -2))
            weight_grad_OI = None if casts.collect(ctx.weight_OI, product_OI) else product_OI.to(ctx.weight_OI.dtype)
        return x_grad, weight_grad_OI, gradient_MO.sum(dim=0) if wants_bias else None


def is_eager_cpu(x: Tensor, *others: Tensor) -> bool:
    """Return True if the fused CPU functions apply: eager mode on a CPU, with x in fp32, fp64 or bf16.

    The other tensors have the dtype of x, or any dtype if x is bf16.
    """
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64, torch.bfloat16)
        and all(one.dtype == x.dtype or x.dtype == torch.bfloat16 for one in others)
        and not torch.compiler.is_compiling()
    )


def runs_fused(x: Tensor, *others: Tensor) -> bool:
    """Return True if the one-pass kernels of `fused` apply: plain fp32 or bf16 tensors on a CPU in eager mode."""
    is_plain = all(type(one) in (Tensor, torch.nn.Parameter) for one in (x, *others))
    return is_plain and is_eager_cpu(x, *others) and x.dtype != torch.float64 and x.numel() > 0


def upcast(x: Tensor) -> Tensor:
    """Return x as fp32, or unchanged if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019).

    Lower precisions are computed in fp32.
    """
    if runs_fused(x, weight_D):
        from bessemer.model import fused

        return fused.FusedNorm.apply(x, weight_D, eps)  # type: ignore[no-any-return, no-untyped-call]
    if is_eager_cpu(x, weight_D):
        return _RMSNorm.apply(x, weight_D, eps)  # type: ignore[no-any-return, no-untyped-call]
    return F.rms_norm(upcast(x), weight_D.shape, weight_D, eps).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one number per token for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide = upcast(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        return (torch.mul(x, scale) if wide is x else wide.mul_(scale)).mul_(weight_D).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # With s = scale, g = gradient * weight: dx = s g - x s^3 / D * sum(g x); dweight = sum of gradient * x * s.
        narrow_x, weight_D, scale = ctx.saved_tensors
        gradient, x = upcast(gradients[0]), upcast(narrow_x)
        product = torch.mul(gradient, x)
        rows_MD, scale_M = product.flatten(0, -2), scale.flatten()
        weight_grad = torch.mv(rows_MD.T, scale_M) if ctx.needs_input_grad[1] else None
        dot = torch.mv(rows_MD, weight_D).view(scale.shape)
        shrink = scale.pow(3).mul_(dot).div_(x.shape[-1])
        x_grad = torch.mul(gradient, weight_D, out=product).mul_(scale).addcmul_(x, shrink, value=-1)
        return x_grad.to(narrow_x.dtype), weight_grad, None


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (..., F), for (..., 2F) with the gate first (Shazeer 2020)."""
    if runs_fused(gate_up):
        from bessemer.model import fused

        return fused.FusedGate.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]
    if is_eager_cpu(gate_up):
        return _SwiGLU.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    """SwiGLU that saves gate and up, and writes both gradients into one tensor, as the matmul before it needs them."""

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
    """Rotate the pairs (i, i + P/2) of each head by their angles, in the half-split layout of Llama in `transformers`.

    `rotation` has cosines and sines, each broadcastable to (B, T, H, P/2). Dimensions of a head beyond the first P stay
    unchanged (partial rotary positions).
    """
    if is_eager_cpu(x_BTHK, *rotation):
        return _Rotate.apply(x_BTHK, *rotation)  # type: ignore[no-any-return, no-untyped-call]
    cos, sin = (part.to(x_BTHK.dtype) for part in rotation)
    first, second, rest = _halves(x_BTHK, cos)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _halves(x_BTHK: Tensor, cos: Tensor) -> tuple[Tensor, ...]:
    """Return the two rotated halves of each head and the unrotated rest, which may be empty."""
    half = cos.shape[-1]
    return torch.split(x_BTHK, [half, half, x_BTHK.shape[-1] - 2 * half], dim=-1)


def split_heads(
    joined_BTGEK: Tensor, rotation: Rotation | None, norms: tuple[Tensor, ...] = (), eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Split a joint matmul, and normalise and rotate its queries and keys in one kernel; None if that kernel does not apply.

    `norms` has the factors of an RMSNorm over each head of queries and of keys, both (K,), or nothing. Returns queries
    (B, H, T, K), and keys and values (B, G, T, K). E is R + 2.
    """
    if not runs_fused(joined_BTGEK, *(rotation or ()), *norms):
        return None
    from bessemer.model import fused

    none = joined_BTGEK.new_empty(1, 0, dtype=torch.float32)
    arguments = *(rotation or (none, none)), *(norms or (none[0], none[0])), eps
    return fused.FusedHeads.apply(joined_BTGEK, *arguments)  # type: ignore[no-any-return, no-untyped-call]


def heads_first(x_BTHK: Tensor) -> Tensor:
    """Transpose to (B, H, T, K). A CPU gets a copy: a view of V would keep the joint QKV tensor in memory until backward."""
    x_BHTK = x_BTHK.transpose(1, 2)
    return x_BHTK.contiguous() if is_eager_cpu(x_BTHK) else x_BHTK


class _Rotate(torch.autograd.Function):
    """A rotation whose gradient is the inverse rotation, so that nothing of x is saved."""

    @staticmethod
    def forward(ctx: Any, x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_BTHK, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, sin, -1.0), None, None


def _turned(x_BTHK: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    # The memory order is by head, as attention reads it.
    batch, length, heads, width = x_BTHK.shape
    out_BTHK = x_BTHK.new_empty(batch, heads, length, width).transpose(1, 2)
    first, second, rest = _halves(x_BTHK, cos)
    new_first, new_second, new_rest = _halves(out_BTHK, cos)
    new_rest.copy_(rest)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin, value=direction)
    return out_BTHK
