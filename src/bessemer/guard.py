"""The guard: the verdict on a step between its gradients and its update, and the record of incidents.

A value that is not finite must never reach the weights. All processes agree on the verdict before the optimizer step, and a
bad step is not applied at all: multiplying it by zero would not do, since 0 x NaN is NaN.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from bessemer.logfile import LogFile, json_line
from bessemer.parallel.mesh import SINGLE_PROCESS, ProcessMesh


class Verdict(Enum):
    """What to do with a step: apply it, lower fp16's loss scale, skip it, or stop the run."""

    APPLY = "apply"
    RESCALE = "rescale"
    SKIP = "skip"
    STOP = "stop"


@dataclass(frozen=True)
class GuardState:
    """Skipped steps; part of every checkpoint."""

    skips_in_a_row: int = 0
    skipped: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def judge(
    max_skips: int,
    state: GuardState,
    loss: float,
    grad_norm: float,
    overflow: bool = False,
    mesh: ProcessMesh = SINGLE_PROCESS,
) -> tuple[Verdict, GuardState]:
    """Judge a step by its loss and global gradient norm; every process gets the same verdict.

    max_skips: skipped steps in a row that stop the run; overflow: fp16's loss scale was too large for the step.
    """
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if not mesh.any(not finite):
        return Verdict.APPLY, GuardState(0, state.skipped)
    if not mesh.any(not (finite or overflow)):
        return Verdict.RESCALE, state
    after = GuardState(state.skips_in_a_row + 1, state.skipped + 1)
    return (Verdict.STOP if after.skips_in_a_row >= max_skips else Verdict.SKIP), after


def cause(loss: float, grad_norm: float) -> str:
    """Which number was not finite, in words."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    return f"the gradient norm is {grad_norm} at a loss of {loss:.4f}"


def record(path: Path, *, step: int, what: str, cause: str, action: str, rank: int = 0, **more: Any) -> None:
    """Append an incident to incidents.jsonl. what: its kind, as nonfinite_step; cause, action: for a person.

    One that cannot be written (a full disk) is written with the next one of this process.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    row = {"time": now, "step": step, "rank": rank, "what": what, "cause": cause, "action": action, **more}
    _log(path).append(json_line(row))


@cache
def _log(path: Path) -> LogFile:
    return LogFile(path)
