"""A training step: enqueued on the device, and judged when the host reads its numbers, every train.log_every steps.

The device decides if an update may reach the weights, by the guard's current limits on loss and gradient norm
(`DeviceStats.skip_flag`). The host judges the steps at each logged step, and before a checkpoint, a validation or another
reader of the weights. Between these steps it waits neither for the device nor for another host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bessemer.common.extensions import UserCodeError
from bessemer.guard.journal import Journal
from bessemer.guard.policy import GuardState, Judgement, judge
from bessemer.tokens.loader import Batch
from bessemer.train.alarm_response import compare_replicas, compares_replicas, respond
from bessemer.train.mixture_audit import counts_after
from bessemer.train.schedule import rewarm_share
from bessemer.train.setup import Training
from bessemer.train.state import TrainState
from bessemer.train.stop import StopSignal
from bessemer.train.trainer import DeviceStats, StepStats

REWARM_FROM = 0.1  # share of the learning rate at which the re-warm-up after a rollback starts


@dataclass(frozen=True)
class CompletedStep:
    """A step after the guard's verdict.

    Attributes:
        before: The number of steps before it.
        state: The state after it, or the state restored by a rollback.
        batch: Its batch.
        stats: Its statistics.
        rate: The learning rate of the update: 0 for a skipped update, None after a rollback.
        is_newest: True if the current weights are those after this step.
    """

    before: int
    state: TrainState
    batch: Batch
    stats: StepStats
    rate: float | None
    is_newest: bool


@dataclass(frozen=True)
class EnqueuedStep:
    """A step whose update is enqueued on the device, and whose statistics the host has not read yet."""

    batch: Batch
    stats: DeviceStats
    rate: float


def completed_steps(training: Training, stop: StopSignal) -> Iterator[CompletedStep]:
    """Train from the start state to the last step, and yield each judged step. All ranks must call it."""
    state, enqueued = training.start_state, list[EnqueuedStep]()
    scale = scale_of(training, state)
    for batch in training.batches():
        number = state.step + len(enqueued) + 1
        enqueued.append(enqueue(training, state, number, batch, scale))
        scale = enqueued[-1].stats.scale
        training.heartbeat.mark("step", number)
        if not (_is_read(training, number) or stop.acts_at_once):
            continue
        for step in _judged(training, state, enqueued):
            yield step
        state, enqueued = step.state, []
        if step.rate is None:  # rolled back
            scale = scale_of(training, state)
        training.rates.mark()


def scale_of(training: Training, state: TrainState) -> Tensor:
    """Return the loss scale of the step after `state` on the device."""
    return state.scale.to_tensor(training.trainer.device.torch_device)


def enqueue(training: Training, state: TrainState, number: int, batch: Batch, scale: Tensor) -> EnqueuedStep:
    """Enqueue step `number` (1-based): its passes and its update, which the device may skip.

    `state` is the last judged state, and `scale` the loss scale on the device.
    """
    try:
        stats = training.trainer.forward_backward(batch, scale)
    except UserCodeError as error:
        raise error.at_step(number) from error
    limits = _guard_before(training, state, number).history.limits if training.recipe.guard.skip_spikes else None
    skip = stats.skip_flag(limits)
    if training.journal.skips_step(number):
        skip = torch.ones_like(skip)
    with training.watch(number, batch, skip):
        factor = _rewarm_factor(training.journal, number - 1)
        rate = training.trainer.update(number - 1, stats.grad_norm, factor, skip)
    return EnqueuedStep(batch, stats, rate)


def _is_read(training: Training, step: int) -> bool:
    """Return True if the host must read the statistics of the steps up to `step` (number of completed steps) now.

    This is the case before a logged line, a save, a validation and a comparison of replicas.
    """
    is_logged = step % training.trainer.settings.log_every == 0
    return is_logged or training.saver.is_due(step) or training.validates(step) or compares_replicas(training, step)


def _judged(training: Training, state: TrainState, enqueued: Sequence[EnqueuedStep]) -> Iterator[CompletedStep]:
    """Read the statistics of the steps after `state`, and yield each after the guard judged it; a rollback ends the iterator."""
    all_stats = training.trainer.read([step.stats for step in enqueued])
    for step, stats in zip(enqueued, all_stats, strict=True):
        judgement, after = judge_step(training, state, step.batch, stats)
        restored = respond(training, state, judgement) or compare_replicas(training, after)
        rate = None if restored else step.rate if judgement.updates else 0.0
        is_newest = restored is not None or step is enqueued[-1]
        yield CompletedStep(state.step, restored or after, step.batch, stats, rate, is_newest)
        if restored:
            return
        state = after


def judge_step(training: Training, state: TrainState, batch: Batch, stats: StepStats) -> tuple[Judgement, TrainState]:
    """Judge the step after `state`, and return the judgement and the state after the step.

    During a re-warm-up after a rollback, steps are judged but not added to the history.
    """
    number = state.step + 1
    judgement = judge(
        training.recipe.guard, _guard_before(training, state, number), number, stats.loss, stats.grad_norm, training.reference,
        overflow=stats.overflow, was_skipped=training.journal.skips_step(number),
        exclude_from_history=_rewarm_factor(training.journal, state.step) < 1.0,
        renews_limits=number % training.trainer.settings.log_every == 0,
    )  # fmt: skip
    samples = batch.first + training.stream.sizes.sequences(state.step)
    counts = counts_after(state.counts, batch, training.loader.mixture)
    return judgement, TrainState(number, samples, judgement.state, stats.scale, counts)


def _guard_before(training: Training, state: TrainState, number: int) -> GuardState:
    """Return the guard's state in `state`, with a restarted history if a data phase starts after it and by step `number`."""
    first, end = state.samples, training.stream.sizes.after(number)
    begins_phase = any(first <= phase.first < end for phase in training.loader.mixture.phases[1:])
    return state.guard.restarted() if begins_phase else state.guard


def _rewarm_factor(journal: Journal, step: int) -> float:
    last = journal.rollback_before(step)
    return 1.0 if last is None else rewarm_share(step, last.to + 1, last.rewarm_steps, REWARM_FROM)
