"""The verdict on a step by its loss and gradient norm.

A value that is not finite must never reach the weights, nor a spike: the device itself skips such an update, by numbers that are
equal on all processes. The host judges the step when it reads these numbers, and then records, rolls back or stops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from bessemer.guard.detection import Alarm, GuardReference, History, SpikeLimits, observe, spike_limits
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
        if (limits := history.get("limits")) is not None:
            history["limits"] = SpikeLimits(**limits)
        return cls(**{**values, "history": History(**history)})


@dataclass(frozen=True)
class Judgement:
    """The verdict on a step, the state after it, the alarm that it raised, and whether the device took the update."""

    verdict: Verdict
    state: GuardState
    alarm: Alarm | None = None
    updates: bool = True


def judge(
    guard: Guard, state: GuardState, step: int, loss: float, grad_norm: float, reference: GuardReference, *,
    overflow: bool = False, was_skipped: bool = False, exclude_from_history: bool = False, renews_limits: bool = True,
) -> Judgement:  # fmt: skip
    """Judge step number `step` (1-based) by its loss and global gradient norm.

    overflow: fp16's loss scale was too large for the step; was_skipped: its update, by the journal; exclude_from_history: as
    `detection.observe`; renews_limits: the spike limits of the next step follow from the history with this one.
    """
    limits = state.history.limits
    if math.isfinite(loss) and math.isfinite(grad_norm):
        history, alarm = observe(
            state.history, step, loss, grad_norm, reference, exclude_from_history=exclude_from_history
        )
        history = replace(history, limits=spike_limits(history)) if renews_limits else history
        alarm = alarm and replace(alarm, loss=loss, grad_norm=grad_norm)
        is_spike = guard.skip_spikes and limits is not None and limits.exceeded_by(loss, grad_norm)
        skips_spike = is_spike and alarm is not None and alarm.kind.response == "skip"
        if not skips_spike and was_skipped:  # it was a hardware fault that did not recur
            after = replace(state, nonfinite_in_a_row=0, skipped=state.skipped + 1)
            return Judgement(Verdict.SKIP, after, updates=False)
        after = replace(state, nonfinite_in_a_row=0, skipped=state.skipped + is_spike, history=history)
        if alarm is not None and alarm.kind.response != "record":
            after = replace(after, healthy_until=alarm.onset - 1)
        needs_rollback = alarm is not None and alarm.kind.response == "roll back"
        verdict = Verdict.ROLL_BACK if needs_rollback else Verdict.SKIP if skips_spike else Verdict.APPLY
        return Judgement(verdict, after, alarm, updates=not is_spike)
    if overflow:
        return Judgement(Verdict.RESCALE, state, updates=False)
    cause = f"the loss is {loss}, the gradient norm {grad_norm}"
    alarm = Alarm(NONFINITE, step - state.nonfinite_in_a_row, cause)
    in_a_row = state.nonfinite_in_a_row + 1
    after = replace(state, nonfinite_in_a_row=in_a_row, skipped=state.skipped + 1, healthy_until=alarm.onset - 1)
    verdict = Verdict.ROLL_BACK if in_a_row >= NONFINITE_IN_A_ROW else Verdict.SKIP
    return Judgement(verdict, after, alarm, updates=False)
