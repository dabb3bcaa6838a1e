"""Which checkpoints stay."""

from __future__ import annotations

from dataclasses import dataclass

SPANS = 3  # of `distance`, of each of which a checkpoint stays


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay, any of these; `Saver._retention` of train/state.py gives the values.

    newest: number of the newest
    decay_start: the newest at or before this step, from which a longer run of the same recipe goes on
    healthy_until: the newest at or before this step, the last before an alarm
    best: the one with the lowest held-out loss
    distance: one that is at least about this many steps older than the newest, for a rollback; 0: none
    """

    newest: int
    decay_start: int | None = None
    healthy_until: int = 0
    distance: int = 0
    best: int | None = None

    @classmethod
    def of(cls, keep: Retention | int) -> Retention:
        """From how many of the newest stay."""
        return keep if isinstance(keep, Retention) else cls(keep)

    def kept(self, steps: list[int]) -> set[int]:
        """Of the published steps, those that stay."""
        ascending = sorted(steps)
        kept = set(ascending[-self.newest :]) | {step for step in ascending if step == self.best}
        kept |= set([step for step in ascending if self.decay_start is not None and step <= self.decay_start][-1:])
        kept |= set([step for step in ascending if step <= self.healthy_until][-1:])
        if self.distance:
            kept |= set([step for step in ascending if step <= ascending[-1] - self.distance][-1:])
            # And the first of each of the last three spans: as the newest moves on, one of them is always old enough.
            last = ascending[-1] // self.distance
            for span in range(last - SPANS + 1, last + 1):
                kept |= set([step for step in ascending if step // self.distance == span][:1])
        return kept
