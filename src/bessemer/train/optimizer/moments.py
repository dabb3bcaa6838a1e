"""The storage of moments between steps: fp32, or 8 bits by torchao. Updates compute in fp32.

The 8 bits are the dynamic code of Dettmers et al. (2022, "8-bit Optimizers via Block-wise Quantization", sections 1.3 and 2) in
blocks of 256, each with its largest magnitude as an fp32 scale. One difference: a second moment that is not zero never becomes
zero. Otherwise the first moment, whose code reaches down seven decades, would be divided by epsilon.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bessemer.distributed.sharded_tensors import local
from bessemer.train.precision import require_torchao
from bessemer.train.update_rule import UpdateRule

BLOCK = 256  # number of elements that share a scale
# Number of elements of an 8-bit moment decoded to fp32 at a time (4.2M). Quantization takes several times their memory.
SLICE = BLOCK << 14
SMALL = 4096  # tensors with fewer elements stay fp32 (Dettmers et al. 2022, section 4)

Format = Literal["fp32", "8bit"]
State = dict[str, Tensor]


class UpdatedParameter(NamedTuple):
    """A parameter to update, or its local shard, with its gradient and its state."""

    name: str
    weight: Tensor
    gradient: Tensor
    state: State


def format_of(parameter: Tensor, format: Format) -> Format:
    """Return the format of a parameter's moments. Small tensors, and those that blocks do not divide, stay fp32."""
    return "fp32" if parameter.numel() < SMALL or parameter.numel() % BLOCK else format


def zero_moment(parameter: Tensor, name: str, format: Format) -> State:
    """Return the state entries of a zero moment, in the shape of the parameter's local shard.

    These are NAME and, for 8bit (uint8 codes), NAME_scale (fp32, one per block).
    """
    shape, device = local(parameter).shape, parameter.device
    if format == "8bit":
        codes = torch.zeros(shape, dtype=torch.uint8, device=device)
        return {name: codes, f"{name}_scale": torch.zeros(shape.numel() // BLOCK, device=device)}
    return {name: torch.zeros(shape, dtype=torch.promote_types(parameter.dtype, torch.float32), device=device)}


def quantize(state: State, name: str, signed: bool, part: slice) -> Any:
    """Return elements `part` (whole blocks) of an 8-bit moment as torchao's tensor, which shares their memory."""
    from torchao.optim.subclass_8bit import OptimState8bit

    codes_N, scale_B = state[name].view(-1)[part], state[f"{name}_scale"][part.start // BLOCK : part.stop // BLOCK]
    return OptimState8bit(codes_N, scale_B, _code(signed, codes_N.device), signed)


def write(state: State, name: str, signed: bool, part: slice, moment_N: Tensor, skip: Tensor) -> None:
    """Store elements `part` (whole blocks) of an 8-bit moment, which are not negative unless `signed`.

    If `skip` is 1, codes and scales keep their bits, since encoding a decoded moment may change them.
    """
    stored = quantize(state, name, signed, part)
    codes_N, scale_B = stored.codes.clone(), stored.scale.clone()
    stored.copy_(moment_N)
    if not signed:  # code 0 is zero, which a positive moment must not become
        stored.codes.add_((stored.codes == 0) & (moment_N > 0))
    for new, old in ((stored.codes, codes_N), (stored.scale, scale_B)):
        put_unless(~skip.bool(), new, old)


def put_unless(skip: Tensor, target: Tensor, value: Tensor) -> None:
    """Write a value into a tensor in place, unless the device scalar `skip` is 1. The host need not know `skip`."""
    torch.where(skip.to(target.device).bool(), target, value, out=target)


def decode_slices(parameter: UpdatedParameter, rule: UpdateRule, skip: Tensor) -> Iterator[UpdatedParameter]:
    """Yield slices of a local parameter with fp32 moments, and store each slice's moments after the caller updated them."""
    state, signs = parameter.state, {name: name not in rule.nonnegative for name in rule.moments}
    weight_N, gradient_N, numel = parameter.weight.view(-1), parameter.gradient.reshape(-1), parameter.weight.numel()
    for start in range(0, numel, SLICE):
        part = slice(start, min(start + SLICE, numel))
        moments = {name: quantize(state, name, signed, part).dequantize() for name, signed in signs.items()}
        others = {name: state[name].clone() for name in rule.others}
        yield UpdatedParameter(parameter.name, weight_N[part], gradient_N[part], moments | others)
        for name, signed in signs.items():
            write(state, name, signed, part, moments[name], skip)
    for name, value in others.items():
        state[name].copy_(value)


@lru_cache(maxsize=8)
def _code(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values, ascending, that the uint8 codes of a moment encode; none is negative unless `signed`."""
    require_torchao("train.optimizer.state")
    from torchao.optim.subclass_8bit import OptimState8bit

    values: Tensor = OptimState8bit.zeros((BLOCK,), signed, BLOCK, device).qmap
    return values
