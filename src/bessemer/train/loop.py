"""The training loop. train/session.py builds its parts; here they work together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter

from bessemer.errors import BessemerError, Stopped
from bessemer.guard.detection import Alarm, Scale
from bessemer.guard.incidents import ADVICE, record
from bessemer.guard.policy import GuardState, Judgement, Verdict, judge
from bessemer.recipe import Batches, Guard
from bessemer.run import RunFolder, write_json
from bessemer.terminal import progress, warn
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch, Reader
from bessemer.tokens.shards import TokenStore
from bessemer.train.audit import mixture_audit
from bessemer.train.device import memory_in_use, release_unused
from bessemer.train.metrics import Log, MetricsLog, NoLog, Rates
from bessemer.train.pace import Pace
from bessemer.train.state import Position, Saver, weights_digest
from bessemer.train.step import Gradients, TrainStep
from bessemer.train.stop import StopSignal
from bessemer.train.validation import Validation, validate
from bessemer.train.watch import Watch

DOCUMENT_STEPS, DOCUMENT_SAMPLES = (
    4,
    256,
)  # batches from an alarm's onset, and samples, whose documents an incident names


@dataclass(frozen=True)
class TrainSummary:
    """The result of a training. resumed_at: step of the checkpoint, 0 for a fresh start; skipped: by the guard; rescaled: steps
    dropped because fp16's loss scale was too large; peak_memory: bytes; recomputed: blocks."""

    step: int
    resumed_at: int
    bits_per_byte: float | None
    accuracy: float | None
    skipped: int
    seconds: float
    weights: str
    rescaled: int
    peak_memory: int
    recomputed: int


@dataclass(frozen=True)
class Training:
    """The parts of a training on this process, built by `session.set_up`.

    scale: what losses and gradients are compared with; position: where it starts; has_checkpoint: whether it was read from one;
    scores_first: validate before the first step; planned_memory: bytes; started: by perf_counter; observe: wraps the iterator
    of batches, for the profiler.
    """

    run: RunFolder
    store: TokenStore
    step: TrainStep
    loader: Reader
    held_out: list[HeldOut]
    sizes: Batches
    guard: Guard
    scale: Scale
    pace: Pace
    rates: Rates
    saver: Saver
    position: Position
    has_checkpoint: bool
    scores_first: bool
    tensorboard: bool
    planned_memory: int
    started: float
    observe: Callable[[Iterator[Batch]], Iterator[Batch]]

    def log(self) -> AbstractContextManager[Log]:
        """The log of rank 0; other ranks write nothing."""
        if not self.step.mesh.is_main:
            return NoLog()
        return MetricsLog(self.run, self.position.step, self.tensorboard)


def train(training: Training) -> TrainSummary:
    """Train from the start position to the last step, on every process of the mesh.

    Raises Stopped after a stop signal to any process, with everything saved.
    """
    step, pace, sizes, saver, position = training.step, training.pace, training.sizes, training.saver, training.position
    settings, mesh, resumed_at, scores = step.settings, step.mesh, position.step, None
    total, done = sizes.tokens_before(pace.steps), sizes.tokens_before(resumed_at)
    with (
        saver,
        StopSignal(mesh) as stop,
        training.log() as log,
        progress("training", total, "tok", done) as advance,
    ):
        watch = Watch(step, log, settings.watch_every)
        if resumed_at:
            log.write("resumed", resumed_at)
        if training.scores_first:
            scores = _validate(training, log, position)
        for batch in training.observe(training.rates.timed(pace.batches(training.loader, position.samples))):
            gradients = step.gradients(batch, position.scale)
            judged = _judge(training, position, gradients)
            if judged.alarm is not None:
                _report(training, position, judged.alarm, judged)
            rate = 0.0
            if judged.verdict is Verdict.APPLY:
                with watch(position.step + 1, batch):
                    rate = step.update(position.step, gradients.grad_norm)
            position = _advanced(training, position, batch, gradients, judged.state)
            if pace.revise(position.step):
                step.settings = pace.recipe.train
                saver.follow(pace.recipe)
                log.write("steps", position.step, steps=pace.steps)
            is_last = position.step == pace.steps
            if position.step % settings.log_every == 0 or is_last:
                log.write("train", position.step, **_numbers(training, gradients, rate, position))
            if position.step % (settings.validate_every or pace.steps) == 0 or is_last:
                scores = _validate(training, log, position)
            stopped_by = stop.asked()
            if saver.is_due(position.step) and not is_last and stopped_by is None:
                with pace.timing("saving"):
                    saver.save(position)
            note = f"loss {gradients.loss:.3f}" + (f"  {scores.short}" if scores else "")
            advance(sizes.tokens(position.step - 1), note, sizes.tokens_before(pace.steps))
            if stopped_by and not is_last:
                saver.save_now(position)
                raise Stopped(
                    f"stopped by {stopped_by} after step {position.step} of {pace.steps}; everything is saved in "
                    f"{training.run.path}: the same command goes on from there"
                )
        return _finish(training, log, position, scores)


