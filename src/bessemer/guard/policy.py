"""The verdict on a step between its gradients and its update.

A value that is not finite must never reach the weights. All processes agree on the verdict before the optimizer step, and a
bad update is skipped, not multiplied by zero, since 0 x NaN is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh
from bessemer.guard.detection import Alarm, GuardReference, History, observe
from bessemer.guard.incidents import NONFINITE
from bessemer.recipe import Guard

NONFINITE_IN_A_ROW = 3  # such steps are a lasting alarm


class Verdict(Enum):
    """What to do with a step: apply it, lower fp16's loss scale, skip it, or roll the run back."""

    APPLY = "apply"
    RESCALE = "rescale"
    SKIP = "skip"
    ROLL_BACK = "roll back"


@dataclass(frozen=True)
class GuardState:
    """Skipped updates and the history of the losses; part of every checkpoint.

    nonfinite_in_a_row: the last steps, whose loss or gradient norm was not finite; skipped: updates of the whole run;
    num_rollbacks: before this state; healthy_until: the last step before the last alarm, 0 where there was none.
    """

    nonfinite_in_a_row: int = 0
    skipped: int = 0
    history: History = field(default_factory=History)
    num_rollbacks: int = 0
    healthy_until: int = 0

    def restarted(self) -> GuardState:
        """Without the windows of the history."""
        return replace(self, history=self.history.restarted())

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GuardState:
        """The inverse of dataclasses.asdict after JSON."""
        history: dict[str, Any] = {k: tuple(x) if isinstance(x, list) else x for k, x in values["history"].items()}
        return cls(**{**values, "history": History(**history)})


@dataclass(frozen=True)
class Judgement:
    """The verdict on a step, the state after it, the alarm that it raised, whether loss and gradients are finite, and whether
    the device skipped the update as that of a spike."""

    verdict: Verdict
    state: GuardState
    alarm: Alarm | None = None
    is_finite: bool = True
    skipped_on_device: bool = False

    @property
    def updates(self) -> bool:
        """Whether the optimizer takes the step: also where no checkpoint allowed a rollback, but never with values that are not
        finite."""
        return self.is_finite and not self.skipped_on_device and self.verdict in (Verdict.APPLY, Verdict.ROLL_BACK)


def judge(
    guard: Guard, state: GuardState, step: int, loss: float, grad_norm: float, reference: GuardReference, *,
    overflow: bool = False, was_skipped: bool = False, skipped_on_device: bool = False, exclude_from_history: bool = False,
    mesh: ProcessMesh = SINGLE_PROCESS,
) -> Judgement:  # fmt: skip
    """Judge step number `step` (1-based) by its loss and global gradient norm. Collective; every process gets the same verdict.

    overflow: fp16's loss scale was too large for the step; was_skipped: its update, by the journal; skipped_on_device: by the
    device, since the step is a spike; exclude_from_history: as `detection.observe`.
    """
    is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
    history, alarm = state.history, None
    if is_finite:
        history, alarm = observe(history, step, loss, grad_norm, reference, exclude_from_history=exclude_from_history)
        alarm = alarm and replace(alarm, loss=loss, grad_norm=grad_norm)
    spike_to_skip = mesh.is_main and alarm is not None and alarm.kind.response == "skip" and guard.skip_spikes
    alarm_to_undo = mesh.is_main and alarm is not None and alarm.needs_rollback
    # One collective: a value that is not finite counts on any rank; spikes and rollbacks are decided by rank 0.
    flags = torch.tensor([not is_finite, not (is_finite or overflow), spike_to_skip, alarm_to_undo], dtype=torch.int64)
    any_nonfinite, any_broken, skips_spike, needs_rollback = map(bool, mesh.sum(flags).tolist())
    if not any_nonfinite:
        if not skips_spike and was_skipped:  # it was a hardware fault that did not recur
            return Judgement(Verdict.SKIP, replace(state, nonfinite_in_a_row=0, skipped=state.skipped + 1))
        skipped = state.skipped + (skips_spike or skipped_on_device)
        after = replace(state, nonfinite_in_a_row=0, skipped=skipped, history=history)
        if alarm is not None and alarm.kind.response != "record":
            after = replace(after, healthy_until=alarm.onset - 1)
        verdict = Verdict.ROLL_BACK if needs_rollback else Verdict.SKIP if skips_spike else Verdict.APPLY
        return Judgement(verdict, after, alarm, skipped_on_device=skipped_on_device)
    if not any_broken:
        return Judgement(Verdict.RESCALE, state, is_finite=False)
    where = " (on another rank)" if is_finite else ""
    cause = f"the loss is {loss}, the gradient norm {grad_norm}{where}"
    alarm = Alarm(NONFINITE, step - state.nonfinite_in_a_row, cause)
    in_a_row = state.nonfinite_in_a_row + 1
    after = replace(state, nonfinite_in_a_row=in_a_row, skipped=state.skipped + 1, healthy_until=alarm.onset - 1)
    verdict = Verdict.ROLL_BACK if in_a_row >= NONFINITE_IN_A_ROW else Verdict.SKIP
    return Judgement(verdict, after, alarm, is_finite=False)
