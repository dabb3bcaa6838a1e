"""The precision of matmuls, and a probe that the requested one is what runs.

Weights, gradients and optimizer are fp32 in every precision (fp64 in fp64, which is for tests); autocast narrows only the
operands of matmuls, which accumulate in fp32 (Micikevicius et al. 2018, sections 3.1 and 3.3).

fp8: on PyTorch's scaled matmul. Each operand is divided by a scale that maps its largest magnitude to the largest value of the
dtype (dynamic scaling), and the result is multiplied by both scales. Formats after Micikevicius et al. 2022 ("FP8 formats for
deep learning", section 3): e4m3 has 3 bits of significand and reaches 448, e5m2 has 2 and reaches 57344. tensorwise: one scale a
tensor; e4m3 for activations and weights, e5m2 for gradients, whose range is wider. rowwise: one scale for each row that is summed
over, a power of two so that scaling is exact; e4m3 throughout (the rowwise recipe of torchao's float8 training).

Shapes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.errors import BessemerError, InputError
from bessemer.layout.communication import ElementBytes
from bessemer.model.config import ModelConfig
from bessemer.model.kernels import linear
from bessemer.recipe import Parallel

Scaling = Literal["tensorwise", "rowwise"]

TILE = 16  # the scaled matmul needs dimensions that are multiples of it
SMALLEST = 1e-12  # scale of an operand of zeros
TENSOR_CORES_32 = (8, 0)  # compute capability from which CUDA devices multiply in tf32 and bf16 (Ampere)
TENSOR_CORES_8 = (8, 9)  # and in fp8 (Ada, Hopper)
CPU_FLAGS = {"bf16": {"amx_bf16", "avx512_bf16", "bf16"}, "fp16": {"amx_fp16", "avx512_fp16", "asimdhp"}}


@dataclass(frozen=True)
class Precision:
    """How matmuls are computed.

    autocast: dtype of their operands, None: fp32; significand: bits after the leading one that an operand keeps; tf32: fp32
    operands may be rounded to tf32; scaled: the loss is scaled dynamically; fp8: scaling of the blocks' operands in fp8;
    weights: dtype of weights, gradients and optimizer.
    """

    name: str
    autocast: torch.dtype | None
    significand: int
    tf32: bool = False
    scaled: bool = False
    fp8: Scaling | None = None
    weights: torch.dtype = torch.float32

    @property
    def dtype(self) -> torch.dtype:
        return self.autocast or self.weights

    @property
    def element_bytes(self) -> ElementBytes:
        """Bytes of an activation, and of a weight's cast that is saved for the backward pass; fp8 saves the weight itself."""
        copied = self.autocast is not None and self.fp8 is None
        return ElementBytes(self.dtype.itemsize, self.dtype.itemsize if copied else 0)


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp64", None, significand=52, weights=torch.float64),
        Precision("fp32", None, significand=23),
        Precision("tf32", None, significand=10, tf32=True),
        Precision("bf16", torch.bfloat16, significand=7),
        Precision("fp16", torch.float16, significand=10, scaled=True),
        Precision("fp8", torch.bfloat16, significand=3, fp8="tensorwise"),
        Precision("fp8-rowwise", torch.bfloat16, significand=3, fp8="rowwise"),
    )
}


def available(device: torch.device) -> list[str]:
    """The precisions a device can compute in. A CPU can do bf16 and fp16 too, slowly: for tests."""
    if device.type != "cuda":
        return ["fp32", "bf16", "fp16", "fp64"]
    capability = torch.cuda.get_device_capability(device)
    names = ["fp32", "fp16", "fp64"]
    names += ["tf32", "bf16"] if capability >= TENSOR_CORES_32 else []
    return names + (["fp8", "fp8-rowwise"] if capability >= TENSOR_CORES_8 else [])


