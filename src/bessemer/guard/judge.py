"""The verdict on a step, between its gradients and its update.

A value that is not finite must never reach the weights. The flag is agreed on by all processes before the optimizer
step, and the step is branched around: multiplying by zero would not do, since 0 x NaN is NaN.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import Enum

from bessemer.parallel.team import ALONE, Team
from bessemer.recipe import Guard


class Verdict(Enum):
    """What to do with a step."""

    APPLY = "apply"
    RESCALE = "rescale"
    SKIP = "skip"
    STOP = "stop"


@dataclass(frozen=True)
class GuardState:
    """What the guard remembers; part of every checkpoint."""

    skips_in_a_row: int = 0
    skipped: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def judge(
    settings: Guard, state: GuardState, loss: float, grad_norm: float, overflow: bool = False, team: Team = ALONE
) -> tuple[Verdict, GuardState]:
    """Judge a step by its loss and global gradient norm. All processes get the same verdict.

    overflow: fp16's loss scale was too large for the step; it is given up, and is no fault of the run.
    """
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if not team.any(not finite):
        return Verdict.APPLY, GuardState(0, state.skipped)
    if not team.any(not (finite or overflow)):
        return Verdict.RESCALE, state
    after = GuardState(state.skips_in_a_row + 1, state.skipped + 1)
    stop = after.skips_in_a_row >= settings.skips_in_a_row
    return (Verdict.STOP if stop else Verdict.SKIP), after


def cause(loss: float, grad_norm: float) -> str:
    """What was not finite, in words."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    return f"the gradient norm is {grad_norm} at a loss of {loss:.4f}"
