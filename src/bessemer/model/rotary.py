"""Rotary positions (Su et al. 2021) and how they are stretched beyond the length a model was trained on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bessemer.model.config import Rope, RopeScaling


def rotations(positions: Tensor, rope: Rope, length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (section 3.4.2), each (..., T, 1, rope.width / 2), in fp32, or fp64 for an
    fp64 model.

    length: of the whole sequences, which dynamic and longrope scaling depend on. The angles are computed in fp64: in
    fp32 the angle at position 100,000 is off by 0.004.
    """
    amplitude = 1.0 if rope.scaling is None else rope.scaling.amplitude
    angles = positions[..., None].double() * frequencies(rope, length, positions.device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = angles.cos(), angles.sin()
    if amplitude != 1.0:
        cos, sin = cos * amplitude, sin * amplitude
    return cos.to(wide)[..., None, :], sin.to(wide)[..., None, :]


def frequencies(rope: Rope, length: int, device: torch.device | None = None) -> Tensor:
    """Radians a position by which each pair of dimensions turns, (rope.width / 2,) in fp64. length: see `rotations`."""
    exponents = torch.arange(0, rope.width, 2, device=device, dtype=torch.float64) / rope.width
    plain: Tensor = rope.theta**-exponents
    return plain if rope.scaling is None else _stretched(plain, rope, rope.scaling, length)


def _stretched(frequencies: Tensor, rope: Rope, scaling: RopeScaling, length: int) -> Tensor:
    """The frequencies under a scaling (see RopeScaling for its sources)."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "dynamic":
        longer = max(length / scaling.original_length, 1.0)
        # theta times this to the power width / (width - 2): the slowest frequency is then divided by just this.
        growth = scaling.factor * longer - (scaling.factor - 1.0)
        exponents = torch.arange(0, rope.width, 2, device=frequencies.device, dtype=torch.float64) / rope.width
        base_growth: float = growth ** (rope.width / (rope.width - 2))
        return frequencies * torch.pow(base_growth, -exponents)
    if scaling.kind == "longrope":
        factors = scaling.long_factor if length > scaling.original_length else scaling.short_factor
        return frequencies / torch.tensor(factors, device=frequencies.device, dtype=torch.float64)
    if scaling.kind == "yarn":
        own_share = _yarn_ramp(rope, scaling, frequencies.device)
    else:
        # How many turns a frequency makes over the original length; between the two bounds the two ways are blended.
        turns = scaling.original_length * frequencies / (2 * math.pi)
        own_share = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
        own_share = own_share.clamp(0.0, 1.0)
    return frequencies * (own_share + (1.0 - own_share) / scaling.factor)


def _yarn_ramp(rope: Rope, scaling: RopeScaling, device: torch.device) -> Tensor:
    """The share of each frequency that stays as it is: 1 at the dimension that turns beta_fast times, 0 at that of beta_slow."""

    def dimension(turns: float) -> float:
        wavelengths = scaling.original_length / (turns * 2 * math.pi)
        return rope.width * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    high += 0.001 * (low == high)  # as the published code: no division by zero
    index = torch.arange(rope.width // 2, device=device, dtype=torch.float64)
    return 1.0 - ((index - low) / (high - low)).clamp(0.0, 1.0)
