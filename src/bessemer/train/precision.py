"""The precision of matmuls.

Weights, gradients and optimizer states are fp32 in every precision (fp64 in fp64, which is for tests). Autocast narrows only
the operands of matmuls, which accumulate in fp32 (Micikevicius et al. 2018, sections 3.1 and 3.3).

In fp8, torchao quantizes each operand of the blocks' matmuls with a dynamic scale, in the formats of Micikevicius et al. 2022
("FP8 formats for deep learning", section 3). "tensorwise" has one scale per tensor, with e4m3 for activations and weights, and
e5m2 for gradients, whose range is wider. "rowwise" has a power of two for each row that is summed over, with e4m3 throughout. A
CPU emulates both.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.common.errors import InputError
from bessemer.distributed.element_bytes import ElementBytes
from bessemer.model.config import ModelConfig
from bessemer.model.kernels import linear
from bessemer.model.layers import LinearFunction
from bessemer.recipe import Parallel

TILE = 16  # the dimensions of the scaled matmul must be multiples of it
TENSOR_CORES_32 = (8, 0)  # the lowest CUDA compute capability with tf32 and bf16 matmuls (Ampere)
TENSOR_CORES_8 = (8, 9)  # the lowest CUDA compute capability with fp8 matmuls (Ada, Hopper)
# Flags in /proc/cpuinfo with which matmuls are faster than in fp32. Intel's avx512_bf16 without AMX reaches half of fp32's rate
# (measured: 165 and 320 GFLOP/s on two cores); AMD's has twice the peak of fp32.
FASTER_WITH = {"bf16": ("amx_bf16", "AuthenticAMD avx512_bf16", "bf16"), "fp16": ("amx_fp16", "avx512_fp16", "asimdhp")}


@dataclass(frozen=True)
class Precision:
    """A precision of matmuls.

    Attributes:
        name: The name in recipes.
        autocast: The dtype of matmul operands; None for fp32.
        tf32: True if fp32 operands may be rounded to tf32.
        scaled: True if the loss is scaled dynamically.
        fp8: The scaling of the blocks' operands in fp8.
        weights: The dtype of weights, gradients and optimizer states.
    """

    name: str
    autocast: torch.dtype | None
    tf32: bool = False
    scaled: bool = False
    fp8: Literal["tensorwise", "rowwise"] | None = None
    weights: torch.dtype = torch.float32

    @property
    def dtype(self) -> torch.dtype:
        return self.autocast or self.weights

    @property
    def update_dtype(self) -> torch.dtype:
        """The dtype of matmuls in updates of the weights, for which the range of fp16 is too small."""
        return torch.bfloat16 if self.autocast == torch.bfloat16 else self.weights

    @property
    def element_bytes(self) -> ElementBytes:
        """The bytes of an activation's element, and of a weight's in the cast saved for the backward pass; 0 without a cast."""
        copied = self.autocast is not None and self.fp8 is None
        return ElementBytes(self.dtype.itemsize, self.dtype.itemsize if copied else 0)


_PRECISIONS = (
    Precision("fp64", None, weights=torch.float64),
    Precision("fp32", None),
    Precision("tf32", None, tf32=True),
    Precision("bf16", torch.bfloat16),
    Precision("fp16", torch.float16, scaled=True),
    Precision("fp8", torch.bfloat16, fp8="tensorwise"),
    Precision("fp8-rowwise", torch.bfloat16, fp8="rowwise"),
)
PRECISIONS = {precision.name: precision for precision in _PRECISIONS}


def available(device: torch.device) -> list[str]:
    """Return the names of the precisions that a device supports. A CPU supports bf16, fp16 and fp8 even if slowly."""
    if device.type != "cuda":
        return [name for name in PRECISIONS if name != "tf32"]
    capability = torch.cuda.get_device_capability(device)
    names = ["fp32", "fp16", "fp64"]
    names += ["tf32", "bf16"] if capability >= TENSOR_CORES_32 else []
    return names + (["fp8", "fp8-rowwise"] if capability >= TENSOR_CORES_8 else [])


@cache
def cpu_flags() -> frozenset[str]:
    """Return the words of Linux's /proc/cpuinfo, which include the processor's flags; empty on other systems."""
    with contextlib.suppress(OSError):
        return frozenset(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    return frozenset()


def is_faster(name: str) -> bool:
    """Return True if matmuls of this CPU, x86 or ARM, are faster in a precision than in fp32, as far as its flags tell."""
    return any(cpu_flags().issuperset(flags.split()) for flags in FASTER_WITH.get(name, ()))


def chosen(requested: str, device: torch.device, device_name: str) -> Precision:
    """Return the precision of a recipe on a device. Raises InputError if the device does not support it.

    "auto" is bf16 if the device is faster with it, else fp32.
    """
    names = available(device)
    if requested == "auto":
        has_bf16 = "bf16" in names and (device.type == "cuda" or is_faster("bf16"))
        return PRECISIONS["bf16" if has_bf16 else "fp32"]
    if requested not in names:
        raise InputError(f"train.precision: {device_name} cannot compute in {requested}; use {', '.join(names)}")
    return PRECISIONS[requested]


def apply_flags(precision: Precision) -> None:
    """Set torch's global flags for a precision.

    Narrow matmuls accumulate in fp32. By default torch lets cuBLAS add partial sums of a split matmul in the narrow dtype,
    which loses more than the rounding of the operands.
    """
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context for matmuls in a precision, which does nothing in fp32 and tf32."""
    if precision.autocast is None:
        return contextlib.nullcontext()
    # Each weight is used once per pass, so a cache of its cast would only use memory.
    return torch.autocast(device.type, dtype=precision.autocast, cache_enabled=False)


