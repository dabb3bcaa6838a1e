"""The figures that are copied from text to text, worked out with what each of them assumes.

A model's state is said to be 12, 14 or 16 bytes a parameter, by which copies are counted; a training 6 N D FLOPs, without
attention and recompute, at a share of a round peak. The plan's own figures count what the program at hand keeps and computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bessemer.errors import InputError
from bessemer.plan.laws.chinchilla import training_flops

# Bytes a parameter of weights, gradients, two moments and a working copy (Rajbhandari et al. 2020, section 3.1; Micikevicius et
# al. 2018, section 3.1).
STATES = {
    "16-bit weights and gradients, fp32 moments": 2 + 2 + 8 + 0,
    "fp32 weights and moments, 16-bit gradients": 4 + 2 + 8 + 0,
    "the same and a 16-bit working copy of the weights": 4 + 2 + 8 + 2,
}
PETAFLOP_DAY = 1e15 * 86_400


@dataclass(frozen=True)
class State:
    """bytes: of weights, gradients and optimizer, undivided; devices: of the given memory that hold it, and nothing else."""

    assumes: str
    bytes: float
    devices: int


def states(parameters: float, memory: float) -> list[State]:
    """The state of a model, under each assumption. memory: bytes of a device, as its data sheet says them."""
    if not parameters > 0 or not memory > 0:
        raise InputError(f"{parameters:g} parameters on devices of {memory:g} bytes: both must be above zero")
    return [
        State(assumes, parameters * each, math.ceil(parameters * each / memory)) for assumes, each in STATES.items()
    ]


def petaflop_days(flops: float) -> float:
    """FLOPs as days of a petaflop a second (Brown et al. 2020, table D.1)."""
    return flops / PETAFLOP_DAY


def device_hours(parameters: float, tokens: float, peak: float, share: float) -> float:
    """6 N D at a share of a peak, in hours of one device."""
    if not peak > 0 or not 0 < share <= 1:
        raise InputError(f"{share:g} of a peak of {peak:g} FLOP/s: give a peak above zero and a share of it, at most 1")
    return training_flops(parameters, tokens) / (peak * share) / 3600
