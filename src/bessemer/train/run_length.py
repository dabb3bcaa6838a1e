"""The number of steps of a run and its batches; with train.minutes and a wsd schedule, the decay follows the clock.

The plan turns train.minutes into steps once, by the step that it times. A wsd schedule can do better, since its stable phase does
not depend on the number of steps: where the measured pace leaves no more than the decay's share of the steps, or the planned
decay would begin, the number of steps is set for the time that is left. It is recorded in the recipe (train.steps,
train.schedule.decay_at) before the next step, so that a resumed run has the same learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from time import perf_counter

from bessemer.common.console import say, step_time
from bessemer.common.extensions import UserCodeError
from bessemer.distributed.mesh import ProcessMesh
from bessemer.guard.goodput import WallClock
from bessemer.recipe import Batches, ResolvedRecipe, dump
from bessemer.recipe.load import comments
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_atomic
from bessemer.tokens.loader import Batch, Loader, prefetch

RESERVE = 0.01  # of the minutes: the last steps are not always as fast as the mean
SLOW_START, FEW_STEPS = 2, 3  # first steps, which are not timed; timed steps at least
CHECKS = 100  # readings of the clock in a run, each a collective


class Horizon:
    """The number of steps, the batches up to there, and the time they take."""

    def __init__(
        self, recipe: ResolvedRecipe, run: RunDirectory, mesh: ProcessMesh, first: int, unique_tokens: int, started: float,
        batches: Batches, clock: WallClock,
    ) -> None:  # fmt: skip
        """first: the step that it resumes from; unique_tokens: of the training text, for train.max_epochs; started: when the
        training began, by perf_counter; batches: over the samples that are read; clock: times validations and saves."""
        train = recipe.train
        self.recipe, self._run, self._mesh, self._clock = recipe, run, mesh, clock
        self.steps, self.sizes = train.steps, batches
        self._started, self._first = started, first
        self._rolled_back_to: int | None = None
        self._mark_step(first)
        self._limit = math.inf
        if train.max_epochs is not None:
            self._limit = batches.steps_for(math.ceil(train.max_epochs * unique_tokens / batches.length))
        capped = (recipe.tokens.max_epochs, *(source.max_epochs for source in recipe.corpus.sources))
        # The order of such a mixture is planned over the whole run: other samples would have been read already.
        is_fixed = bool(recipe.tokens.schedule) or any(limit is not None for limit in capped)
        has_decay_phase = train.schedule.decay_start(train.steps) is not None
        follows_clock = has_decay_phase and train.schedule.decay_at is None and not is_fixed
        self._budget = 60 * (train.minutes or 0.0) if follows_clock else 0.0

    def batches(self, loader: Loader, step: int) -> Iterator[Batch]:
        """The prefetched batches after `step` steps, up to the last step; after a rollback those from there on."""
        while step < self.steps:
            until, sizes = self.steps, self.sizes
            spans = ((sizes.first(n), sizes.sequences(n)) for n in range(step, until))
            try:
                for batch in prefetch(loader, spans):
                    yield batch
                    step += 1
                    if self._rolled_back_to is not None:
                        step, self._rolled_back_to = self._rolled_back_to, None
                        break
                    if self.steps != until:
                        break
            except UserCodeError as error:
                raise error.at_step(step + 1) from error

    def roll_back(self, step: int, batches: Batches) -> None:
        """Continue from an earlier step with other batches; the time of the undone steps counts."""
        self.sizes, self._first, self._rolled_back_to = batches, min(self._first, step), step
        self._mark_step(step)

    def seconds(self) -> dict[str, float]:
        """Seconds since the training began, and those of validations and saves."""
        return {"seconds": perf_counter() - self._started, **self._clock.between_steps()}

    def reviews(self, step: int) -> bool:
        """True where `begin_decay` reads the clock after `step` steps."""
        is_read = step == self.recipe.train.schedule.decay_start(self.steps) or step % max(self.steps // CHECKS, 1) == 0
        return self._budget > 0 and (is_read or step == self._first + SLOW_START)

    def begin_decay(self, step: int) -> bool:
        """Set the number of steps where the decay is due after `step` steps; True when it was, and `recipe` has changed.
        Collective."""
        if step == self._first + SLOW_START:
            self._mark_step(step)
        schedule = self.recipe.train.schedule
        planned = schedule.decay_start(self.steps) if self.reviews(step) else None
        if planned is None or step > planned or step - self._marked_step < FEW_STEPS:
            return False
        steps = self._mesh.broadcast(self._affordable_steps(step) if self._mesh.is_main else 0)
        start = max(schedule.decay_start(steps) or 0, step)
        if step < planned and start > step:
            return False
        self.recipe = self.recipe.changed(train={"steps": steps, "schedule": {"decay_at": start}})
        if self._mesh.is_main:
            self._publish(step)
        self.steps, self._budget = steps, 0.0
        return True

    def _mark_step(self, step: int) -> None:
        self._marked_step, self._mark = step, perf_counter()
        self._between_at_mark = sum(self._clock.between_steps().values())

    def _step_seconds(self, step: int) -> float:
        """Mean of the steps since the last mark, without validations and saves."""
        between = sum(self._clock.between_steps().values()) - self._between_at_mark
        return (perf_counter() - self._mark - between) / (step - self._marked_step)

    def _affordable_steps(self, step: int) -> int:
        """Steps of the whole run that fit into the minutes. Those before it was resumed count with the pace of now."""
        train = self.recipe.train
        pauses = self._clock.mean("validation") or 0.0, self._clock.mean("saving") or 0.0
        intervals = train.validate_every, self.recipe.checkpoint.every
        pace = self._step_seconds(step) + sum(pause / every for pause, every in zip(pauses, intervals, strict=True))
        spent = perf_counter() - self._started + self._first * pace
        spent += sum(pause * (1 + (step % every == 0)) for pause, every in zip(pauses, intervals, strict=True))
        left = (1.0 - RESERVE) * self._budget - spent  # with the pauses after this step and the last one
        return max(int(min(step + left / pace, self._limit)), step + 1)

    def _publish(self, step: int) -> None:
        """Write the recipe into the run directory, and say how the number of steps has changed."""
        train = self.recipe.train
        if self._run.recipe.exists():
            write_atomic(self._run.recipe, dump(self.recipe, comments(self._run.recipe)))
        if train.steps != self.steps:
            say(
                f"  after step {step:,}: {step_time(self._step_seconds(step))} a step, so {self.steps:,} planned steps become "
                f"{train.steps:,} to keep to {train.minutes:g} minutes"
            )