def require_torchao(key: str) -> None:
    """Import torchao without its messages about kernels for other devices. Raises InputError that names the recipe key."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import torchao.float8
        import torchao.optim  # noqa: F401
    except ImportError as error:
        raise InputError(f"{key}: torchao cannot be loaded ({error}); run pip install 'bessemer[lowbit]'") from None


def linear_of(precision: Precision, device: torch.device) -> LinearFunction:
    """Return the function that computes the blocks' matmuls."""
    if precision.fp8 is None:
        return linear
    require_torchao("train.precision")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    config = replace(Float8LinearConfig.from_recipe_name(precision.fp8), emulate=device.type != "cuda")
    layer = convert_to_float8_training(nn.Linear(TILE, TILE, bias=False, device="meta"), config=config)

    def fp8_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Compute a linear layer as torchao's fp8 layer does, but with a weight and bias that are passed in.

        Outside of autocast (generation, export), the matmul runs in the dtype of the operands and not in fp8.
        """
        if not torch.is_autocast_enabled(device.type):
            return F.linear(x, weight_OI, bias_O)
        x = x.to(torch.get_autocast_dtype(device.type))
        y: Tensor = matmul_with_hp_or_float8_args.apply(x, weight_OI.t(), layer.linear_mm_config, layer.config)
        return y if bias_O is None else y + bias_O.to(y.dtype)

    return fp8_linear


@dataclass(frozen=True)
class LossScale:
    """The dynamic loss scale of fp16 (Micikevicius et al. 2018, section 3.2), which is part of every checkpoint.

    Attributes:
        value: The scale, a power of two, so that scaling is exact.
        good: The number of steps without an overflow since it last changed.
        skipped: The number of steps dropped because of an overflow.
    """

    value: float = 2.0**16
    good: int = 0
    skipped: int = 0

    def to_tensor(self, device: torch.device) -> Tensor:
        """Return the fields as a float64 tensor on a device, (3,)."""
        return torch.tensor([self.value, self.good, self.skipped], dtype=torch.float64, device=device)


GROWTH_STEPS = 2000


def next_scale(scale: Tensor, loss: Tensor, grad_norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss scale of the next step, and True if this step overflowed and a smaller scale can help.

    The scale is doubled after GROWTH_STEPS steps without an overflow and halved after one, but it stays at least 1: a step that
    overflows even then has too large gradients. A loss that is not finite changes nothing. All tensors are on the device:
    `scale` and the first result are the fields of a LossScale, (3,), and the others are scalars.
    """
    value, good, skipped = scale.unbind()
    grows = good + 1 >= GROWTH_STEPS
    after_good = torch.stack([torch.where(grows, value * 2, value), torch.where(grows, 0.0, good + 1), skipped])
    after_overflow = torch.stack([(value / 2).clamp(min=1.0), torch.zeros_like(good), skipped + 1])
    after = torch.where(loss.isfinite(), torch.where(grad_norm.isfinite(), after_good, after_overflow), scale)
    return after, loss.isfinite() & ~grad_norm.isfinite() & (value >= 2.0)


def require_fp8(config: ModelConfig, layout: Parallel, micro_batch: int) -> None:
    """Raise InputError if the scaled matmul cannot multiply a process's part of the matrices. The error names the dimension."""
    heads, kv_heads = config.heads // layout.tensor, config.kv_heads // layout.tensor
    sizes = {
        "model.width": config.width,
        "model.mlp_width / parallel.tensor": config.mlp_width // layout.tensor,
        "model.heads x model.head_dim / parallel.tensor": heads * config.head_dim,
        "(model.heads + 2 model.kv_heads) x model.head_dim / parallel.tensor": (heads + 2 * kv_heads) * config.head_dim,
        "train.micro_batch x tokens.sequence_length / parallel.context": micro_batch * config.sequence_length // layout.context,
    }  # fmt: skip
    for name, size in sizes.items():
        if size % TILE:
            raise InputError(f"{name} = {size} is not a multiple of {TILE}, as fp8 needs; change it, or use bf16")
