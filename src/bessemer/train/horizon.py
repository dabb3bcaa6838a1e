"""The number of steps of a run with train.minutes, which follows its measured step time.

It is decided again when 8% of the time has passed, and reviewed each time that half of the rest is done: it changes where the
step time has changed by more than REVIEW_CHANGE; at once, where the rest would take too long. With a wsd schedule the stable
phase and the decay are reviewed separately, and the number is decided again where the stable phase ends, or when the time for it
has passed. The decay keeps its share of the time; one that has begun keeps its first step.

The minutes are those of the whole training: validations and checkpoints are timed apart from steps and included in the forecast.
Each decision is recorded in the recipe (train.revised) before the next step, and the next one is due relative to it: a run that
is killed and resumed uses the same learning rates and samples as one that is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from time import perf_counter

from bessemer.defaults.derived_keys import FORWARD_SHARE, SAVING_SHARE
from bessemer.guard.goodput import WallClock
from bessemer.parallel.mesh import ProcessMesh
from bessemer.recipe import Batches, Recipe, dump
from bessemer.recipe.train import Revision
from bessemer.run import RunFolder, write_atomic
from bessemer.terminal import log, say, step_time
from bessemer.tokens.loader import Batch, Loader, prefetched

EARLY, LATE = 0.08, 0.2  # shares of the minutes: first decision; when few timed steps are enough for it
REVIEW_CHANGE = 0.05  # smallest change of the remaining steps that a review makes
RESERVE = 0.01  # of the minutes: the last steps are not always as fast as the mean
LATE_CHANGE = 0.15  # of the remaining time: delay that triggers a review at once
SHOWN_CHANGE = 0.1  # of the number of steps last shown: a larger change is shown
SHOWN_SECONDS = 30.0  # between two such lines, since the rate of a busy machine varies
MIN_STEPS, FEW_STEPS, SLOW_START = 24, 3, 2  # timed steps of the first decision; at least; first steps, not timed
CLOCK_EVERY = 8  # steps between readings of the clock, which need a collective


class Horizon:
    """Decides the number of steps and times what happens between them."""

    def __init__(
        self, recipe: Recipe, run: RunFolder, mesh: ProcessMesh, first: int, unique_tokens: int, scored_tokens: int,
        started: float, batches: Batches, clock: WallClock,
    ) -> None:  # fmt: skip
        """first: the step that it resumes from; unique_tokens: of the training text, for train.max_epochs; scored_tokens: of a
        validation; started: when the training began, by perf_counter; batches: over the samples that are read; clock:
        times validations and saves."""
        assert recipe.train.steps is not None, "the recipe is resolved"
        self.recipe, self._run, self._mesh, self._clock = recipe, run, mesh, clock
        self.steps, self.sizes = recipe.train.steps, batches
        self._shown_steps, self._shown_at = self.steps, -math.inf  # the number of steps last shown, and when
        self._first = self._marked_step = first
        self._scored_tokens, self._started, self._mark = scored_tokens, started, perf_counter()
        self._between_at_mark = 0.0
        self._rolled_back_to: int | None = None
        self._limit = math.inf
        if recipe.train.max_epochs is not None:
            samples = math.ceil(recipe.train.max_epochs * unique_tokens / self.sizes.length)
            self._limit = self.sizes.steps_for(samples)
        capped = (recipe.tokens.max_epochs, *(source.max_epochs for source in recipe.corpus.sources))
        # The order of such a mixture is planned over the whole run: other samples would have been read already.
        is_fixed = bool(recipe.tokens.schedule) or any(limit is not None for limit in capped)
        self._budget = 0.0 if is_fixed else 60 * (recipe.train.minutes or 0.0)

    def batches(self, loader: Loader, step: int) -> Iterator[Batch]:
        """The prefetched batches after `step` steps, up to the last step; after a rollback those from there on."""
        while step < self.steps:
            until, sizes = self.steps, self.sizes
            for batch in prefetched(loader, ((sizes.first(n), sizes.sequences(n)) for n in range(step, until))):
                yield batch
                step += 1
                if self._rolled_back_to is not None:
                    step, self._rolled_back_to = self._rolled_back_to, None
                    break
                if self.steps != until:
                    break

    def roll_back(self, step: int, batches: Batches) -> None:
        """Go on from an earlier step with other batches; the time of the undone steps counts."""
        self.sizes, self._first, self._rolled_back_to = batches, min(self._first, step), step
        self._mark_step(step)

    def seconds(self) -> dict[str, float]:
        """Seconds since the training began, and those of validations and saves."""
        return {"seconds": perf_counter() - self._started, **self._clock.between_steps()}

    def revise(self, step: int) -> bool:
        """After `step` steps, decide the number of steps again if that is due; True when it was, and `recipe` has changed.
        Collective."""
        num_timed = step - self._marked_step
        if step == self._first + SLOW_START and num_timed == SLOW_START:
            self._mark_step(step)
            return False
        if not num_timed or not self._may_decide(step):
            return False
        if not self._mesh.any(self._mesh.is_main and self._is_due(step, num_timed)):
            return False
        elapsed = perf_counter() - self._started
        measured = self._step_seconds(num_timed), elapsed, self._clock.mean("validation"), self._clock.mean("saving")
        seconds, spent, validation, saving = (
            None if None in values else max(values) for values in zip(*self._mesh.gather(measured), strict=True)
        )
        assert seconds is not None and spent is not None
        steps = step + self._affordable_steps(step, seconds, spent, validation, saving)
        steps = max(int(min(steps, self._limit)), step + 1)
        is_review = bool(self.recipe.train.revised) and self._is_review_due(step)
        if is_review and abs(steps - self.steps) <= REVIEW_CHANGE * (self.steps - step):
            steps = self.steps
        self._decide(step, steps, is_review)
        if self._mesh.is_main:
            self._publish(step, seconds)
        self._mark_step(step)
        return True

    def _mark_step(self, step: int) -> None:
        self._marked_step, self._mark = step, perf_counter()
        self._between_at_mark = sum(self._clock.between_steps().values())

    def _step_seconds(self, num_timed: int) -> float:
        """Mean of the steps since the last mark, without validations and saves."""
        between = sum(self._clock.between_steps().values()) - self._between_at_mark
        return (perf_counter() - self._mark - between) / num_timed

    def _affordable_steps(
        self, step: int, seconds: float, spent: float, validation: float | None, saving: float | None
    ) -> int:
        """Steps that fit into the rest of the time, at `seconds` each. spent: since the training began; validation, saving:
        seconds of one, None before the first."""
        train, budget = self.recipe.train, (1.0 - RESERVE) * self._budget
        if validation is None:
            validation = FORWARD_SHARE * seconds * self._scored_tokens / (train.global_batch_tokens or 1)
        if saving is None:
            saving, budget = 0.0, budget * (1.0 - SAVING_SHARE)
        intervals = train.validate_every or self.steps, self.recipe.checkpoint.every or self.steps
        step_cost = seconds + validation / intervals[0] + saving / intervals[1]
        spent += self._first * step_cost  # by the run before it was resumed
        for cost, interval in zip((validation, saving), intervals, strict=True):
            spent += cost * (1 + (step % interval == 0))  # after the last step, and after this one
        return int((budget - spent) / step_cost)

    def _may_decide(self, step: int) -> bool:
        """Whether a decision can be due, as far as all processes know without the clock."""
        train = self.recipe.train
        if not self._budget or step >= self.steps - 1:
            return False
        if not train.revised:
            return True
        if step <= train.revised[-1].at:
            return False
        reads_clock = step % CLOCK_EVERY == 0 and self._can_review(step)
        return self._is_review_due(step) or self._ends_stable_phase(step) or reads_clock

    def _is_due(self, step: int, num_timed: int) -> bool:
        elapsed = perf_counter() - self._started
        if not self.recipe.train.revised:
            # At half of the planned steps they were fast, and the run would soon be over.
            is_late = elapsed >= LATE * self._budget or 2 * step >= self.steps
            return (num_timed >= FEW_STEPS and is_late) or (num_timed >= MIN_STEPS and elapsed >= EARLY * self._budget)
        seconds = self._step_seconds(num_timed)
        left = self._budget - elapsed - self._first * seconds  # estimated for the run before it was resumed
        decay_share = self.recipe.train.schedule.decay_share
        is_decay_time = self._is_stable and left <= decay_share * self._budget
        is_too_slow = self._can_review(step) and (self.steps - step) * seconds > (1.0 + LATE_CHANGE) * left
        return is_decay_time or self._ends_stable_phase(step) or is_too_slow or self._is_review_due(step)

    def _is_review_due(self, step: int) -> bool:
        """Half-way from the last decision to the end of the phase, or soon after the run was resumed."""
        last = self.recipe.train.revised[-1].at
        return self._can_review(step) and step >= last + (self._phase_end - last) // 2

    def _can_review(self, step: int) -> bool:
        """Whether enough steps were timed, and enough were left after the last decision."""
        end, last = self._phase_end, self.recipe.train.revised[-1].at
        return (end - last) // 2 >= FEW_STEPS and step < end and step - self._marked_step >= FEW_STEPS

    def _ends_stable_phase(self, step: int) -> bool:
        return self._is_stable and step == self.recipe.train.schedule.decay_start(self.steps)

    @property
    def _is_stable(self) -> bool:
        """Whether a wsd schedule has not begun its decay."""
        schedule = self.recipe.train.schedule
        return schedule.kind == "wsd" and schedule.decay_at is None

    @property
    def _phase_end(self) -> int:
        return self.recipe.train.schedule.decay_start(self.steps) if self._is_stable else self.steps

    def _decide(self, step: int, steps: int, is_review: bool) -> None:
        """Set the number of steps in the recipe, and begin the decay where its start has been reached."""
        train, schedule = self.recipe.train, self.recipe.train.schedule
        revised = (*train.revised, Revision(at=step, planned=self.steps))
        changes: dict[str, object] = {"steps": steps, "revised": revised}
        # A decision at the end of the stable phase begins the decay also where its start is now only a little later.
        ends_phase = not is_review and (bool(train.revised) or step == schedule.decay_start(self.steps))
        tolerance = REVIEW_CHANGE * steps if ends_phase else 0.0
        if self._is_stable and schedule.decay_start(steps) <= step + tolerance:
            changes["schedule"] = schedule.model_copy(update={"decay_at": step})
        self.recipe = self.recipe.model_copy(update={"train": train.model_copy(update=changes)})
        self.steps = steps

    def _publish(self, step: int, seconds: float) -> None:
        """Write the recipe into the run folder; show a large change, and log any."""
        if self._run.recipe.exists():
            lines = self._run.recipe.read_text(encoding="utf-8").splitlines()
            comments = [line.removeprefix("# ") for line in lines if line.startswith("#")]
            write_atomic(self._run.recipe, dump(self.recipe, comments))
        if self.steps == self.recipe.train.revised[-1].planned:
            return
        line = (
            f"after step {step:,}: {step_time(seconds)} a step, so {{before:,}} planned steps become {self.steps:,} to keep to "
            f"{self.recipe.train.minutes:g} minutes"
        )
        is_new = abs(self.steps - self._shown_steps) > SHOWN_CHANGE * self._shown_steps
        if is_new and perf_counter() - self._shown_at > SHOWN_SECONDS:
            say(f"  {line.format(before=self._shown_steps)}")
            self._shown_steps, self._shown_at = self.steps, perf_counter()
        else:
            log(line.format(before=self.recipe.train.revised[-1].planned))
