"""The training loop, and the training of a run on this process. train/setup.py builds its parts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NoReturn

import torch

from bessemer.common.console import progress, say
from bessemer.common.environment import describe
from bessemer.common.errors import BessemerError, InputError, Stopped
from bessemer.distributed.mesh import ProcessMesh
from bessemer.distributed.sharded_tensors import tensors_digest
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.guard.heartbeat import Heartbeat
from bessemer.model.mixture_of_experts import load_metrics
from bessemer.recipe import ResolvedRecipe
from bessemer.recipe.uses import make
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_or_none, write_json
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train.alarm_response import record_missing_rollbacks
from bessemer.train.callback import Callback, Callbacks
from bessemer.train.device import Device, memory_in_use, release_unused
from bessemer.train.mixture_audit import mixture_audit
from bessemer.train.profile import StepProfiler
from bessemer.train.recompute import base_bytes
from bessemer.train.run_spec import Import, Resume, RunSpec
from bessemer.train.setup import Observer, TaskScorer, Training, run_checkpoint, run_journal, set_up
from bessemer.train.state import TrainState
from bessemer.train.step import CompletedStep, completed_steps
from bessemer.train.stop import Abandoned, StopSignal
from bessemer.train.validation import Validation, log_writing, validate


@dataclass(frozen=True)
class TrainSummary:
    """The result of a training.

    Attributes:
        step: The last step.
        resumed_at: The step of the checkpoint that it resumed from; 0 for a fresh start.
        bits_per_byte: The last held-out score of a causal model.
        accuracy: The last held-out accuracy of other models.
        skipped: The number of updates that the guard skipped.
        weights: The hash of the weights.
        rescaled: The number of steps dropped because fp16's loss scale was too large.
        peak_memory: The measured peak of the process that used the most, in bytes.
        planned_memory: The planned peak in bytes.
        recomputed: The number of blocks that each process recomputes.
    """

    step: int
    resumed_at: int
    bits_per_byte: float | None
    accuracy: float | None
    skipped: int
    weights: str
    rescaled: int
    peak_memory: int
    planned_memory: int
    recomputed: int


def train_process(
    spec: RunSpec, run: RunDirectory, device: Device, mesh: ProcessMesh, heartbeat: Heartbeat, profile: bool = False,
    observe: Observer | None = None, score_tasks: TaskScorer | None = None, started: float | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainSummary:  # fmt: skip
    """Train a run as one process of the mesh. All ranks must call it.

    Args:
        spec: The run, equal on every process.
        run: Its directory.
        device: The device of this process.
        mesh: The mesh of processes.
        heartbeat: The heartbeat of this process, which the watchdog checks.
        profile: Profile a few steps into profile/.
        observe: Wraps the iterator of batches, instead of the profiler.
        score_tasks: Scores the model on tasks after each validation.
        started: The start of the training by perf_counter; None means now.
        callbacks: Callbacks that are called after those of the recipe.
    """
    started = perf_counter() if started is None else started
    store = TokenStore.open(run.tokens)
    if store.digest != spec.tokens_digest:
        raise InputError(f"{store.folder}: the token shards have changed since the run was planned; restore them")
    if mesh.is_main:
        store.verify()
    store.is_verified = True  # the main process has verified it for all
    _prepare_device(spec.recipe, run, device, mesh)
    # The planning process may have held more or less memory than this one.
    spec = spec.with_base(base_bytes(spec.recipe.train, spec.recipe.parallel, device))
    profiler = None
    if profile and mesh.is_main:
        done = spec.start.step if isinstance(spec.start, Resume) else 0
        profiler = StepProfiler(device, spec.steps - done, run.profile)
    members = [make("callbacks", one.use, one.settings) for one in spec.recipe.train.callbacks]
    devices.freeze_loaded()
    journal = run_journal(run, mesh)
    checkpoint = run_checkpoint(run, journal, mesh, spec.recipe)
    observe = observe or profiler or (lambda batches: batches)
    training = set_up(spec, run, store, device, mesh, heartbeat, journal, checkpoint, started, observe, score_tasks)
    if step := training.start_state.step:
        say(f"  continuing from step {step} of {spec.steps}")
    record_missing_rollbacks(training)
    return train(training, [*members, *callbacks])


def _prepare_device(recipe: ResolvedRecipe, run: RunDirectory, device: Device, mesh: ProcessMesh) -> None:
    """Select the kernels, print the precision, and start to measure the memory of this training."""
    devices.set_deterministic(device)
    # Training does not draw from this generator. The seed makes its state in a checkpoint equal in every run.
    torch.manual_seed(recipe.run.seed)
    if mesh.is_main and read_json_or_none(run.environment) is None:
        write_json(run.environment, describe(device.name, device.precision.name))
    say(f"  on {device.name}, {device.precision.name}{', compiled' if device.compile else ''}")
    if not device.is_cuda:
        # Memory freed by measurements and earlier stages must not count as part of this training.
        devices.freeze_loaded()
        devices.release_unused(device)
        devices.keep_freed_memory()
        devices.reset_peak_resident()


def train(training: Training, members: Sequence[Callback] = ()) -> TrainSummary:
    """Train from the start state to the last step, on every process of the mesh.

    Raises Stopped after a stop signal to any process, with everything saved, and BessemerError if the guard stops the run.
    """
    trainer, stream, saver, log = training.trainer, training.stream, training.saver, training.log
    rates, state, scores = training.rates, training.start_state, None
    done, total = stream.sizes.tokens_before(state.step), stream.sizes.tokens_before(training.steps)
    with (
        training.clock.session(), saver, StopSignal(trainer.mesh) as stop, log,
        Callbacks(members, training, stop) as callbacks,
        progress("training", total, "tok", done) as advance,
    ):  # fmt: skip
        if state.step:
            log.write("resumed", state.step)
        callbacks.call("start", state.step)
        if (stopped_by := stop.received()) is None and _starts_with_validation(training, state):
            scores = _validate(training, state, stop, callbacks)
            stopped_by = stop.received()
        if stopped_by:
            _stop(training, state, stopped_by, callbacks)
        for step in completed_steps(training, stop):
            state = step.state
            if step.rate is None:  # rolled back
                training.clock.add_step(state.step, rates.data_wait, rates.num_steps)
                advance(stream.sizes.tokens_before(state.step) - stream.sizes.tokens_before(step.before))
                continue
            training.gate_log.write(state.step, step.batch)
            training.stragglers.compare_if_due(log, state.step)
            training.trends.add_step(state.step, rates.seconds, rates.data_wait)
            note = f"loss {step.stats.loss:.3f}" + (f"  {scores.short}" if scores else "")
            advance(stream.sizes.tokens(state.step - 1), note, total)
            if not step.is_newest:
                continue
            validated = _log_and_validate(training, step, stop, callbacks)
            scores, stopped_by = validated or scores, stop.received()
            is_best = stopped_by is None and validated is not None and saver.is_best(state.step, validated.loss)
            if state.step != training.steps and stopped_by is None and (saver.is_due(state.step) or is_best):
                with training.timing("saving"):
                    saver.save(state)
                callbacks.call("checkpoint", state.step)
            training.clock.add_step(state.step, rates.data_wait, rates.num_steps)
            if stopped_by:
                _stop(training, state, stopped_by, callbacks)
        training.heartbeat.mark("end", state.step)
        return _finish(training, state, scores, callbacks)


def _starts_with_validation(training: Training, state: TrainState) -> bool:
    """Return True if a validation precedes the first step: of imported weights, or one that a stop interrupted.

    All ranks must call it.
    """
    if not state.step:
        return isinstance(training.spec.origin, Import)
    is_missing = training.trainer.mesh.any(training.log.lacks("validation", state.step))
    return is_missing and training.validates(state.step)


def _stop(training: Training, state: TrainState, stopped_by: str | BessemerError, callbacks: Callbacks) -> NoReturn:
    """Save, and raise Stopped or the error of a callback. All ranks must call it."""
    if state.step:
        _save_last(training, state, callbacks)
    training.clock.write(state.step, str(stopped_by))
    saved = f"everything is saved in {training.run.path}" if state.step else "nothing is saved yet"
    saved = f"after step {state.step} of {training.steps}; {saved}; run the same command again to continue"
    if isinstance(stopped_by, BessemerError):
        raise BessemerError(f"{stopped_by}; stopped {saved}")
    raise Stopped(f"stopped by {stopped_by} {saved}")


def _log_and_validate(
    training: Training, step: CompletedStep, stop: StopSignal, callbacks: Callbacks
) -> Validation | None:
    """Log and validate if they are due. Returns the scores of a validation, else None."""
    state = step.state
    if state.step % training.recipe.train.log_every == 0 or state.step == training.steps:
        line = _train_line(training, step)
        config = training.trainer.model.config
        strength = config.has_balance_loss * config.balance_loss + config.has_balance_bias * config.balance_rate
        training.trends.add_load(state.step, line, is_balanced=strength > 0)
        training.log.write("train", state.step, **line)
        callbacks.call("step", state.step, line)
    return _validate(training, state, stop, callbacks) if training.validates(state.step) else None


def _train_line(training: Training, step: CompletedStep) -> dict[str, object]:
    """Return the values of a "train" line of metrics.jsonl. All ranks must call it."""
    device, sizes, state, stats = training.trainer.device, training.stream.sizes, step.state, step.stats
    sums = zip(training.store.sources, stats.nats, stats.targets, strict=True)
    numbers: dict[str, object] = {
        "tokens": sizes.tokens_before(state.step),
        "loss": stats.loss,
        "loss_by_source": {name: nats / count for name, nats, count in sums if count},
    }
    if not training.recipe.train.objective_rule.is_built_in:
        numbers["objective_loss"] = stats.objective_loss
    if (config := training.trainer.model.config).experts:
        load = device.read(stats.load)
        numbers["auxiliary_loss"] = float(load[:, -1].sum()) / max(sum(stats.targets), 1)
        numbers |= load_metrics(load, config.dense_layers)
    if training.recipe.tokens.gate:
        numbers["gated_targets"] = stats.gated
    if stats.accuracy is not None:
        numbers["accuracy"] = stats.accuracy
    numbers |= {"grad_norm": stats.grad_norm, "learning_rate": step.rate}
    numbers |= training.rates.now(sizes.tokens(state.step - 1))
    numbers["memory_bytes"] = memory_in_use(device)
    if device.precision.scaled:
        numbers |= {"loss_scale": stats.scale.value, "scale_skips": stats.scale.skipped}
    return numbers


def _validate(training: Training, state: TrainState, stop: StopSignal, callbacks: Callbacks) -> Validation | None:
    """Score the held-out text, and log the scores, a sample and tasks. Returns None if a stop interrupts that.

    All ranks must call it.
    """
    started, trainer = perf_counter(), training.trainer
    with training.timing("validation"), suppress(Abandoned):
        release_unused(trainer.device)  # the tensors of a validation do not fit into the heap's holes left by a step
        with trainer.averaged():
            scores = validate(trainer, training.held_out, stop.abandon)
            log_writing(training, state, partial(stop.abandon, is_alone=True))
        release_unused(trainer.device)
        training.log.write(
            "validation", state.step, tokens=training.stream.sizes.tokens_before(state.step), **scores.metrics,
            seconds=perf_counter() - started,
        )  # fmt: skip
        callbacks.call("validation", state.step, scores.metrics)
        return scores
    return None


def _save_last(training: Training, state: TrainState, callbacks: Callbacks) -> None:
    """Save before the training ends, unless the state is on disk. After the last step, log the total time and memory.

    All ranks must call it.
    """
    trainer, resumed_at = training.trainer, training.start_state.step
    if state.step == resumed_at > 0:
        return
    with training.timing("saving"):
        training.saver.save_now(state)
    callbacks.call("checkpoint", state.step)
    if state.step == training.steps:
        training.log.write("time", state.step, resumed_at=resumed_at, **training.clock.totals())
        memory = trainer.mesh.gather(memory_in_use(trainer.device))
        if state.step > resumed_at:
            training.log.write(
                "memory", state.step, planned=training.spec.memory_bytes["total"], measured=max(memory),
                recomputed=trainer.recomputed, by_rank={str(rank): peak for rank, peak in enumerate(memory)},
            )  # fmt: skip


def _finish(training: Training, state: TrainState, scores: Validation | None, callbacks: Callbacks) -> TrainSummary:
    """Save the last checkpoint, log times and memory, and write the mixture audit."""
    trainer, mesh, resumed_at = training.trainer, training.trainer.mesh, training.start_state.step
    _save_last(training, state, callbacks)
    training.clock.write(state.step, is_finished=state.step == training.steps)
    memory = mesh.gather(memory_in_use(trainer.device))
    counts, gaps = mesh.sum_over_data(torch.from_numpy(state.counts)).numpy(), training.stream.sizes.gaps(state.step)
    if mesh.is_main:
        audit = mixture_audit(training.loader.mixture, counts, state.samples, gaps)
        write_json(training.run.mixture, audit)
    return TrainSummary(
        state.step, resumed_at, scores.bits_per_byte if scores else None, scores.accuracy if scores else None,
        state.guard.skipped, tensors_digest(owned_parameters(trainer.model), mesh), state.scale.skipped, max(memory),
        training.spec.memory_bytes["total"], trainer.recomputed,
    )  # fmt: skip
