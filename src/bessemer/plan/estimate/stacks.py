"""How the software that runs a step behaves, where that changes memory or time: one set of habits for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Stack:
    """Habits of a training program.

    weight_bytes: of the weights that the products read; master_bytes: of a second, wider copy that the optimizer keeps (0: the
    weights are it); gradient_bytes: of a gradient that waits for the optimizer; moment_bytes: of the optimizer's moments, both
    together; attention: unfused (scores and probabilities are written out) or flash (they are not; Dao et al. 2022); logits:
    whole (kept for the backward pass, in fp32) or chunked; fused: element-wise passes joined by a compiler.
    """

    name: str
    weight_bytes: float = 2.0
    master_bytes: float = 4.0
    gradient_bytes: float = 4.0
    moment_bytes: float = 8.0
    attention: Literal["unfused", "flash"] = "flash"
    logits: Literal["whole", "chunked"] = "whole"
    dropout: bool = False
    fused: bool = False
