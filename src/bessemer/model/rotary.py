"""Rotary positions (Su et al. 2021) and how they are stretched beyond the length a model was trained on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bessemer.model.config import RopeScaling


def rotations(
    positions: Tensor,
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (section 3.4.2), each (..., T, 1, K/2), in fp32, or fp64 for an fp64 model.

    The angles are computed in fp64: in fp32 the angle at position 100,000 is off by 0.004.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    frequencies = theta**-exponents
    if scaling is not None:
        frequencies = _stretched(frequencies, scaling)
    angles = positions[..., None].double() * frequencies
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return angles.cos().to(wide)[..., None, :], angles.sin().to(wide)[..., None, :]


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """The frequencies under a scaling (see RopeScaling for its sources)."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # How many turns a frequency makes over the original length; between the two bounds the two ways are blended.
    turns = scaling.original_length * frequencies / (2 * math.pi)
    own_share = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    own_share = own_share.clamp(0.0, 1.0)
    return frequencies * (own_share + (1.0 - own_share) / scaling.factor)
