"""One step with the guard between its gradients and its update: the verdict, and the update unless that skips it."""

from __future__ import annotations

from bessemer.guard.journal import Journal
from bessemer.guard.policy import Judgement, judge
from bessemer.tokens.loader import Batch
from bessemer.train.learning_rate import rewarm_share
from bessemer.train.session import Training
from bessemer.train.state import TrainState
from bessemer.train.trainer import StepStats


def judge_step(training: Training, state: TrainState, stats: StepStats) -> Judgement:
    """Judge the step after `state`. The history is cleared at the start of a data phase and after a scheduled re-warm-up;
    during a re-warm-up after a rollback, steps are judged but not added to the history. Collective."""
    sizes, schedule = training.pace.sizes, training.trainer.settings.schedule
    first, end = state.samples, sizes.after(state.step + 1)
    begins_phase = any(first <= phase.first < end for phase in training.loader.mixture.phases[1:])
    is_rewarming = schedule.is_rewarming(state.step)
    guard = state.guard
    if begins_phase or (schedule.is_rewarming(state.step - 1) and not is_rewarming):
        guard = guard.restarted(keeps_level=not begins_phase)
    return judge(
        training.recipe.guard, guard, state.step + 1, stats.loss, stats.grad_norm, training.reference,
        overflow=stats.overflow, was_skipped=training.journal.skips_step(state.step + 1),
        exclude_from_history=_rewarm_factor(training.journal, state.step) < 1.0, loss_may_rise=is_rewarming,
        mesh=training.trainer.mesh,
    )  # fmt: skip


def apply_step(
    training: Training, state: TrainState, batch: Batch, stats: StepStats, judgement: Judgement
) -> tuple[TrainState, float]:
    """Update the weights, unless the judgement skips the update. Returns the state after the step and the learning rate, 0 of a
    skipped update."""
    rate, step = 0.0, state.step
    if judgement.updates:
        last = training.journal.governing(step)
        factor = 1.0 if last is None else last.rate_factor * _rewarm_factor(training.journal, step)
        rate = training.trainer.update(step, stats.grad_norm, factor)
    samples = batch.first + training.pace.sizes.sequences(step)
    counts = state.counts.plus(batch, training.loader.mixture)
    return TrainState(step + 1, samples, judgement.state, stats.scale, counts), rate


def _rewarm_factor(journal: Journal, step: int) -> float:
    last = journal.governing(step)
    return 1.0 if last is None else rewarm_share(step, last.to + 1, last.rewarm_steps, last.rewarm_from)
