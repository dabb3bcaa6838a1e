"""Linear layers in 8-bit floating point, on PyTorch's scaled matmul.

Each operand is divided by a scale that maps its largest magnitude to the largest value of the dtype (dynamic scaling), and the
result is multiplied by both scales. Formats after Micikevicius et al. 2022 ("FP8 formats for deep learning", section 3): e4m3
has 3 bits of significand and reaches 448, e5m2 has 2 and reaches 57344.

tensorwise: one scale a tensor; e4m3 for activations and weights, e5m2 for gradients, whose range is wider.
rowwise: one scale for each row that is summed over, a power of two so that scaling is exact; e4m3 throughout (the rowwise recipe
of torchao's float8 training).

Shapes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.recipe import Parallel

Scaling = Literal["tensorwise", "rowwise"]

TILE = 16  # the scaled matmul needs dimensions that are multiples of it
SMALLEST = 1e-12  # scale of an operand of zeros


@dataclass(frozen=True)
class Fp8Linear:
    """x @ weight.T + bias in fp8 inside autocast, else (generation, export) in the dtype of the operands."""

    scaling: Scaling

    def __call__(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        device_type = x.device.type
        if not torch.is_autocast_enabled(device_type):
            return F.linear(x, weight_OI, bias_O)
        dtype = torch.get_autocast_dtype(device_type)
        y_NO: Tensor = _Fp8Matmul.apply(x.flatten(0, -2).to(dtype), weight_OI, self.scaling)  # type: ignore[no-untyped-call]
        y = y_NO.view(*x.shape[:-1], y_NO.shape[-1])
        return y if bias_O is None else y + bias_O.to(dtype)


def check(config: ModelConfig, layout: Parallel, micro_batch: int) -> None:
    """Raise InputError that names the dimension when the scaled matmul cannot multiply a process's part of the matrices."""
    wanted = {
        "model.width": (config.width, ""),
        "model.mlp_width": (config.mlp_width, "tensor"),
        "model.heads x model.head_dim": (config.heads * config.head_dim, "tensor"),
        "(model.heads + 2 model.kv_heads) x model.head_dim": (
            (config.heads + 2 * config.kv_heads) * config.head_dim, "tensor",
        ),
        "train.micro_batch x tokens.sequence_length": (micro_batch * config.sequence_length, "context"),
    }  # fmt: skip
    for name, (value, axis) in wanted.items():
        if axis and (share := int(getattr(layout, axis))) > 1:
            name, value = f"{name} / parallel.{axis}", value // share
        if value % TILE:
            low = value // TILE * TILE
            raise InputError(
                f"{name} = {value} is not a multiple of {TILE}, which matmuls in fp8 need; the nearest are "
                f"{f'{low} and ' if low else ''}{low + TILE}, or use train.precision = bf16"
            )


def quantise(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """A matrix in fp8, row-major, and its fp32 scale: () or, rowwise, (rows, 1).

    A value that is not finite stays so: NaN in its place, or wherever its scale is used.
    """
    largest = torch.finfo(dtype).max
    wide = x.float()
    if scaling == "tensorwise":
        scale = wide.abs().amax().clamp(min=SMALLEST) / largest
    else:
        scale = wide.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST) / largest
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return (wide / scale).clamp(-largest, largest).to(dtype).contiguous(), scale


def _multiply(
    a: Tensor, b: Tensor, types: tuple[torch.dtype, torch.dtype], scaling: Scaling, out: torch.dtype, fast: bool
) -> Tensor:
    """a @ b.T, both quantised along the summed dimension. fast: Hopper's cheaper accumulation."""
    a_8, a_scale = quantise(a, types[0], scaling)
    b_8, b_scale = quantise(b, types[1], scaling)
    if b_scale.dim():
        b_scale = b_scale.T
    return torch._scaled_mm(a_8, b_8.T, a_scale, b_scale, out_dtype=out, use_fast_accum=fast)


class _Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, scaling: Scaling) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.scaling = scaling
        e4m3 = torch.float8_e4m3fn
        # On a CPU torch emulates it with other operators, whose operands autocast would cast again.
        with torch.autocast(x_NI.device.type, enabled=False):
            return _multiply(x_NI, weight_OI, (e4m3, e4m3), scaling, x_NI.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient_NO,) = gradients
        x_NI, weight_OI = ctx.saved_tensors
        rowwise = ctx.scaling == "rowwise"
        types = (torch.float8_e4m3fn if rowwise else torch.float8_e5m2, torch.float8_e4m3fn)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = _multiply(gradient_NO, weight_OI.T, types, ctx.scaling, x_NI.dtype, fast=rowwise)
        if ctx.needs_input_grad[1]:
            # CUDA's rowwise kernels give bf16 alone; the sum over micro-batches is in fp32 either way.
            out = x_NI.dtype if rowwise else weight_OI.dtype
            weight_grad = _multiply(gradient_NO.T, x_NI.T, types, ctx.scaling, out, fast=rowwise).to(weight_OI.dtype)
        return x_grad, weight_grad, None
