"""Rules for which checkpoints to keep."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.recipe import Guard

SPANS = 3  # the newest intervals of `distance` steps, in each of which one checkpoint is kept


# A rollback goes back to this share of the run's steps before the first bad one, within these bounds.
SHORTEST, LONGEST, SHARE = 8, 100, 0.05


def rollback_distance(guard: Guard, steps: int) -> int:
    """Return the number of steps to roll back after divergence: rollback_distance, or its default for `steps` steps."""
    return guard.rollback_distance or min(LONGEST, max(SHORTEST, int(SHARE * steps)))


@dataclass(frozen=True)
class Retention:
    """The rules for keeping checkpoints; a checkpoint stays if any rule keeps it.

    `Saver._retention` of train/state.py gives the values.

    Attributes:
        newest: How many of the newest checkpoints to keep.
        decay_start: Keep the newest checkpoint at or before this step, from which a longer run of the same recipe can continue.
        healthy_until: Keep the newest checkpoint at or before this step, the last step before an alarm.
        distance: Keep a checkpoint at least about this many steps older than the newest, for a rollback; 0 for none.
        best: The step of the checkpoint with the lowest held-out loss, which is kept.
    """

    newest: int
    decay_start: int | None = None
    healthy_until: int = 0
    distance: int = 0
    best: int | None = None

    @classmethod
    def from_value(cls, keep: Retention | int) -> Retention:
        """Convert `keep` to a Retention; a number keeps that many of the newest checkpoints."""
        return keep if isinstance(keep, Retention) else cls(keep)

    def select(self, steps: list[int]) -> set[int]:
        """Return which of the published steps to keep."""
        ascending = sorted(steps)
        selected = set(ascending[-self.newest :]) | {step for step in ascending if step == self.best}
        selected |= set([step for step in ascending if self.decay_start is not None and step <= self.decay_start][-1:])
        selected |= set([step for step in ascending if step <= self.healthy_until][-1:])
        if self.distance:
            selected |= set([step for step in ascending if step <= ascending[-1] - self.distance][-1:])
            # Keep the first checkpoint of each of the last three spans too, so that one is always old enough later.
            last = ascending[-1] // self.distance
            for span in range(last - SPANS + 1, last + 1):
                selected |= set([step for step in ascending if step // self.distance == span][:1])
        return selected