@cache
def cpu_flags() -> frozenset[str]:
    """Return what Linux lists of this processor, its flags among others; empty on another system."""
    with contextlib.suppress(OSError):
        return frozenset(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    return frozenset()


def has_units(name: str) -> bool:
    """True where this CPU, x86 or ARM, has units for matmuls in bf16 or fp16."""
    return not CPU_FLAGS[name].isdisjoint(cpu_flags())


def chosen(requested: str, device: torch.device, device_name: str) -> Precision:
    """The precision of a recipe on a device; auto: bf16 where a GPU has it, else fp32. Raises InputError."""
    names = available(device)
    if requested == "auto":
        return PRECISIONS["bf16" if device.type == "cuda" and "bf16" in names else "fp32"]
    if requested not in names:
        raise InputError(
            f"train.precision: {device_name} cannot compute in {requested}; it has {', '.join(names)}, or use auto"
        )
    return PRECISIONS[requested]


def apply_flags(precision: Precision) -> None:
    """Set torch's global flags. Narrow matmuls accumulate in fp32: by default torch lets cuBLAS add partial sums of a split
    matmul in the narrow dtype, which loses more than the rounding of the operands."""
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Context for matmuls in a precision; empty in fp32 and tf32."""
    if precision.autocast is None:
        return contextlib.nullcontext()
    # Each weight is used once a pass, so a cache of its cast would only use memory.
    return torch.autocast(device.type, dtype=precision.autocast, cache_enabled=False)


def linear_of(precision: Precision) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The function (x, weight, bias) of the blocks' matmuls."""
    return linear if precision.fp8 is None else Fp8Linear(precision.fp8)


def probe(precision: Precision, device: torch.device) -> str:
    """Compute a matmul as the blocks do, and check its dtype and significant bits.

    Returns a line for the terminal. Raises BessemerError when another precision runs than the requested one.
    """
    apply_flags(precision)
    with torch.no_grad(), autocast(precision, device):
        bits, dtype = surviving_bits(linear_of(precision), device, precision.weights)
    # With TF32 allowed, cuBLAS may still take a full fp32 kernel for a shape; less than TF32 it may not.
    fits = bits in (10, 23) if precision.tf32 else bits == precision.significand
    tf32 = torch.backends.cuda.matmul.allow_tf32
    if not fits or dtype != precision.dtype or tf32 != precision.tf32:
        raise BessemerError(
            f"train.precision: {precision.name} was asked for, but a matmul on this device keeps {bits} bits of its "
            f"operands (expected {precision.significand}), gives {dtype} and has TF32 {'on' if tf32 else 'off'}; "
            "another library may have changed torch's settings. Use another train.precision, or report this"
        )
    where = "the blocks' matmuls" if precision.fp8 else "matmuls"
    rest = ", the head's in bf16" if precision.fp8 else ""
    kept = str(precision.weights).removeprefix("torch.float")
    return f"{where} in {precision.name}{rest}, weights, gradients and optimizer in fp{kept}"


def surviving_bits(
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[int, torch.dtype]:
    """Bits after the leading one that a matmul keeps of its operands, and its output dtype.

    Row p of the left operand has 1 + 2^-p, which an operand of b bits represents only for p <= b, and multiplies the
    identity. 1.75 in each row makes the fp8 scale a power of two, since fp8's largest value is 1.75 x 2^8.
    """
    size = 512 if device.type == "cuda" else 64  # so large that tensor cores are used
    x = torch.zeros(size, size, dtype=dtype)
    powers = torch.arange(1, 53 if dtype == torch.float64 else 24)
    x[powers, powers] = 1.0 + torch.exp2(-powers.to(dtype))
    x[:, 0] = 1.75
    identity = torch.eye(size, device=device, dtype=dtype)
    identity[0, 0] = 1.75
    output = linear(x.to(device), identity, None)
    kept = (output.to(dtype).cpu()[powers, powers] == x[powers, powers]).tolist()
    return sum(kept), output.dtype


@dataclass(frozen=True)
class LossScale:
    """The dynamic loss scale of fp16 (Micikevicius et al. 2018, section 3.2); part of every checkpoint.

    value: a power of two, so that scaling is exact; good: steps without an overflow since it last changed; skipped: steps
    dropped because of an overflow.
    """

    value: float = 2.0**16
    good: int = 0
    skipped: int = 0

    GROWTH_STEPS = 2000

    @property
    def can_fall(self) -> bool:
        """Whether a smaller scale can help: below 1 the gradients themselves are too large."""
        return self.value >= 2.0

    def after(self, finite: bool) -> LossScale:
        """The scale of the next step: doubled after GROWTH_STEPS good steps, halved after an overflow."""
        if not finite:
            return LossScale(max(self.value / 2, 1.0), 0, self.skipped + 1)
        if self.good + 1 >= self.GROWTH_STEPS:
            return LossScale(self.value * 2, 0, self.skipped)
        return LossScale(self.value, self.good + 1, self.skipped)


FIRST_SCALE = LossScale()


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


def require_fp8(config: ModelConfig, layout: Parallel, micro_batch: int) -> None:
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
