"""The number of steps of a run that is given minutes follows its own measured rate.

Before the run a step is timed once, perhaps beside other work, or without it. So the number of steps is decided once more
early on, when 8% of the time is over, and with a wsd schedule a last time where its stable phase ends: the rate there does not
depend on how many steps follow. Each decision is recorded in the recipe (train.revised) before the next step, and never taken
again: with it, a run that is killed and resumed reads the same learning rates and samples as one that is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from time import perf_counter

from bessemer.parallel.team import Team
from bessemer.plan.sizing import STEPS_SHARE
from bessemer.recipe import Batches, Recipe, dump
from bessemer.recipe.optimization import Revision
from bessemer.run import RunFolder, write_atomic
from bessemer.terminal import say
from bessemer.tokens.loader import Batch, Reader, prefetched

EARLY, LATE = 0.08, 0.2  # shares of that time: the first decision, and that after which few steps are enough for it
MIN_STEPS, FEW_STEPS, SLOW_START = 24, 3, 2  # steps timed before it; at the least; steps at the start that tell nothing


class Pace:
    """How many steps a run has, and when that is decided once more."""

    def __init__(self, recipe: Recipe, run: RunFolder, team: Team, first: int, unique_tokens: int) -> None:
        """first: the step it goes on from; unique_tokens: to train on, for train.max_epochs."""
        assert recipe.train.steps is not None, "the recipe is resolved"
        self.recipe, self._run, self._team = recipe, run, team
        self.steps, self._sizes = recipe.train.steps, Batches.of(recipe)
        self._first = self._counted_from = first
        self._mark = self._started = perf_counter()
        self._limit = 0
        if recipe.train.max_epochs is not None:
            samples = math.ceil(recipe.train.max_epochs * unique_tokens / self._sizes.length)
            self._limit = self._sizes.steps_for(samples)
        capped = (recipe.tokens.max_epochs, *(source.max_epochs for source in recipe.corpus.sources))
        # The order of such a mixture is planned over the whole run: other samples would have been read until now.
        self._is_fixed = bool(recipe.tokens.schedule) or any(limit is not None for limit in capped)
        self._seconds = 60 * (recipe.train.minutes or 0.0) * STEPS_SHARE

    def batches(self, loader: Reader, samples: int) -> Iterator[Batch]:
        """The batches from where the run stands to its last step, prefetched; samples: consumed before."""
        step = self._first
        while step < self.steps:
            until = self.steps
            for batch in prefetched(loader, samples, map(self._sizes.sequences, range(step, until))):
                yield batch
                samples, step = samples + self._sizes.sequences(step), step + 1
                if self.steps != until:
                    break

    def revise(self, step: int) -> bool:
        """After `step` steps: decide how many there are in all, if that is due. Every process calls it; True where the number
        was decided, and the recipe is another one."""
        timed = step - self._counted_from
        if step == self._first + SLOW_START and timed == SLOW_START:
            self._counted_from, self._mark = step, perf_counter()
            return False
        if (
            not timed
            or not self._may_decide(step)
            or not self._team.any(self._team.is_first and self._is_due(step, timed))
        ):
            return False
        now = perf_counter()
        seconds = max(self._team.gather((now - self._mark) / timed))
        spent = max(self._team.gather(now - self._started)) + self._first * seconds
        steps = step + max(int((self._seconds - spent) / seconds), 1)
        steps = min(steps, self._limit) if self._limit else steps
        self._decided(step, max(steps, step + 1), seconds)
        self._counted_from, self._mark = step, now
        return True

    def _may_decide(self, step: int) -> bool:
        if not self._seconds or self._is_fixed or step >= self.steps - 1:
            return False
        train, taken = self.recipe.train, len(self.recipe.train.revised)
        if taken == 0:
            return True
        return taken == 1 and train.schedule.kind == "wsd" and step == train.schedule.decay_start(self.steps)

    def _is_due(self, step: int, timed: int) -> bool:
        if self.recipe.train.revised:
            return True
        elapsed = perf_counter() - self._started
        few = elapsed >= LATE * self._seconds and timed >= FEW_STEPS
        return few or (elapsed >= EARLY * self._seconds and timed >= MIN_STEPS)

    def _decided(self, step: int, steps: int, seconds: float) -> None:
        train, planned = self.recipe.train, self.steps
        revised = (*train.revised, Revision(at=step, planned=planned))
        self.recipe = self.recipe.model_copy(
            update={"train": train.model_copy(update={"steps": steps, "revised": revised})}
        )
        self.steps = steps
        if not self._team.is_first:
            return
        if self._run.recipe.exists():
            kept = self._run.recipe.read_text(encoding="utf-8").splitlines()
            comments = [line.removeprefix("# ") for line in kept if line.startswith("#")]
            write_atomic(self._run.recipe, dump(self.recipe, comments))
        if steps != planned:
            say(
                f"  after step {step:,}: {1000 * seconds:.3g} ms a step, so {planned:,} planned steps become {steps:,} to keep "
                f"to {train.minutes:g} minutes"
            )
