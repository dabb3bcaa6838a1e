"""The steps of a training in order, each with the guard's verdict: before its update, or on a GPU one step later.

Deferred (`Trainer.defers`): between the start of a step and its update the host does not wait for the device. Whether an update
may reach the weights is decided there, by the guard's limits on loss and gradient norm (`DeferredStats.skip_flag`). Both are
copied to the host in the background, and read once the passes of the next step are enqueued:

    enqueue the passes of step k; read the numbers of step k - 1, judge and log it; enqueue the update of step k

The limits of step k follow from the losses up to step k - 1, which the host has judged by then: no window lags, and the verdicts
are those of a guard that waits. Where a checkpoint or a validation follows a step, or its update is watched, the host does wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bessemer.guard.policy import Judgement
from bessemer.tokens.loader import Batch
from bessemer.train.rollback import compare_replicas, compares_replicas, respond
from bessemer.train.session import Training, judge_step, limits_of_step, state_after, update_weights
from bessemer.train.state import TrainState
from bessemer.train.trainer import DeferredStats, StepStats


@dataclass(frozen=True)
class CompletedStep:
    """A step after the guard's verdict. before: steps before it; state: after it, or restored by a rollback, where `rate` is
    None. rate: the learning rate of the update, 0 of a skipped one."""

    before: int
    state: TrainState
    batch: Batch
    stats: StepStats
    rate: float | None


@dataclass(frozen=True)
class _PendingStep:
    """A step whose update is enqueued, unless the journal skips it, and whose numbers are not read."""

    batch: Batch
    stats: DeferredStats
    rate: float


def completed_steps(training: Training) -> Iterator[CompletedStep]:
    """Train from the start state to the last step. Each step is passed on before the weights change again. Collective."""
    state, pending = training.start_state, None
    for batch in training.batches():
        number = state.step + (pending is not None) + 1
        if not training.trainer.defers or training.watch.is_due(number):
            assert pending is None, "a step before a watched one is settled"
            done = _step(training, state, batch)
        else:
            stats = training.trainer.enqueue(batch)
            if pending is not None:
                done, pending = _settle(training, state, pending), None
                state = done.state
                yield done
                training.rates.mark()
                if done.rate is None or state.step >= training.horizon.steps:  # rolled back; train.minutes are over
                    continue
            pending = _enqueue_update(training, state, batch, stats)
            if not _settles_at_once(training, number):
                continue
            done, pending = _settle(training, state, pending), None
        state = done.state
        yield done
        training.rates.mark()


def _step(training: Training, state: TrainState, batch: Batch) -> CompletedStep:
    """A step whose update waits for the verdict."""
    stats = training.trainer.forward_backward(batch, state.scale)
    judgement = judge_step(training, state, stats)
    restored, rate = respond(training, state, judgement), 0.0
    if restored is None:
        with training.watch(state.step + 1, batch, judgement.updates):
            if judgement.updates:
                rate = update_weights(training, state.step, stats.grad_norm)
    return _completed(training, state, batch, stats, judgement, restored, rate)


def _enqueue_update(training: Training, state: TrainState, batch: Batch, stats: DeferredStats) -> _PendingStep:
    rate = 0.0
    if not training.journal.skips_step(state.step + 1):
        skip = stats.skip_flag(limits_of_step(training, state))
        rate = update_weights(training, state.step, stats.grad_norm, skip)
    return _PendingStep(batch, stats, rate)


def _settle(training: Training, state: TrainState, pending: _PendingStep) -> CompletedStep:
    """Read the numbers of the step after `state`, whose update is enqueued, and judge it."""
    stats = pending.stats.read(state.scale)
    judgement = judge_step(training, state, stats)
    restored = respond(training, state, judgement)
    rate = pending.rate if judgement.updates else 0.0
    return _completed(training, state, pending.batch, stats, judgement, restored, rate)


def _completed(
    training: Training, state: TrainState, batch: Batch, stats: StepStats, judgement: Judgement,
    restored: TrainState | None, rate: float,
) -> CompletedStep:  # fmt: skip
    """The step after `state`, once its weights are compared with their replicas where that is due. restored: by a rollback."""
    if restored is None:
        after = state_after(training, state, batch, stats, judgement.state)
        training.heartbeat.mark("step", after.step)
        restored = compare_replicas(training, after)
        if restored is None:
            return CompletedStep(state.step, after, batch, stats, rate)
    return CompletedStep(state.step, restored, batch, stats, None)


def _settles_at_once(training: Training, step: int) -> bool:
    """Whether the weights after `step` steps are read. Gradients are freed then, and no other work takes memory."""
    saver = training.saver
    is_saved = saver.is_due(step) or step >= training.horizon.steps
    is_read = is_saved or training.validates(step) or compares_replicas(training, step)
    return is_read or training.watch.is_due(step + 1)
