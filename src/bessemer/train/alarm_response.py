"""The guard's responses to an alarm in the training loop: record it with its documents, skip the update, roll back, stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bessemer.checkpoint import SavedCheckpoint
from bessemer.checkpoint.protocol import drop_newer, iterate_verified
from bessemer.checkpoint.retention import rollback_distance
from bessemer.common.console import counted, say, warn
from bessemer.common.errors import BessemerError
from bessemer.distributed.mesh import on_rank_zero
from bessemer.distributed.sharded_tensors import Sums, bit_sums, differences
from bessemer.distributed.tied_embedding import compared_parameters
from bessemer.guard.detection import Alarm
from bessemer.guard.goodput import BY_GUARD
from bessemer.guard.incidents import CORRUPTION, INCIDENT_KINDS, NONFINITE, RECORDED, STOPPED, record
from bessemer.guard.journal import Rollback
from bessemer.guard.policy import Judgement, Verdict
from bessemer.run.directory import checkpoint_steps
from bessemer.run.files import read_steps
from bessemer.tokens import trace
from bessemer.train.setup import Training
from bessemer.train.state import TrainState, restore

# The limits on the batches from the onset of an alarm, and on their samples, whose documents an incident names.
DOCUMENT_STEPS, DOCUMENT_SAMPLES = 4, 256
MIN_SKIPPED = 10  # skipped steps that guard.max_skipped allows even a short run
ROLLBACK_STEPS = 10_000  # the last steps, in which at most guard.max_rollbacks are allowed


def respond(training: Training, state: TrainState, judgement: Judgement) -> TrainState | None:
    """Carry out the guard's judgement of the step after `state`: record a skipped update or an alarm, or roll the run back.

    Returns the state of the restored checkpoint after a rollback, else None. Raises BessemerError if the guard stops the run.
    All ranks must call it.
    """
    step, alarm = state.step + 1, judgement.alarm
    if judgement.verdict is Verdict.SKIP:
        training.journal.add_skip(step)
        limit = max(MIN_SKIPPED, int(training.recipe.guard.max_skipped * training.steps))
        if judgement.state.skipped > limit and alarm is not None:
            raise _stopped(training, step, alarm, f"it was skipped update {judgement.state.skipped} (limit {limit})")
    if alarm is None:
        return None
    if judgement.verdict is not Verdict.ROLL_BACK:
        _report(training, step, alarm, "update skipped" if judgement.verdict is Verdict.SKIP else RECORDED)
        return None
    why = f"{judgement.state.nonfinite_in_a_row} in a row" if alarm.kind is NONFINITE else "it persists"
    return _roll_back_or_stop(training, state, step, alarm, why)


def record_missing_rollbacks(training: Training) -> None:
    """Append to incidents.jsonl each rollback that journal.jsonl records and incidents.jsonl lacks.

    Such a rollback exists if the process was killed between the two writes, or if the journal was copied from another run.
    """
    journal, incidents = training.journal, training.run.incidents
    if not training.trainer.mesh.is_main:
        return
    if journal.rollbacks and not training.start_state.step:
        say(f"  repeating the {counted(journal.num_rollbacks, 'rollback')} and the skips of journal.jsonl")
    recorded = {row.get("rollback") for row in read_steps(incidents)}
    for one in journal.rollbacks:
        if one.number not in recorded:
            kind, action = INCIDENT_KINDS[one.what], f"rolled back to step {one.to}"
            cause = "recorded only in journal.jsonl"
            record(incidents, kind, step=one.at, cause=cause, action=action, onset=one.onset, rollback=one.number)


def compares_replicas(training: Training, step: int) -> bool:
    """Return True if the weights of data-parallel replicas are compared after `step` steps.

    This is the case every `guard.compare_replicas_every` steps (0 for never) and before each save.
    """
    every = training.recipe.guard.compare_replicas_every
    is_saved = training.saver.is_due(step) or step == training.steps
    is_saved |= training.recipe.checkpoint.keep_best and training.validates(step)
    return not training.trainer.mesh.is_single and every > 0 and (step % every == 0 or is_saved)


def compare_replicas(training: Training, state: TrainState) -> TrainState | None:
    """Compare the weights of data-parallel replicas if `compares_replicas`, and roll the run back if they differ.

    Returns the restored state after a rollback, else None. Raises BessemerError if the run stops. All ranks must call it.
    """
    mesh, step = training.trainer.mesh, state.step
    if not compares_replicas(training, step):
        return None
    sums_by_rank = mesh.gather(bit_sums(compared_parameters(training.trainer.model)))
    replicas, differing = training.replicas, differences(sums_by_rank)
    if not differing:
        _report_corrupt_rank(training, step, sums_by_rank)
        replicas.equal_at = step
        return None
    ranks = sorted({rank for tensor in differing for rank in tensor.suspects})
    if len(ranks) > 1:
        replicas.suspected[step] = differing[0]
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the ranks {', '.join(map(str, ranks))}"
    cause = f"{which} differs from its replicas in {counted(len(differing), 'tensor')}, first {differing[0].name}"
    alarm, why = Alarm(CORRUPTION, replicas.equal_at + 1, cause), f"they were equal at step {replicas.equal_at}"
    return _roll_back_or_stop(training, state, step, alarm, why, ranks)


def _report_corrupt_rank(training: Training, step: int, sums_by_rank: list[Sums]) -> None:
    """Record which ranks computed wrong weights for `step` before a rollback, now that repeating the steps shows it.

    `sums_by_rank` has the bit sums of each rank's repeated weights, which are equal and taken to be right. Does nothing if the
    replicas were also equal before.
    """
    difference = training.replicas.suspected.pop(step, None)
    if difference is None:
        return
    rank = next(iter(difference.sums))
    corrupt = difference.differing_from(sums_by_rank[rank][difference.key])
    if len(corrupt) < len(difference.sums):
        names = ", ".join(f"rank {rank}" for rank in corrupt)
        alarm = Alarm(CORRUPTION, step + 1, f"repeating the steps shows that {names} computed wrong weights")
        _report(training, step, alarm, RECORDED, rank=corrupt[0])


def _roll_back_or_stop(
    training: Training, state: TrainState, step: int, alarm: Alarm, why: str, ranks: Sequence[int] = (0,),
) -> TrainState:  # fmt: skip
    """Roll back after an alarm at `step` (1-based), and return the restored state. All ranks must call it.

    Raises BessemerError if no checkpoint is older than the alarm's onset, or `guard.max_rollbacks` is reached. `why` completes
    its message: the reason why the run cannot continue. The rollback's incident names the first of `ranks`.
    """
    training.saver.finish(state)
    checkpoint, limit = _checkpoint_before(training, alarm), training.recipe.guard.max_rollbacks
    if training.journal.num_rollbacks_within(step - 1, ROLLBACK_STEPS) < limit:
        if checkpoint is not None:
            return _roll_back(training, step, alarm, checkpoint, ranks[0])
        why += ", and there is no earlier checkpoint to roll back to"
    elif limit:
        why = f"it persists after {counted(limit, 'rollback')}"
    hint = ""
    if checkpoint is not None and not alarm.kind.is_hardware_fault:
        hint = f"{alarm.kind.advice} Start a new run from before it with --set train.start={training.run.path} "
        hint += f"--set train.start_step={checkpoint.step}"
    raise _stopped(training, step, alarm, why, hint)


def _begin(training: Training, rollback: Rollback) -> None:
    """Add a rollback to the journal of every rank (the file is on rank 0), and remove the checkpoints that it undoes."""

    def begin() -> None:
        training.journal.add_rollback(rollback)
        drop_newer(training.run.checkpoints, rollback.to)

    on_rank_zero(training.trainer.mesh, begin)
    if not training.trainer.mesh.is_main:
        training.journal.add_rollback(rollback)


def _checkpoint_before(training: Training, alarm: Alarm) -> SavedCheckpoint | None:
    """Return the newest verified checkpoint at least `rollback_distance` steps before the first bad step, else the oldest one.

    All ranks must call it.
    """
    folder, mesh = training.run.checkpoints, training.trainer.mesh
    distance = 0 if alarm.kind.is_hardware_fault else rollback_distance(training.recipe.guard, training.steps)
    newest_wanted = alarm.onset - 1 - distance
    steps: list[int] = [step for step in mesh.broadcast(checkpoint_steps(folder)) if 0 < step < alarm.onset]
    by_preference = sorted(steps, key=lambda step: (step > newest_wanted, abs(step - newest_wanted)))
    return next(iterate_verified(folder, by_preference, warn, "trying another checkpoint", mesh), None)


def _roll_back(training: Training, step: int, alarm: Alarm, checkpoint: SavedCheckpoint, rank: int) -> TrainState:
    """Roll back to `checkpoint` and return the restored state; the journal and incidents.jsonl record it first.

    `step` (1-based) raised the alarm, and `rank` is the rank that the incident names.
    """
    journal, stream = training.journal, training.stream
    rollback, skipped = _plan_rollback(training, step, alarm, checkpoint)
    _begin(training, rollback)
    action = f"rolled back to step {rollback.to}; "
    if alarm.kind.is_hardware_fault:
        action += "repeating the same steps"
    else:
        which = f" of steps {skipped[0] + 1:,} to {skipped[-1] + 1:,}" if skipped else ""
        action += f"skipped batches: {len(skipped):,}{which}; "
        action += f"learning rate re-warmed over {counted(rollback.rewarm_steps, 'step')}"
    _report(training, step, alarm, action, rank=rank, rollback=rollback.number)
    with training.heartbeat.during("start"), training.clock.counting("recovery"):
        restored = restore(training.trainer, checkpoint, training.store)
    stream.roll_back(rollback.to, stream.sizes.without([rollback.omitted]).with_position(rollback.to, restored.samples))
    training.clock.add_rollback(rollback.completed, rollback.to)
    training.log.roll_back(rollback.number, rollback.to)
    if training.trainer.mesh.is_main:
        training.trends.rewind(read_steps(training.run.metrics))
    training.log.write("rolled_back", rollback.to, number=rollback.number)
    guard = replace(restored.guard, num_rollbacks=journal.num_rollbacks, healthy_until=max(alarm.onset - 1, 1))
    return replace(restored, guard=guard)


def _plan_rollback(training: Training, step: int, alarm: Alarm, checkpoint: SavedCheckpoint) -> tuple[Rollback, range]:
    """Return a rollback from `step` (1-based) to `checkpoint`, and the steps (0-based) whose batches are never read again.

    The skipped steps surround the first bad one and reach at least to `step`. After a hardware fault no step is skipped and
    there is no re-warm-up, so the run repeats the same batches at the same learning rates.
    """
    guard, sizes, num_skipped, rewarm_steps = training.recipe.guard, training.stream.sizes, 0, 0
    if not alarm.kind.is_hardware_fault:
        rewarm_steps = rollback_distance(guard, training.steps)
        num_skipped = 2 * rewarm_steps if guard.skip_batches is None else guard.skip_batches
    start = max(alarm.onset - 1 - num_skipped // 2, checkpoint.step)
    skipped = range(start, max(start + num_skipped, step) if num_skipped else start)
    omitted = sizes.first(start), sizes.after(skipped.stop) if skipped else sizes.first(start)
    number = training.journal.num_rollbacks + 1
    kind, onset = alarm.kind.name, alarm.onset
    return Rollback(number, step, checkpoint.step, kind, onset, omitted, rewarm_steps), skipped


def _report(training: Training, step: int, alarm: Alarm, action: str, **more: Any) -> list[dict[str, Any]]:
    """Record an alarm in incidents.jsonl with the documents of the batches from its onset, and print a warning.

    Returns the `_first_samples`; none for a hardware fault. `action` says what was done, and `more` has more values to record.
    """
    samples = [] if alarm.kind.is_hardware_fault else _first_samples(training, step, alarm)
    if training.trainer.mesh.is_main:
        known = trace.describe_documents(training.run.corpus, _document_names(samples))
        locations = {name: trace.describe_place(row) for name, row in known.items()}
        figures: dict[str, Any] = {} if alarm.loss is None else {"loss": alarm.loss, "grad_norm": alarm.grad_norm}
        record(
            training.run.incidents, alarm.kind, step=step, cause=alarm.cause, action=action, onset=alarm.onset,
            documents=samples, places=locations, **figures, **more,
        )  # fmt: skip
    if not action.endswith(STOPPED):
        warn(f"step {step}: {alarm.kind.name}: {alarm.cause}; {action} (see {training.run.incidents.name})")
    return samples


def _first_samples(training: Training, step: int, alarm: Alarm) -> list[dict[str, Any]]:
    """Return the samples of the first batches from the alarm's onset to `step`, each a dict with the names of its `documents`."""
    sizes, samples = training.stream.sizes, list[dict[str, Any]]()
    for number in range(alarm.onset - 1, min(alarm.onset - 1 + DOCUMENT_STEPS, step)):
        count = min(sizes.sequences(number), DOCUMENT_SAMPLES - len(samples))
        samples += training.loader.documents(sizes.first(number), count)
    return samples


def _document_names(samples: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for sample in samples for name in sample["documents"]))


def _stopped(training: Training, step: int, alarm: Alarm, why: str, hint: str = "") -> BessemerError:
    """Record that an alarm stops the run, and return the error to raise. It gives the reason `why` and the advice `hint`."""
    samples = _report(training, step, alarm, STOPPED)
    training.clock.write(alarm.kind.completed_steps(step), BY_GUARD)
    names = _document_names(samples)
    see = f"See {training.run.incidents}"
    see += f" for the documents of the batches from step {alarm.onset} on, such as {names[0]}." if names else "."
    return BessemerError(f"step {step}: {alarm.cause}; {why}, so the run stops. {see} {hint or alarm.kind.advice}")
