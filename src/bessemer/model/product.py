"""Matrix products with weights: the faster of the two libraries that torch carries for a CPU.

torch multiplies fp32 matrices on a CPU with MKL, which gives AMD processors its AVX2 code even where they have AVX-512.
oneDNN, which torch carries too, does not: on a Zen 4 core its products with a weight run 8 to 28% faster
(docs/notes/cpu-step.md). The rule is by processor and not by a measurement, so that the same machine always computes the
same bits. Everywhere else, and under torch.compile and autocast, these are torch's own products.

Shapes: M rows (tokens), I inputs, O outputs.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@lru_cache(maxsize=1)
def prefers_onednn() -> bool:
    """Whether oneDNN's fp32 products beat MKL's here: an AMD processor with AVX-512, and a torch that has both."""
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


def times_transposed(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, (M, O). Not differentiable: for the inside of autograd functions."""
    if _onednn_fits(x_MI, weight_OI):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x_MI, weight_OI, bias_O, "none", [], "")
        return product
    return torch.mm(x_MI, weight_OI.T) if bias_O is None else torch.addmm(bias_O, x_MI, weight_OI.T)


def times(y_MO: Tensor, weight_OI: Tensor) -> Tensor:
    """y @ weight, (M, I). Not differentiable: for the inside of autograd functions."""
    if _onednn_fits(y_MO, weight_OI):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(y_MO, weight_OI.T, None, "none", [], "")
        return product
    return torch.mm(y_MO, weight_OI)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """F.linear: x @ weight.T + bias over the last dimension of x."""
    if _onednn_fits(x, weight_OI) and not torch.is_autocast_enabled("cpu"):
        product: Tensor = _Linear.apply(x, weight_OI, bias_O)  # type: ignore[no-untyped-call]
        return product
    return F.linear(x, weight_OI, bias_O)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return times_transposed(x.flatten(0, -2), weight_OI, bias_O).view(*x.shape[:-1], len(weight_OI))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        gradient_MO = gradients[0].flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            times(gradient_MO, weight_OI).view(x.shape) if wants_x else None,
            # oneDNN would copy the transposed gradient first and loses; MKL does not.
            torch.mm(gradient_MO.T, x.flatten(0, -2)) if wants_weight else None,
            gradient_MO.sum(dim=0) if wants_bias else None,
        )
