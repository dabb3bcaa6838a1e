"""[guard]: what happens after a bad step, or when the run diverges."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from bessemer.recipe.section import Positive, Section

# Steps that a rollback goes back before the first bad one: a share of the run's, within bounds.
SHORTEST, LONGEST, SHARE = 8, 100, 0.05


SHORTEST_HANG = 5


class Guard(Section):
    """What happens after a bad step, or when the run diverges."""

    skip_spikes: bool = True
    skips_in_a_row: Positive = 3
    max_skipped: float = Field(0.01, gt=0, le=1)
    roll_back: bool = True
    rollback_distance: int | None = Field(None, gt=0)
    skip_batches: int | None = Field(None, ge=0)
    rate_factors: tuple[float, ...] = Field((1.0, 0.9, 0.67), strict=False)
    rewarm_from: float = Field(0.1, ge=0, le=1)
    rewarm_steps: int | None = Field(None, ge=0)
    max_rollbacks: Positive = 3

    compare_replicas_every: int = Field(100, ge=0)
    stragglers_every: int = Field(50, ge=0)
    hang_seconds: float | None = Field(None, ge=0)

    def distance(self, steps: int) -> int:
        """rollback_distance, for a run of so many steps."""
        return self.rollback_distance or min(LONGEST, max(SHORTEST, int(SHARE * steps)))

    def batches_to_skip(self, steps: int) -> int:
        """skip_batches of a first rollback, for a run of so many steps."""
        return 2 * self.distance(steps) if self.skip_batches is None else self.skip_batches

    def steps_to_rewarm(self, steps: int) -> int:
        """rewarm_steps, for a run of so many steps."""
        return self.distance(steps) if self.rewarm_steps is None else self.rewarm_steps

    def _complaints(self) -> Iterator[str]:
        if not self.rate_factors or not all(0 < factor <= 1 for factor in self.rate_factors):
            yield f"rate_factors = {list(self.rate_factors)}: one or more numbers above 0 and up to 1"
        if self.hang_seconds and self.hang_seconds < SHORTEST_HANG:
            yield (
                f"hang_seconds = {self.hang_seconds:g}: {SHORTEST_HANG} or more, since a process gives a sign of life "
                "once a second; 0 turns it off"
            )
        for key in ("rollback_distance", "skip_batches", "rewarm_steps"):
            if not self.roll_back and getattr(self, key) is not None:
                yield f"{key} has no effect with roll_back = false; leave one of them out"
