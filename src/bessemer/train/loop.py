"""The training loop. train/session.py builds its parts; here they work together."""

from __future__ import annotations

from time import perf_counter

from bessemer.errors import Stopped
from bessemer.guard.policy import GuardState, Verdict
from bessemer.run import write_json
from bessemer.terminal import progress
from bessemer.tokens.loader import Batch
from bessemer.train.audit import mixture_audit
from bessemer.train.device import memory_in_use, release_unused
from bessemer.train.healing import compare_replicas, handle_judgement, judge_step, rate_factor
from bessemer.train.metrics import Log
from bessemer.train.state import Position, weights_digest
from bessemer.train.step import Gradients
from bessemer.train.stop import StopSignal
from bessemer.train.training import Training, TrainSummary
from bessemer.train.validation import Validation, validate
from bessemer.train.watch import Watch


def train(training: Training) -> TrainSummary:
    """Train from the start position to the last step, on every process of the mesh.

    Raises Stopped after a stop signal to any process, with everything saved, and BessemerError where the guard stops the run.
    """
    step, pace, position = training.step, training.pace, training.position
    scores = None
    total, done = pace.sizes.tokens_before(pace.steps), pace.sizes.tokens_before(position.step)
    with (
        training.saver,
        StopSignal(step.mesh) as stop,
        training.log() as log,
        progress("training", total, "tok", done) as advance,
    ):
        watch = Watch(step, log, step.settings.watch_every)
        if position.step:
            log.write("resumed", position.step)
        if training.scores_first:
            scores = _validate(training, log, position)
        healed: Position | None = position
        while healed is not None:  # again after each rollback
            position, healed = healed, None
            for batch in training.observe(training.rates.timed(pace.batches(training.loader, position.step))):
                gradients = step.gradients(batch, position.scale)
                judgement = judge_step(training, position, gradients)
                healed = handle_judgement(training, log, position, judgement)
                if healed is not None:
                    break
                rate = 0.0
                # HEAL comes here where nothing could heal it and it need not end the run; then all numbers are finite.
                if judgement.verdict in (Verdict.APPLY, Verdict.HEAL):
                    with watch(position.step + 1, batch):
                        factor = rate_factor(training.journal, position.step)
                        rate = step.update(position.step, gradients.grad_norm, factor)
                position = advanced(training, position, batch, gradients, judgement.state)
                training.pulse.mark("step", position.step)
                healed = compare_replicas(training, log, position)
                if healed is not None:
                    break
                scores = _revise_log_validate(training, log, position, gradients, rate) or scores
                is_last, stopped_by = position.step == pace.steps, stop.asked()
                if training.saver.is_due(position.step) and not is_last and stopped_by is None:
                    with training.timing("saving"):
                        training.saver.save(position)
                training.clock.stepped(position.step, training.rates.data_wait)
                note = f"loss {gradients.loss:.3f}" + (f"  {scores.short}" if scores else "")
                advance(pace.sizes.tokens(position.step - 1), note, pace.sizes.tokens_before(pace.steps))
                if stopped_by and not is_last:
                    with training.timing("saving"):
                        training.saver.save_now(position)
                    training.clock.note(position.step)
                    raise Stopped(
                        f"stopped by {stopped_by} after step {position.step} of {pace.steps}; everything is saved in "
                        f"{training.run.path}: the same command goes on from there"
                    )
        training.pulse.mark("end", position.step)
        return _finish(training, log, position, scores)


def _revise_log_validate(
    training: Training, log: Log, position: Position, gradients: Gradients, rate: float
) -> Validation | None:
    """Revise the number of steps, log and validate, each where it is due. Returns the scores of a validation."""
    pace, scores = training.pace, None
    if pace.revise(position.step):
        training.step.settings = pace.recipe.train
        training.saver.follow(pace.recipe)
        log.write("steps", position.step, steps=pace.steps)
    settings, is_last = training.step.settings, position.step == pace.steps
    if position.step % settings.log_every == 0 or is_last:
        log.write("train", position.step, **_numbers(training, gradients, rate, position))
    if position.step % (settings.validate_every or pace.steps) == 0 or is_last:
        scores = _validate(training, log, position)
    return scores


def advanced(training: Training, position: Position, batch: Batch, gradients: Gradients, guard: GuardState) -> Position:
    samples = batch.first + training.pace.sizes.sequences(position.step)
    counts = position.counts.plus(batch, training.loader)
    return Position(position.step + 1, samples, guard, gradients.scale, counts)


def _numbers(training: Training, gradients: Gradients, rate: float, position: Position) -> dict[str, object]:
    """The values of a "train" line."""
    device, sizes = training.step.device, training.pace.sizes
    sums = zip(training.store.sources, gradients.nats, gradients.targets, strict=True)
    numbers: dict[str, object] = {
        "tokens": sizes.tokens_before(position.step),
        "loss": gradients.loss,
        "loss_by_source": {name: nats / count for name, nats, count in sums if count},
    }
    if gradients.accuracy is not None:
        numbers["accuracy"] = gradients.accuracy
    numbers |= {"grad_norm": gradients.grad_norm, "learning_rate": rate}
    numbers |= training.rates.now(sizes.tokens(position.step - 1))
    numbers |= {"memory_bytes": memory_in_use(device), **training.rates.communicated(device.compile)}
    if device.arithmetic.scaled:
        numbers |= {"loss_scale": gradients.scale.value, "scale_skips": gradients.scale.skipped}
    return numbers


def _validate(training: Training, log: Log, position: Position) -> Validation:
    started, step = perf_counter(), training.step
    with training.timing("validation"):
        release_unused(step.device)  # its tensors do not fit into the heap's holes that a step left
        with step.averaged():
            scores = validate(step, training.held_out)
        release_unused(step.device)
        log.write(
            "validation",
            position.step,
            tokens=training.pace.sizes.tokens_before(position.step),
            loss=scores.loss,
            loss_by_source=scores.loss_by_source,
            **scores.scores(),
            seconds=perf_counter() - started,
        )
    return scores


def _finish(training: Training, log: Log, position: Position, scores: Validation | None) -> TrainSummary:
    """Save the last checkpoint, log times and memory, and write the audit of the mixture."""
    step, mesh, resumed_at = training.step, training.step.mesh, training.position.step
    if position.step > resumed_at or not training.has_checkpoint:
        with training.timing("saving"):
            training.saver.save_now(position)
        log.write("time", position.step, resumed_at=resumed_at, **training.pace.seconds())
        training.clock.note(position.step)
    memory = mesh.gather(memory_in_use(step.device))
    if position.step > resumed_at:
        by_rank = {str(rank): taken for rank, taken in enumerate(memory)}
        planned = training.planned_memory
        log.write(
            "memory", position.step, planned=planned, measured=max(memory), recomputed=step.recomputed, by_rank=by_rank
        )
    counts = position.counts.summed(mesh)
    if mesh.is_main:
        audit = mixture_audit(
            training.loader.mixture, counts, position.samples, training.pace.sizes.gaps(position.step)
        )
        write_json(training.run.path / "mixture.json", audit)
    return TrainSummary(
        step=position.step,
        resumed_at=resumed_at,
        bits_per_byte=scores.bits_per_byte if scores else None,
        accuracy=scores.accuracy if scores else None,
        skipped=position.guard.skipped,
        seconds=perf_counter() - training.started,
        weights=weights_digest(step),
        rescaled=position.scale.skipped,
        peak_memory=max(memory),
        recomputed=step.recomputed,
    )
