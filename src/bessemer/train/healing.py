"""What the loop does about alarms: it records them with their documents, skips, rolls back, or stops the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bessemer.checkpoint import SavedCheckpoint
from bessemer.checkpoint.protocol import drop_newer, exchange, whole
from bessemer.errors import BessemerError
from bessemer.guard.detection import Alarm
from bessemer.guard.incidents import ADVICE, record
from bessemer.guard.journal import Journal, Rollback, within
from bessemer.guard.policy import Judgement, Verdict, judge
from bessemer.parallel.replicas import Sums, bit_sums, differences
from bessemer.parallel.tied import owned_parameters
from bessemer.run import published
from bessemer.terminal import warn
from bessemer.tokens import ledger
from bessemer.tokens.loader import Batch
from bessemer.train.learning_rate import rewarm_share
from bessemer.train.metrics import MetricsLog
from bessemer.train.session import Training
from bessemer.train.state import Position, restore
from bessemer.train.step import Gradients

# Batches from an alarm's onset, and samples, whose documents an incident names.
DOCUMENT_STEPS, DOCUMENT_SAMPLES = 4, 256
MIN_SKIPPED = 10  # skipped steps that guard.max_skipped allows even a short run
ROLLBACK_STEPS = 10_000  # within which guard.max_rollbacks are counted
REPEATED_SKIP = 2.5  # a second rollback passes over so many times the batches of the first
ENDING = ("nonfinite", "diverged", "dead", "corruption")  # training on is pointless after these


def judge_step(training: Training, position: Position, gradients: Gradients) -> Judgement:
    """Judge the step. The history is emptied where a data phase begins and where a scheduled re-warm-up ends; while the learning
    rate is on its way up again, steps are judged but not added to the history."""
    sizes, number = training.pace.sizes, position.step
    first, end = position.samples, sizes.after(number + 1)
    begins_phase = any(first <= phase.first < end for phase in training.loader.mixture.phases[1:])
    schedule = training.step.settings.schedule
    is_schedule_rewarm = schedule.is_rewarming(number)
    is_fresh = begins_phase or (schedule.is_rewarming(number - 1) and not is_schedule_rewarm)
    state = position.guard.restarted() if is_fresh else position.guard
    return judge(
        training.guard, state, number + 1, gradients.loss, gradients.grad_norm, training.reference,
        overflow=gradients.overflow, skips=training.journal.skips_step(number + 1),
        exclude_from_history=_rollback_rewarm_factor(training.journal, number) < 1.0,
        loss_may_rise=is_schedule_rewarm, mesh=training.step.mesh,
    )  # fmt: skip


def apply_step(
    training: Training, position: Position, batch: Batch, gradients: Gradients, judgement: Judgement
) -> tuple[Position, float]:
    """Update the weights where the judgement says so. Returns the position after the step, and the learning rate, 0 of a skipped
    update."""
    rate, number = 0.0, position.step
    if judgement.updates:
        last = training.journal.governing(number)
        factor = 1.0 if last is None else last.rate_factor * _rollback_rewarm_factor(training.journal, number)
        rate = training.step.update(number, gradients.grad_norm, factor)
    samples = batch.first + training.pace.sizes.sequences(number)
    counts = position.counts.plus(batch, training.loader)
    return Position(number + 1, samples, judgement.state, gradients.scale, counts), rate


def _rollback_rewarm_factor(journal: Journal, step: int) -> float:
    last = journal.governing(step)
    return 1.0 if last is None else rewarm_share(step, last.to + 1, last.rewarm_steps, last.rewarm_from)


def handle_judgement(training: Training, log: MetricsLog, position: Position, judgement: Judgement) -> Position | None:
    """Act on the judgement of the next step. Returns where the run goes on after a rollback, else None.

    Raises BessemerError where the guard stops the run. Collective.
    """
    step, alarm, guard = position.step + 1, judgement.alarm, training.guard
    if judgement.verdict is Verdict.SKIP:
        training.journal.add_skip(step)
        limit = max(MIN_SKIPPED, int(guard.max_skipped * training.pace.steps))
        if judgement.state.skipped > limit and alarm is not None:
            _stop(training, step, alarm, f"that was update {judgement.state.skipped} to be skipped (limit {limit})")
    if alarm is None:
        return None
    if judgement.verdict is not Verdict.HEAL:
        _report(training, step, alarm, "update skipped" if judgement.verdict is Verdict.SKIP else "recorded")
        return None
    why = f"{judgement.state.skips_in_a_row} such steps in a row" if alarm.kind == "nonfinite" else "it lasts"
    return _roll_back_or_stop(training, log, position, step, alarm, why)


def compare_replicas(training: Training, log: MetricsLog, position: Position) -> Position | None:
    """Where it is due, compare the weights of processes that should hold the same, before they are saved. Returns where the run
    goes on after a rollback, else None. Collective."""
    mesh, step, every = training.step.mesh, position.step, training.guard.compare_replicas_every
    is_kept = training.saver.is_due(step) or training.saver.is_copied(step) or step == training.pace.steps
    if mesh.is_single or not every or not (step % every == 0 or is_kept):
        return None
    by_rank = mesh.gather(bit_sums(owned_parameters(training.step.model)))
    replicas, found = training.replicas, differences(by_rank)
    if not found:
        _name_guilty(training, step, by_rank)
        replicas.equal_at = step
        return None
    first, ranks = found[0], sorted({rank for one in found for rank in one.suspects})
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the ranks {', '.join(map(str, ranks))}"
    cause = f"{which} has other weights than its replicas: {len(found)} tensors, the first {first.name}"
    if len(ranks) > 1:
        replicas.suspected[step] = first
    alarm = Alarm("corruption", replicas.equal_at + 1, cause)
    return _roll_back_or_stop(
        training, log, position, step, alarm, f"they were equal at step {replicas.equal_at}", ranks
    )


def _name_guilty(training: Training, step: int, by_rank: list[Sums]) -> None:
    """The run has come to the step of a difference again: the rank that had other weights then was the wrong one."""
    difference = training.replicas.suspected.pop(step, None)
    if difference is None:
        return
    rank = next(iter(difference.sums))
    guilty = difference.differing_from(by_rank[rank][difference.key])
    if len(guilty) < len(difference.sums):
        names = ", ".join(f"rank {rank}" for rank in guilty)
        alarm = Alarm("corruption", step + 1, f"the repeated steps show that {names} was wrong")
        _report(training, step, alarm, "recorded", rank=guilty[0])


def _roll_back_or_stop(
    training: Training,
    log: MetricsLog,
    position: Position,
    step: int,
    alarm: Alarm,
    why: str,
    ranks: Sequence[int] = (0,),
) -> Position | None:
    """Roll back where that is possible; else stop, or only record what need not stop a run."""
    guard = training.guard
    if guard.roll_back:
        if within(training.journal.rollbacks, position.step, ROLLBACK_STEPS) >= guard.max_rollbacks:
            _stop(training, step, alarm, f"{guard.max_rollbacks} rollbacks have not healed it")
        training.saver.finish(position)
        target = _target(training, alarm)
        if target is not None:
            return _roll_back(training, log, step, alarm, target, ranks[0])
        why += ", and there is no checkpoint from before it to roll back to"
    if alarm.kind in ENDING:
        _stop(training, step, alarm, why)
    _report(training, step, alarm, "recorded")
    return None


def _target(training: Training, alarm: Alarm) -> SavedCheckpoint | None:
    """The newest whole checkpoint that is old enough, else the oldest from before the first bad step. Collective."""
    folder, mesh = training.run.checkpoints, training.step.mesh
    distance = 0 if alarm.kind == "corruption" else training.guard.distance(training.pace.steps)
    oldest_wanted = alarm.onset - 1 - distance
    steps: list[int] = [step for step in mesh.broadcast(published(folder)) if 0 < step < alarm.onset]
    by_preference = sorted(steps, key=lambda step: (step > oldest_wanted, abs(step - oldest_wanted)))
    return next(whole(folder, by_preference, warn, "it is no target of a rollback", mesh), None)


def _roll_back(
    training: Training, log: MetricsLog, step: int, alarm: Alarm, target: SavedCheckpoint, rank: int
) -> Position:
    """Note the rollback in the journal, and carry it out. step: the one with the alarm (1-based)."""
    journal, pace, mesh = training.journal, training.pace, training.step.mesh
    rollback, batches = _planned_rollback(training, step, alarm, target)

    def act(by_rank: list[None]) -> list[None]:
        journal.add_rollback(rollback)
        drop_newer(training.run.checkpoints, rollback.to)
        return by_rank

    exchange(mesh, lambda: None, act)
    if not mesh.is_main:
        journal.add_rollback(rollback)
    action = "the same steps again"
    if alarm.kind != "corruption":
        rate = f"learning rate x {rollback.rate_factor:g}, re-warmed over {rollback.rewarm_steps} steps"
        action = f"{batches} batches passed over; {rate}"
    action = f"rolled back to step {rollback.to}; {action}"
    _report(training, step, alarm, action, rank=rank, rollback=rollback.number)
    training.clock.rolled_back(step - 1, rollback.to)
    with training.pulse.during("start"), training.clock.counting("recovery"):
        restored = restore(training.step, target, training.store)
    pace.roll_back(rollback.to, pace.sizes.without([rollback.omitted]).going_on(rollback.to, restored.samples))
    log.roll_back(rollback.number, rollback.to)
    log.write(
        "rolled_back", rollback.to, number=rollback.number, at=rollback.at, what=alarm.kind, onset=alarm.onset,
        batches=batches, rate_factor=rollback.rate_factor,
    )  # fmt: skip
    state = replace(restored.guard, num_rollbacks=journal.num_rollbacks, healthy_until=max(alarm.onset - 1, 1))
    return replace(restored, guard=state)


def _planned_rollback(training: Training, step: int, alarm: Alarm, target: SavedCheckpoint) -> tuple[Rollback, int]:
    """The rollback to a checkpoint, and the number of batches that are passed over. After silent corruption the same steps are
    repeated: no batch is passed over and no rate changed."""
    guard, journal, pace = training.guard, training.journal, training.pace
    changes, before = alarm.kind != "corruption", within(training.journal.rollbacks, step - 1, ROLLBACK_STEPS)
    num_skipped = round(guard.batches_to_skip(pace.steps) * (REPEATED_SKIP if before else 1.0)) if changes else 0
    start = max(alarm.onset - 1 - num_skipped // 2, target.step)
    end = start + num_skipped
    if alarm.kind != "drift":  # which has no sharp beginning
        end = max(end, step)
    first = pace.sizes.first(start)
    rollback = Rollback(
        number=journal.num_rollbacks + 1,
        at=step,
        to=target.step,
        what=alarm.kind,
        onset=alarm.onset,
        omitted=(first, pace.sizes.after(end) if num_skipped else first),
        rate_factor=guard.rate_factors[min(before, len(guard.rate_factors) - 1)] if changes else 1.0,
        rewarm_from=guard.rewarm_from if changes else 1.0,
        rewarm_steps=guard.steps_to_rewarm(pace.steps) if changes else 0,
    )
    return rollback, end - start if num_skipped else 0


def _report(training: Training, step: int, alarm: Alarm, action: str, **more: Any) -> list[dict[str, Any]]:
    """Record an alarm, and tell the person. Returns the samples of its first batches, with their documents."""
    sizes, path = training.pace.sizes, training.run.incidents
    samples: list[dict[str, Any]] = []
    has_documents = alarm.kind != "corruption"
    for number in range(alarm.onset - 1, min(alarm.onset - 1 + DOCUMENT_STEPS, step) if has_documents else 0):
        count = min(sizes.sequences(number), DOCUMENT_SAMPLES - len(samples))
        samples += training.loader.documents(sizes.first(number), count)
    if training.step.mesh.is_main:
        known = ledger.known(training.run.corpus, _document_names(samples))
        places = {name: f"{row['path']} {row['place']}".strip() for name, row in known.items()}
        record(
            path, step=step, what=alarm.kind, cause=alarm.cause, action=action, onset=alarm.onset,
            advice=ADVICE[alarm.kind], documents=samples, places=places, **more,
        )  # fmt: skip
    if action != "run stopped":
        warn(f"step {step}: {alarm.kind}: {alarm.cause}; {action} (see {path.name})")
    return samples


def _document_names(samples: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for sample in samples for name in sample["documents"]))


def _stop(training: Training, step: int, alarm: Alarm, why: str) -> None:
    samples = _report(training, step, alarm, "run stopped")
    training.clock.note(step - 1)
    names = _document_names(samples)
    see = f" See {training.run.incidents}."
    if names:
        held = f"held {len(names)} documents ({', '.join(names[:3])}, ...), all in {training.run.incidents}."
        see = f" The batches from step {alarm.onset} on {held}"
    raise BessemerError(f"step {step}: {alarm.cause}; {why}, so the run stops.{see} {ADVICE[alarm.kind]}")
