"""How moments are stored between steps: fp32 or 8 bits. Updates compute in fp32.

8 bits are the dynamic code of Dettmers et al. (2022, "8-bit Optimizers via Block-wise Quantization", sections 1.3 and 2) in
blocks of 256, each with its largest magnitude as scale in fp32. One difference: a second moment that is not zero never becomes
zero, since the first moment, whose code reaches down seven decades, would then be divided by epsilon.

Shapes: N elements, B blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.parallel.dtensors import is_dtensor, largest_shard, local

BLOCK = 256  # elements that share a scale
SMALL = 4096  # tensors with fewer elements stay fp32 (Dettmers et al. 2022, section 4)
BATCH_BYTES = 256 * 1024 * 1024  # of states that are copied at a time; a larger tensor goes alone

Format = Literal["fp32", "8bit"]
State = dict[str, Tensor]


def format_of(parameter: Tensor, format: Format) -> Format:
    """The format of a parameter's moments; tensors of less than SMALL elements stay fp32."""
    return "fp32" if parameter.numel() < SMALL else format


def zero_moment(parameter: Tensor, name: str, format: Format) -> State:
    """The entries of a zero moment, in the shape of the parameter's local shard: NAME, and with 8bit (uint8 codes)
    NAME_scale (fp32, one a block)."""
    shape, device = local(parameter).shape, parameter.device
    if format == "8bit":
        codes = torch.zeros(shape, dtype=torch.uint8, device=device)
        return {name: codes, f"{name}_scale": torch.zeros(-(-shape.numel() // BLOCK), device=device)}
    return {name: torch.zeros(shape, dtype=torch.promote_types(parameter.dtype, torch.float32), device=device)}


def read(state: State, name: str, signed: bool, part: slice) -> Tensor:
    """Return elements `part` (whole blocks) of an 8-bit moment, as a new fp32 tensor (N,)."""
    return decoded(state[name].view(-1)[part], state[f"{name}_scale"][_blocks(part)], signed)


def write(state: State, name: str, signed: bool, part: slice, moment_N: Tensor) -> None:
    """Store elements `part` (whole blocks) of an 8-bit moment."""
    codes_N, state[f"{name}_scale"][_blocks(part)] = encoded(moment_N, signed)
    state[name].view(-1)[part].copy_(codes_N)


def encoded(values_N: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes (N,) uint8 and scales (B,) fp32 of values, which are not negative unless `signed`."""
    blocks_BN = F.pad(values_N, (0, -len(values_N) % BLOCK)).view(-1, BLOCK)
    scale_B = blocks_BN.abs().amax(dim=1)
    relative_BN = blocks_BN / torch.where(scale_B == 0, 1.0, scale_B)[:, None]
    codes_N = _nearest(relative_BN.view(-1), signed)
    if not signed:
        codes_N = torch.where(blocks_BN.view(-1) > 0, codes_N.clamp(min=1), codes_N)
    return codes_N[: len(values_N)], scale_B


def decoded(codes_N: Tensor, scale_B: Tensor, signed: bool) -> Tensor:
    """The fp32 values (N,) of codes and scales."""
    values_N = _code(signed, codes_N.device).index_select(0, codes_N.to(torch.int32))
    whole_BN = F.pad(values_N, (0, -len(values_N) % BLOCK)).view(-1, BLOCK) * scale_B[:, None]
    return whole_BN.view(-1)[: len(values_N)]


def dynamic_code(signed: bool) -> list[float]:
    """The 256 values of the code, ascending.

    After the sign bit, if there is one, E zeros stand for 10^-E, a one ends them, and the remaining bits count evenly
    through [0.1, 1]. Two patterns are reserved for 0 and 1 (Dettmers et al. 2022, section 1.3).
    """
    bits = 7 if signed else 8
    positive = [
        10.0**-zeros * (0.1 + 0.9 * (step + 0.5) / 2 ** (bits - 1 - zeros))
        for zeros in range(7)
        for step in range(2 ** (bits - 1 - zeros))
    ]
    return sorted([*positive, *([-value for value in positive] if signed else []), 0.0, 1.0])


def _nearest(values_N: Tensor, signed: bool) -> Tensor:
    """Codes (N,) uint8 nearest to values in [-1, 1].

    As torch.bucketize over the borders, in a twentieth of its time on a CPU: the upper 16 bits of a value index the code of
    the smallest value that begins with them, and since no two borders are that close, one comparison is left.
    """
    cell_N = (values_N.view(torch.int32) >> 16) + 32768
    least_N = _cells(signed, values_N.device).index_select(0, cell_N)
    border_N = _borders(signed, values_N.device).index_select(0, least_N.to(torch.int32))
    return least_N + (values_N > border_N)


@lru_cache(maxsize=8)
def _cells(signed: bool, device: torch.device) -> Tensor:
    """For each pattern of the upper 16 bits, as a signed number + 32768, the code of the smallest value with them."""
    first = torch.arange(-32768, 32768, dtype=torch.int32) * 65536
    borders = _borders(signed, torch.device("cpu"))[:-1]
    values = [bits.view(torch.float32).nan_to_num().clamp(-1, 1) for bits in (first, first + 65535)]
    ends = [torch.bucketize(of, borders) for of in values]
    within = values[0].sign() == values[1].sign()  # not so where infinity and NaN share a cell
    assert int((ends[0] - ends[1])[within].abs().max()) <= 1, "a cell with two borders"
    return torch.minimum(*ends).to(torch.uint8).to(device)


@lru_cache(maxsize=8)
def _code(signed: bool, device: torch.device) -> Tensor:
    return torch.tensor(dynamic_code(signed), dtype=torch.float32, device=device)


@lru_cache(maxsize=8)
def _borders(signed: bool, device: torch.device) -> Tensor:
    """Halfway between neighbouring codes, (256,); the last one is infinite."""
    code = torch.tensor([*dynamic_code(signed), math.inf], dtype=torch.float64)
    return ((code[1:] + code[:-1]) / 2).float().to(device)


def _blocks(part: slice) -> slice:
    """The blocks of elements `part`, which begins with a block."""
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def state_batches(weights: list[Tensor], states: list[State]) -> Iterator[slice]:
    """Slices of parameters and their states with at most BATCH_BYTES of states each.

    Muon gathers matrices in them, so that they are the same on all ranks: a state counts as on the rank with the largest shard.
    """
    first, total = 0, 0
    for number, (weight, state) in enumerate(zip(weights, states, strict=True)):
        if is_dtensor(weight):
            size = largest_shard(weight) * sum(value.element_size() for value in state.values() if value.dim())
        else:
            size = sum(value.nbytes for value in state.values())
        if number > first and total + size > BATCH_BYTES:
            yield slice(first, number)
            first, total = number, 0
        total += size
    if states:
        yield slice(first, len(states))
