"""The learning rate at each step, as a pure function of the step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from bessemer.common.extensions import failure
from bessemer.recipe.resolved import ResolvedSchedule
from bessemer.recipe.uses import ExtensionBase


@dataclass(frozen=True)
class Update:
    """An update of the weights after the warmup.

    Attributes:
        step: The number of the update, from 0.
        steps: The number of updates of the run.
        warmup_steps: The number of updates of the warmup.
        progress: The progress of the decay, from 0 at the last update at the peak to 1 at the last update of the run.
        final_share: `train.schedule.final_share`.
    """

    step: int
    steps: int
    warmup_steps: int
    progress: float
    final_share: float


class RateSchedule(ExtensionBase, ABC):
    """The base of learning rate schedules after a linear warmup. Fields of a subclass are its settings.

    Attributes:
        has_decay_phase: True if the rate is constant until the last part of the steps (`decay_share`), in which `progress`
            rises.
        is_extendable: True if the rate before any decay phase does not depend on the number of steps, so that a run can be
            extended.
        keys: The keys of [train.schedule] that this schedule reads; other schedules reject them.
    """

    has_decay_phase: ClassVar[bool] = False
    is_extendable: ClassVar[bool] = False
    keys: ClassVar[tuple[str, ...]] = ("final_share",)

    @abstractmethod
    def share(self, update: Update) -> float:
        """Return the share of the peak learning rate for an update."""


def learning_rate_share(schedule: ResolvedSchedule, step: int, steps: int) -> float:
    """Return the share of the peak learning rate for update `step` (0-based) of `steps`.

    The warmup rises linearly and reaches 1 at update `warmup_steps`. If the schedule decays, the last update has `final_share`.
    """
    warmup = min(schedule.warmup_steps, steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    start = schedule.decay_start(steps)
    peak = min(warmup, steps - 2) if start is None else start - 1  # the number of the last update at the peak
    progress = min(max(step - peak, 0) / max(steps - 1 - peak, 1), 1.0)
    rule = schedule.rule
    try:
        share = rule.share(Update(step, steps, warmup, progress, schedule.final_share))
        if not 0.0 <= share < math.inf:
            raise ValueError(f"returned {share}; return a share of the peak, 0 or more")
    except Exception as error:
        raise failure(rule, "share", error, f"step {step + 1} of {steps}") from error
    return float(share)


class Cosine(RateSchedule):
    """Half a cosine between the peak and the final share (Loshchilov and Hutter 2017)."""

    def share(self, update: Update) -> float:
        return update.final_share + (1.0 - update.final_share) * ((1 + math.cos(math.pi * update.progress)) / 2)


class Linear(RateSchedule):
    """A linear decay from the peak to the final share."""

    def share(self, update: Update) -> float:
        return update.final_share + (1.0 - update.final_share) * (1.0 - update.progress)


class InverseSqrt(RateSchedule):
    """The root of warmup / step (Vaswani et al. 2017, section 5.3), at least `final_share`."""

    def share(self, update: Update) -> float:
        return max(math.sqrt((update.warmup_steps + 1) / (update.step + 1)), update.final_share)


class WarmupStableDecay(Linear):
    """A linear decay after a constant rate (Hu et al. 2024; linear after Hägele et al. 2024)."""

    name = "wsd"
    has_decay_phase = True
    is_extendable = True
    keys = ("final_share", "decay_share")


class Constant(RateSchedule):
    """The peak rate until the end."""

    is_extendable = True
    keys = ()

    def share(self, update: Update) -> float:
        return 1.0


BUILT_IN: Mapping[str, str] = {
    rule.name: f"{__name__}:{rule.__name__}" for rule in (Cosine, Linear, InverseSqrt, WarmupStableDecay, Constant)
}


def rewarm_share(step: int, at: int, steps: int, first: float) -> float:
    """Return the factor on the learning rate after a rollback.

    It is `first` at step `at`, rises linearly to 1 at step `at + steps`, and is 1 before `at`.

    Args:
        step: The number of the update (0-based).
        at: The first step after the rollback, as logged (1-based).
        steps: The number of steps of the re-warm-up.
        first: The factor at step `at`.
    """
    if not at <= step + 1 < at + steps:
        return 1.0
    return first + (1.0 - first) * (step + 1 - at) / steps
