"""The number of steps of a run that is given minutes follows its own measured rate.

Before the run a step is timed once, perhaps beside other work, or without it. So the number of steps is decided once more
early on, when 8% of the time is over, and reviewed each time that half of what is then left is done: it changes where the pace
has changed by more than REVIEW_CHANGE; at once, where the rest would take too long. With a wsd schedule the stable phase and the
decay are reviewed each by itself, and the number is decided again where the stable phase ends, or where the time for it is over:
the rate there does not depend on how many steps follow, and the decay keeps its share of the time. A decay begins where it began.

The minutes are those of the whole training: validations and checkpoints, which are timed apart from the steps, are counted in
what is left. Each decision and review is recorded in the recipe (train.revised) before the next step, and where the next one is
due follows from the last: a run that is killed and resumed reads the same learning rates and samples as one that is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from bessemer.layout.dial import FORWARD_SHARE, SAVING_SHARE
from bessemer.parallel.team import Team
from bessemer.recipe import Batches, Recipe, dump
from bessemer.recipe.optimization import Revision
from bessemer.run import RunFolder, write_atomic
from bessemer.terminal import say
from bessemer.tokens.loader import Batch, Reader, prefetched

EARLY, LATE = 0.08, 0.2  # shares of that time: the first decision, and that after which few steps are enough for it
REVIEW_CHANGE = 0.05  # of the steps that are left: a review that finds less leaves them as they are
RESERVE = 0.01  # of the minutes: the last steps are not always as fast as the mean
LATE_CHANGE = 0.15  # of the time that is left: what the rest would take longer, for a review at once
SHOWN_CHANGE = 0.1  # of the steps that were last shown
MIN_STEPS, FEW_STEPS, SLOW_START = 24, 3, 2  # steps timed before it; at the least; steps at the start that tell nothing
CLOCK_EVERY = 8  # steps between two readings of the clock, as all processes have to agree


@dataclass
class Timed:
    """Work between steps: how often it was done, and its seconds in all."""

    count: int = 0
    seconds: float = 0.0

    @property
    def each(self) -> float | None:
        """Mean seconds; None before the first."""
        return self.seconds / self.count if self.count else None


class Pace:
    """How many steps a run has, and when that is decided once more; what of its time goes into validations and checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        team: Team,
        first: int,
        unique_tokens: int,
        scored_tokens: int,
        started: float,
    ) -> None:
        """first: the step it goes on from; unique_tokens: to train on, for train.max_epochs; scored_tokens: of a validation;
        started: when the training began, by perf_counter."""
        assert recipe.train.steps is not None, "the recipe is resolved"
        self.recipe, self._run, self._team = recipe, run, team
        self.steps, self._sizes = recipe.train.steps, Batches.of(recipe)
        self._shown_steps = self.steps
        self._first = self._counted_from = first
        self._scored, self._started, self._mark = scored_tokens, started, perf_counter()
        self.between = {"validation": Timed(), "saving": Timed()}
        self._between_at_mark = 0.0
        self._limit = 0
        if recipe.train.max_epochs is not None:
            samples = math.ceil(recipe.train.max_epochs * unique_tokens / self._sizes.length)
            self._limit = self._sizes.steps_for(samples)
        capped = (recipe.tokens.max_epochs, *(source.max_epochs for source in recipe.corpus.sources))
        # The order of such a mixture is planned over the whole run: other samples would have been read until now.
        self._is_fixed = bool(recipe.tokens.schedule) or any(limit is not None for limit in capped)
        self._seconds = 60 * (recipe.train.minutes or 0.0)

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

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Around a validation or the saving of a checkpoint."""
        began = perf_counter()
        yield
        timed = self.between[what]
        timed.count, timed.seconds = timed.count + 1, timed.seconds + perf_counter() - began

    def taken(self) -> dict[str, float]:
        """Seconds since the training began, and those of them between the steps."""
        parts = {what: timed.seconds for what, timed in self.between.items()}
        return {"seconds": perf_counter() - self._started, **parts}

    def _step_seconds(self, timed: int) -> float:
        """Mean of the steps since the last decision, so many, without what came between them."""
        apart = sum(one.seconds for one in self.between.values()) - self._between_at_mark
        return (perf_counter() - self._mark - apart) / timed

    def _mark_here(self, step: int) -> None:
        self._counted_from, self._mark = step, perf_counter()
        self._between_at_mark = sum(timed.seconds for timed in self.between.values())

    def revise(self, step: int) -> bool:
        """After `step` steps: decide how many there are in all, if that is due. Every process calls it; True where the number
        was decided, and the recipe is another one."""
        timed = step - self._counted_from
        if step == self._first + SLOW_START and timed == SLOW_START:
            self._mark_here(step)
            return False
        if (
            not timed
            or not self._may_decide(step)
            or not self._team.any(self._team.is_first and self._is_due(step, timed))
        ):
            return False
        elapsed = perf_counter() - self._started
        mine = self._step_seconds(timed), elapsed, *(one.each for one in self.between.values())
        seconds, spent, validation, saving = (
            None if None in values else max(values) for values in zip(*self._team.gather(mine), strict=True)
        )
        assert seconds is not None and spent is not None
        steps = step + self._steps_left(step, seconds, spent, validation, saving)
        steps = max(min(steps, self._limit) if self._limit else steps, step + 1)
        is_review = bool(self.recipe.train.revised) and self._reviews_at(step)
        if is_review and abs(steps - self.steps) <= REVIEW_CHANGE * (self.steps - step):
            steps = self.steps
        self._decide(step, steps, seconds, is_review)
        self._mark_here(step)
        return True

    def _steps_left(
        self, step: int, seconds: float, spent: float, validation: float | None, saving: float | None
    ) -> int:
        """Steps that the rest of the time allows, at `seconds` each. spent: since the training began; validation, saving: seconds
        of one, None before the first."""
        train, budget = self.recipe.train, (1.0 - RESERVE) * self._seconds
        if validation is None:
            validation = FORWARD_SHARE * seconds * self._scored / (train.global_batch_tokens or 1)
        if saving is None:
            saving, budget = 0.0, budget * (1.0 - SAVING_SHARE)
        intervals = train.validate_every or self.steps, self.recipe.checkpoint.every or self.steps
        whole_step = seconds + validation / intervals[0] + saving / intervals[1]
        # What a resumed run took before; what this step, which is not over, and the last one bring.
        spent += self._first * whole_step
        for each, interval in zip((validation, saving), intervals, strict=True):
            spent += each * (1 + (step % interval == 0))
        return int((budget - spent) / whole_step)

    def _may_decide(self, step: int) -> bool:
        """Whether a decision can be due: what all processes know without the clock."""
        train, schedule = self.recipe.train, self.recipe.train.schedule
        if not self._seconds or self._is_fixed or step >= self.steps - 1:
            return False
        if not train.revised:
            return True
        if step <= train.revised[-1].at:
            return False
        ends_stable = self._is_stable and step == schedule.decay_start(self.steps)
        return self._reviews_at(step) or ends_stable or (step % CLOCK_EVERY == 0 and self._can_review(step))

    def _is_due(self, step: int, timed: int) -> bool:
        elapsed, schedule = perf_counter() - self._started, self.recipe.train.schedule
        if self.recipe.train.revised:
            each = self._step_seconds(timed)
            left = self._seconds - elapsed - self._first * each  # what a resumed run took before is about that
            ends_stable = self._is_stable and (
                left <= schedule.decay_share * self._seconds or step == schedule.decay_start(self.steps)
            )
            is_late = self._can_review(step) and (self.steps - step) * each > (1.0 + LATE_CHANGE) * left
            return ends_stable or is_late or self._reviews_at(step)
        # Where half of the planned steps are done, they were fast, and the run would soon be over.
        few = timed >= FEW_STEPS and (elapsed >= LATE * self._seconds or 2 * step >= self.steps)
        return few or (elapsed >= EARLY * self._seconds and timed >= MIN_STEPS)

    def _reviews_at(self, step: int) -> bool:
        """Whether a review is due: half-way from the last decision to the end of the phase, or soon after where the run was
        resumed just before."""
        last = self.recipe.train.revised[-1].at
        return self._can_review(step) and step >= last + (self._phase_end - last) // 2

    def _can_review(self, step: int) -> bool:
        """Whether enough steps were timed for a review, and were left after the last one to be worth it."""
        end, last = self._phase_end, self.recipe.train.revised[-1].at
        return (end - last) // 2 >= FEW_STEPS and step < end and step - self._counted_from >= FEW_STEPS

    @property
    def _is_stable(self) -> bool:
        """Whether a wsd schedule has not begun its decay."""
        schedule = self.recipe.train.schedule
        return schedule.kind == "wsd" and schedule.decay_at is None

    @property
    def _phase_end(self) -> int:
        return self.recipe.train.schedule.decay_start(self.steps) if self._is_stable else self.steps

    def _decide(self, step: int, steps: int, seconds: float, is_review: bool) -> None:
        train, planned = self.recipe.train, self.steps
        changed: dict[str, object] = {"steps": steps, "revised": (*train.revised, Revision(at=step, planned=planned))}
        schedule = train.schedule
        # Where the stable phase ends; of a run that became much longer it goes on, and its end is a new occasion.
        near = (
            REVIEW_CHANGE * steps if not is_review and (train.revised or step == schedule.decay_start(planned)) else 0.0
        )
        if self._is_stable and schedule.decay_start(steps) <= step + near:
            changed["schedule"] = schedule.model_copy(update={"decay_at": step})
        self.recipe = self.recipe.model_copy(update={"train": train.model_copy(update=changed)})
        self.steps = steps
        if not self._team.is_first:
            return
        if self._run.recipe.exists():
            kept = self._run.recipe.read_text(encoding="utf-8").splitlines()
            comments = [line.removeprefix("# ") for line in kept if line.startswith("#")]
            write_atomic(self._run.recipe, dump(self.recipe, comments))
        if abs(steps - self._shown_steps) > SHOWN_CHANGE * self._shown_steps:
            say(
                f"  after step {step:,}: {1000 * seconds:.3g} ms a step, so {self._shown_steps:,} planned steps become "
                f"{steps:,} to keep to {train.minutes:g} minutes"
            )
            self._shown_steps = steps
