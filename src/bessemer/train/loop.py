"""The training loop. train/session.py builds its parts; here they work together."""

from __future__ import annotations

from time import perf_counter

from bessemer.errors import Stopped
from bessemer.run import write_json
from bessemer.terminal import progress
from bessemer.tokens.loader import Batch
from bessemer.train.audit import mixture_audit
from bessemer.train.device import memory_in_use, release_unused
from bessemer.train.healing import apply_step, compare_replicas, handle_judgement, judge_step
from bessemer.train.metrics import MetricsLog
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
    step, pace, position, scores = training.step, training.pace, training.position, None
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
        for batch in training.batches():
            gradients = step.gradients(batch, position.scale)
            position, rate = _guarded_update(training, watch, log, position, batch, gradients)
            if rate is None:  # rolled back
                continue
            scores = _revise_log_validate(training, log, position, gradients, rate) or scores
            is_last, stopped_by = position.step == pace.steps, stop.asked()
            if training.saver.is_due(position.step) and not is_last and stopped_by is None:
                with training.timing("saving"):
                    training.saver.save(position)
            training.clock.stepped(position.step, training.rates.data_wait)
            note = f"loss {gradients.loss:.3f}" + (f"  {scores.short}" if scores else "")
            advance(pace.sizes.tokens(position.step - 1), note, pace.sizes.tokens_before(pace.steps))
            if stopped_by and not is_last:
                _save_now(training, position)
                raise Stopped(
                    f"stopped by {stopped_by} after step {position.step} of {pace.steps}; everything is saved in "
                    f"{training.run.path}: the same command goes on from there"
                )
        training.pulse.mark("end", position.step)
        return _finish(training, log, position, scores)


def _guarded_update(
    training: Training, watch: Watch, log: MetricsLog, position: Position, batch: Batch, gradients: Gradients
) -> tuple[Position, float | None]:
    """Update the weights, unless the guard skips the step or rolls back. Returns the position after it and the learning rate, 0
    of a skipped update; None after a rollback."""
    judgement = judge_step(training, position, gradients)
    healed = handle_judgement(training, log, position, judgement)
    if healed is None:
        with watch(position.step + 1, batch, judgement.updates):
            position, rate = apply_step(training, position, batch, gradients, judgement)
        training.pulse.mark("step", position.step)
        healed = compare_replicas(training, log, position)
    return (position, rate) if healed is None else (healed, None)


def _revise_log_validate(
    training: Training, log: MetricsLog, position: Position, gradients: Gradients, rate: float
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


def _validate(training: Training, log: MetricsLog, position: Position) -> Validation:
    started, step = perf_counter(), training.step
    with training.timing("validation"):
        release_unused(step.device)  # its tensors do not fit into the heap's holes that a step left
        with step.averaged():
            scores = validate(step, training.held_out)
        release_unused(step.device)
        log.write(
            "validation", position.step, tokens=training.pace.sizes.tokens_before(position.step), loss=scores.loss,
            loss_by_source=scores.loss_by_source, **scores.scores(), seconds=perf_counter() - started,
        )  # fmt: skip
    return scores


def _save_now(training: Training, position: Position) -> None:
    with training.timing("saving"):
        training.saver.save_now(position)
    training.clock.note(position.step)


def _finish(training: Training, log: MetricsLog, position: Position, scores: Validation | None) -> TrainSummary:
    """Save the last checkpoint, log times and memory, and write the audit of the mixture."""
    step, mesh, resumed_at = training.step, training.step.mesh, training.position.step
    if position.step > resumed_at or not training.has_checkpoint:
        _save_now(training, position)
        log.write("time", position.step, resumed_at=resumed_at, **training.pace.seconds())
    memory = mesh.gather(memory_in_use(step.device))
    if position.step > resumed_at:
        log.write(
            "memory", position.step, planned=training.planned_memory, measured=max(memory), recomputed=step.recomputed,
            by_rank={str(rank): taken for rank, taken in enumerate(memory)},
        )  # fmt: skip
    counts, gaps = position.counts.summed(mesh), training.pace.sizes.gaps(position.step)
    if mesh.is_main:
        audit = mixture_audit(training.loader.mixture, counts, position.samples, gaps)
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