def _advanced(
    training: Training, position: Position, batch: Batch, gradients: Gradients, guard: GuardState
) -> Position:
    samples = position.samples + training.sizes.sequences(position.step)
    counts = position.counts.plus(batch, training.loader)
    return Position(position.step + 1, samples, guard, gradients.scale, counts)


def _numbers(training: Training, gradients: Gradients, rate: float, position: Position) -> dict[str, object]:
    """The values of a "train" line."""
    device, sizes = training.step.device, training.sizes
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
    with training.pace.timing("validation"):
        release_unused(step.device)  # its tensors do not fit into the heap's holes that a step left
        with step.averaged():
            scores = validate(step, training.held_out)
        release_unused(step.device)
        log.write(
            "validation",
            position.step,
            tokens=training.sizes.tokens_before(position.step),
            loss=scores.loss,
            loss_by_source=scores.loss_by_source,
            **scores.scores(),
            seconds=perf_counter() - started,
        )
    return scores


def _judge(training: Training, position: Position, gradients: Gradients) -> Judgement:
    """Judge the step, by a fresh history where the loss may rise for a good reason."""
    last = position.samples + training.sizes.sequences(position.step)
    begins_phase = any(position.samples <= phase.first < last for phase in training.loader.mixture.phases[1:])
    is_unsettled = begins_phase or training.step.settings.schedule.is_rewarming(position.step)
    state = position.guard.restarted() if is_unsettled else position.guard
    return judge(
        training.guard, state, position.step + 1, gradients.loss, gradients.grad_norm, training.scale,
        overflow=gradients.overflow, mesh=training.step.mesh,
    )  # fmt: skip


def _report(training: Training, position: Position, alarm: Alarm, judged: Judgement) -> None:
    """Record an alarm with its documents, and tell the person. Raises BessemerError when the guard stops the run."""
    step, sizes, path = position.step + 1, training.sizes, training.run.incidents
    first_step = alarm.onset - 1
    first = position.samples - (sizes.before(position.step) - sizes.before(first_step))
    count = sizes.before(min(first_step + DOCUMENT_STEPS, step)) - sizes.before(first_step)
    samples = training.loader.documents(first, min(count, DOCUMENT_SAMPLES))
    actions = {Verdict.SKIP: "update skipped", Verdict.STOP: "run stopped", Verdict.APPLY: "recorded"}
    action = actions[judged.verdict]
    if training.step.mesh.is_main:
        record(
            path, step=step, what=alarm.kind, cause=alarm.cause, action=action, onset=alarm.onset,
            advice=ADVICE[alarm.kind], documents=samples,
        )  # fmt: skip
    if judged.verdict is Verdict.STOP:
        names = list(dict.fromkeys(name for sample in samples for name in sample["documents"]))  # type: ignore[attr-defined]
        raise BessemerError(
            f"step {step}: {alarm.cause}; {judged.state.skips_in_a_row} such steps in a row, so the run stops. The last batch "
            f"held {len(names)} documents ({', '.join(names[:3])}, ...), all in {path}; lower "
            "train.optimizer.learning_rate, or look at them"
        )
    warn(f"step {step}: {alarm.kind}: {alarm.cause}; {action} (see {path.name})")


def _finish(training: Training, log: Log, position: Position, scores: Validation | None) -> TrainSummary:
    """Save the last checkpoint, log times and memory, and write the audit of the mixture."""
    step, mesh, resumed_at = training.step, training.step.mesh, training.position.step
    if position.step > resumed_at or not training.has_checkpoint:
        with training.pace.timing("saving"):
            training.saver.save_now(position)
        log.write("time", position.step, resumed_at=resumed_at, **training.pace.seconds())
    memory = mesh.gather(memory_in_use(step.device))
    if position.step > resumed_at:
        by_rank = {str(rank): taken for rank, taken in enumerate(memory)}
        planned = training.planned_memory
        log.write(
            "memory", position.step, planned=planned, measured=max(memory), recomputed=step.recomputed, by_rank=by_rank
        )
    counts = position.counts.summed(mesh)
    if mesh.is_main:
        audit = mixture_audit(training.loader.mixture, counts, position.samples)
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
