"""The verdict on a step, from its loss and gradient norm.

Neither a value that is not finite nor a spike may reach the weights. The device skips such an update itself, using numbers that
are equal on all processes. The host judges the step when it reads these numbers, and then records, rolls back or stops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from bessemer.guard.detection import Alarm, GuardReference, History, SpikeLimits, observe, spike_limits
from bessemer.guard.incidents import NONFINITE
from bessemer.recipe import Guard

NONFINITE_IN_A_ROW = 3  # consecutive non-finite steps that cause a rollback


class Verdict(Enum):
    """The response to a step: apply it, lower fp16's loss scale, skip it, or roll the run back."""

    APPLY = "apply"
    RESCALE = "rescale"
    SKIP = "skip"
    ROLL_BACK = "roll back"


@dataclass(frozen=True)
class GuardState:
    """The state of the guard, which is part of every checkpoint.

    Attributes:
        nonfinite_in_a_row: The number of last steps whose loss or gradient norm was not finite.
        skipped: The number of skipped updates in the whole run.
        history: The history of losses and gradient norms.
        num_rollbacks: The number of rollbacks before this state.
        healthy_until: The last step before the last alarm; 0 without an alarm.
    """

    nonfinite_in_a_row: int = 0
    skipped: int = 0
    history: History = field(default_factory=History)
    num_rollbacks: int = 0
    healthy_until: int = 0

    def restarted(self) -> GuardState:
        """Return the state with a restarted history."""
        return replace(self, history=self.history.restarted())

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GuardState:
        """Build the state from `dataclasses.asdict` values that were stored as JSON."""
        history: dict[str, Any] = {k: tuple(x) if isinstance(x, list) else x for k, x in values["history"].items()}
        if (limits := history.get("limits")) is not None:
            history["limits"] = SpikeLimits(**limits)
        return cls(**{**values, "history": History(**history)})


@dataclass(frozen=True)
class Judgement:
    """The verdict on a step.

    Attributes:
        verdict: What the trainer does: apply the update, skip it, or roll back.
        state: The state after the step.
        alarm: The alarm that the step raised, if any.
        updates: True if the device applied the update.
    """

    verdict: Verdict
    state: GuardState
    alarm: Alarm | None = None
    updates: bool = True


def judge(
    guard: Guard, state: GuardState, step: int, loss: float, grad_norm: float, reference: GuardReference, *,
    overflow: bool = False, was_skipped: bool = False, exclude_from_history: bool = False, renews_limits: bool = True,
) -> Judgement:  # fmt: skip
    """Judge a step by its loss and global gradient norm.

    Args:
        guard: The [guard] table of the recipe.
        state: The state before the step.
        step: The step (1-based).
        loss: Its loss in nats per target.
        grad_norm: Its global gradient norm before clipping.
        reference: The constants of the run for the anomaly detector.
        overflow: True if fp16's loss scale was too large for the step.
        was_skipped: True if the journal records that the update was skipped.
        exclude_from_history: As for `detection.observe`.
        renews_limits: True if the spike limits of the next step include this step.
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
        if not skips_spike and was_skipped:  # a hardware fault caused the recorded skip and did not recur
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
