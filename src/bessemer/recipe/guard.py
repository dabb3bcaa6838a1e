"""[guard]: what happens when a step or the run is sick."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from bessemer.recipe.section import Positive, Section

# Steps that a rollback goes back before the first bad one: a share of the run's, within bounds.
SHORTEST, LONGEST, SHARE = 8, 100, 0.05


class Guard(Section):
    """What happens when a step or the run is sick."""

    skip_spikes: bool = True
    """Skip the update of a step whose loss and gradient norm are both far above those of the last 128; off: record it."""
    skips_in_a_row: Positive = Field(3, description="So many steps in a row that are not finite are a lasting alarm.")
    max_skipped: float = Field(0.01, gt=0, le=1)
    """Share of the run's steps whose update may be skipped, at least 10 of them; one more stops the run."""
    roll_back: bool = True
    """After an alarm that lasts, go back to a checkpoint from before it, pass over the data around it and re-warm the
    learning rate; off: record a shift or a drift, and stop at the other kinds."""
    rollback_distance: int | None = Field(None, gt=0)
    """Steps from the checkpoint that is gone back to, to the first bad step, at the least, where there is such a
    checkpoint; left out: a twentieth of the run, 8 to 100."""
    skip_batches: int | None = Field(None, ge=0)
    """Batches around the first bad step that are passed over after a rollback, and 2.5 times as many after a second one; 0:
    none; left out: twice rollback_distance."""
    rate_factors: tuple[float, ...] = Field((1.0, 0.9, 0.67), strict=False)
    """The learning rate after the first, second, third rollback, as a factor; further ones have the last."""
    rewarm_from: float = Field(0.1, ge=0, le=1)
    """Share of the learning rate with which a rollback starts; it rises to the whole over rewarm_steps."""
    rewarm_steps: int | None = Field(None, ge=0)
    """Steps of the warm-up after a rollback; left out: rollback_distance."""
    max_rollbacks: Positive = Field(3, description="Rollbacks within 10,000 steps; one more stops the run.")

    compare_replicas_every: int = Field(100, ge=0)
    """Steps between comparisons of the weights of processes that should hold the same; also before each checkpoint; 0:
    never."""
    hang_seconds: float | None = Field(None, ge=0)
    """Seconds without progress after which a step hangs: on several processes the one that the others wait for is ended and
    the group starts again; left out: five times what the slow ones of the last steps took, at least 60; 0: never."""

    def distance(self, steps: int) -> int:
        """rollback_distance, for a run of so many steps."""
        return self.rollback_distance or min(LONGEST, max(SHORTEST, int(SHARE * steps)))

    def batches_to_skip(self, steps: int) -> int:
        """skip_batches of a first rollback, for a run of so many steps."""
        return 2 * self.distance(steps) if self.skip_batches is None else self.skip_batches

    def steps_to_rewarm(self, steps: int) -> int:
        """rewarm_steps, for a run of so many steps."""
        return self.distance(steps) if self.rewarm_steps is None else self.rewarm_steps

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not self.rate_factors or not all(0 < factor <= 1 for factor in self.rate_factors):
            raise ValueError(f"rate_factors = {list(self.rate_factors)}: one or more numbers above 0 and up to 1")
        for key in ("rollback_distance", "skip_batches", "rewarm_steps"):
            if not self.roll_back and getattr(self, key) is not None:
                raise ValueError(f"{key} has no effect with roll_back = false; leave one of them out")
        return self
