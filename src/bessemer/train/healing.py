"""What the loop does about alarms: it records them with their documents, skips, rolls back, or stops the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bessemer.checkpoint import SavedCheckpoint, verify
from bessemer.checkpoint.protocol import checkpoint_folder, drop_newer, exchange, published
from bessemer.errors import BessemerError
from bessemer.guard.detection import Alarm
from bessemer.guard.incidents import ADVICE, record
from bessemer.guard.journal import Journal, Rollback, within
from bessemer.guard.policy import Judgement, Verdict, judge
from bessemer.terminal import warn
from bessemer.train.metrics import Log
from bessemer.train.schedule import rewarm_share
from bessemer.train.state import Position, restore
from bessemer.train.step import Gradients
from bessemer.train.training import Training

# Batches from an alarm's onset, and samples, whose documents an incident names.
DOCUMENT_STEPS, DOCUMENT_SAMPLES = 4, 256
MIN_SKIPPED = 10  # skipped steps that guard.max_skipped allows even a short run
ROLLBACK_STEPS = 10_000  # within which guard.max_rollbacks are counted
REPEATED_SKIP = 2.5  # a second rollback passes over so many times the batches of the first
ENDING = ("nonfinite", "diverged", "dead")  # training on is pointless after these


def judged(training: Training, position: Position, gradients: Gradients) -> Judgement:
    """Judge the step, by a fresh history where the loss may rise for a good reason."""
    sizes, number = training.pace.sizes, position.step
    first, end = position.samples, sizes.after(number + 1)
    begins_phase = any(first <= phase.first < end for phase in training.loader.mixture.phases[1:])
    is_rewarming = training.step.settings.schedule.is_rewarming(number) or _rewarming(training.journal, number) < 1.0
    state = position.guard.restarted() if begins_phase or is_rewarming else position.guard
    return judge(
        training.guard, state, number + 1, gradients.loss, gradients.grad_norm, training.scale,
        overflow=gradients.overflow, skips=training.journal.skips_step(number + 1), mesh=training.step.mesh,
    )  # fmt: skip


def rate_factor(journal: Journal, step: int) -> float:
    """Factor on the learning rate of update `step` (0-based) after rollbacks."""
    governing = journal.governing(step)
    return 1.0 if governing is None else governing.rate_factor * _rewarming(journal, step)


def _rewarming(journal: Journal, step: int) -> float:
    last = journal.governing(step)
    return 1.0 if last is None else rewarm_share(step, last.to + 1, last.rewarm_steps, last.rewarm_from)


def answer(training: Training, log: Log, position: Position, judgement: Judgement) -> Position | None:
    """Act on the judgement of the next step. Returns where the run goes on after a rollback, else None.

    Raises BessemerError where the guard stops the run. Collective.
    """
    step, alarm, guard = position.step + 1, judgement.alarm, training.guard
    if judgement.verdict is Verdict.SKIP:
        training.journal.add_skip(step)
        limit = max(MIN_SKIPPED, int(guard.max_skipped * training.pace.steps))
        if judgement.state.skipped > limit and alarm is not None:
            _stop(training, position, alarm, f"that was update {judgement.state.skipped} to be skipped (limit {limit})")
    if alarm is None:
        return None
    if judgement.verdict is not Verdict.HEAL:
        _report(training, position, alarm, "update skipped" if judgement.verdict is Verdict.SKIP else "recorded")
        return None
    why_not = f"{judgement.state.skips_in_a_row} such steps in a row" if alarm.kind == "nonfinite" else "it lasts"
    if guard.roll_back:
        if within(training.journal.rollbacks, position.step, ROLLBACK_STEPS) >= guard.max_rollbacks:
            _stop(training, position, alarm, f"{guard.max_rollbacks} rollbacks have not healed it")
        training.saver.finish(position)
        target = _target(training, alarm)
        if target is not None:
            return _rolled_back(training, log, position, alarm, target)
        why_not += ", and there is no checkpoint from before it to roll back to"
    if alarm.kind in ENDING:
        _stop(training, position, alarm, why_not)
    _report(training, position, alarm, "recorded")
    return None


def _target(training: Training, alarm: Alarm) -> SavedCheckpoint | None:
    """The newest whole checkpoint that is old enough, else the oldest from before the first bad step. Collective."""
    folder, mesh = training.run.checkpoints, training.step.mesh
    oldest_wanted = alarm.onset - 1 - training.guard.distance(training.pace.steps)
    steps: list[int] = [step for step in mesh.broadcast(published(folder)) if 0 < step < alarm.onset]
    for step in [step for step in reversed(steps) if step <= oldest_wanted] + [s for s in steps if s > oldest_wanted]:
        try:
            return verify(checkpoint_folder(folder, step), mesh)
        except BessemerError as error:
            warn(f"{error}; it is no target of a rollback")
    return None


def _rolled_back(training: Training, log: Log, position: Position, alarm: Alarm, target: SavedCheckpoint) -> Position:
    """Note the rollback in the journal, and carry it out."""
    guard, journal, pace, run = training.guard, training.journal, training.pace, training.run
    before = within(journal.rollbacks, position.step, ROLLBACK_STEPS)
    num_skipped = round(guard.batches_to_skip(pace.steps) * (REPEATED_SKIP if before else 1.0))
    start = max(alarm.onset - 1 - num_skipped // 2, target.step)
    end = start + num_skipped
    if alarm.kind != "drift":  # which has no sharp beginning
        end = max(end, position.step + 1)
    first = pace.sizes.first(start)
    rollback = Rollback(
        number=journal.branch + 1,
        at=position.step + 1,
        to=target.step,
        what=alarm.kind,
        onset=alarm.onset,
        omitted=(first, pace.sizes.after(end) if num_skipped else first),
        rate_factor=guard.rate_factors[min(before, len(guard.rate_factors) - 1)],
        rewarm_from=guard.rewarm_from,
        rewarm_steps=guard.steps_to_rewarm(pace.steps),
    )

    def act(by_rank: list[None]) -> list[None]:
        journal.add_rollback(rollback)
        drop_newer(run.checkpoints, rollback.to)
        return by_rank

    exchange(training.step.mesh, lambda: None, act)
    if not training.step.mesh.is_main:
        journal.add_rollback(rollback)
    batches = end - start if num_skipped else 0
    action = (
        f"rolled back to step {rollback.to}; {batches} batches passed over; learning rate x {rollback.rate_factor:g}, "
        f"re-warmed over {rollback.rewarm_steps} steps"
    )
    _report(training, position, alarm, action, rollback=rollback.number)
    with training.pulse.during("start"):
        restored = restore(training.step, target, training.store)
    pace.roll_back(rollback.to, pace.sizes.without([rollback.omitted]).going_on(rollback.to, restored.samples))
    log.roll_back(rollback.number, rollback.to)
    log.write(
        "rolled_back", rollback.to, number=rollback.number, at=rollback.at, what=alarm.kind, onset=alarm.onset,
        batches=batches, rate_factor=rollback.rate_factor,
    )  # fmt: skip
    state = replace(restored.guard, branch=journal.branch, healthy_until=max(alarm.onset - 1, 1))
    return replace(restored, guard=state)


def _report(training: Training, position: Position, alarm: Alarm, action: str, **more: Any) -> list[dict[str, Any]]:
    """Record an alarm, and tell the person. Returns the samples of its first batches, with their documents."""
    step, sizes, path = position.step + 1, training.pace.sizes, training.run.incidents
    samples: list[dict[str, Any]] = []
    for number in range(alarm.onset - 1, min(alarm.onset - 1 + DOCUMENT_STEPS, step)):
        count = min(sizes.sequences(number), DOCUMENT_SAMPLES - len(samples))
        samples += training.loader.documents(sizes.first(number), count)
    if training.step.mesh.is_main:
        record(
            path, step=step, what=alarm.kind, cause=alarm.cause, action=action, onset=alarm.onset,
            advice=ADVICE[alarm.kind], documents=samples, **more,
        )  # fmt: skip
    if action != "run stopped":
        warn(f"step {step}: {alarm.kind}: {alarm.cause}; {action} (see {path.name})")
    return samples


def _stop(training: Training, position: Position, alarm: Alarm, why: str) -> None:
    samples = _report(training, position, alarm, "run stopped")
    names = list(dict.fromkeys(name for sample in samples for name in sample["documents"]))
    raise BessemerError(
        f"step {position.step + 1}: {alarm.cause}; {why}, so the run stops. The batches from step {alarm.onset} on held "
        f"{len(names)} documents ({', '.join(names[:3])}, ...), all in {training.run.incidents}. {ADVICE[alarm.kind]}"
    )
