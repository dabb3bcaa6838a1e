"""The training loop, and the training of a run on one process. train/session.py builds the parts that work together here."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from bessemer.environment import describe
from bessemer.errors import Stopped
from bessemer.guard.pulse import Pulse
from bessemer.guard.trends import Trends
from bessemer.layout.flops import devices_of
from bessemer.parallel.mesh import ProcessMesh
from bessemer.recipe import Recipe
from bessemer.run import RunFolder, published, read_json, read_json_lines, write_json
from bessemer.terminal import progress, say
from bessemer.tokens.gate import summary
from bessemer.tokens.loader import Batch
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train import profile as profiles
from bessemer.train.audit import mixture_audit
from bessemer.train.device import Device, memory_in_use, release_unused
from bessemer.train.healing import apply_step, compare_replicas, handle_judgement, judge_step
from bessemer.train.metrics import MetricsLog
from bessemer.train.precision import probe
from bessemer.train.recompute import base_bytes, blocks_recomputed, memory_of
from bessemer.train.session import Observer, Training, run_checkpoint, run_journal, set_up
from bessemer.train.state import Position, weights_digest
from bessemer.train.step import Gradients
from bessemer.train.stop import StopSignal
from bessemer.train.task import config_of
from bessemer.train.validation import Validation, validate
from bessemer.train.watch import Watch


@dataclass(frozen=True)
class TrainSummary:
    """The result of a training. resumed_at: step of the checkpoint, 0 for a fresh start; skipped: by the guard; rescaled: steps
    dropped because fp16's loss scale was too large; peak_memory: bytes; recomputed: blocks; stragglers, gated: in words."""

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
    stragglers: tuple[str, ...] = ()
    gated: str = ""


def train_here(
    recipe: Recipe, run: RunFolder, plan: dict[str, Any], profile: bool, device: Device,
    mesh: ProcessMesh, pulse: Pulse, observe: Observer | None = None,
) -> TrainSummary:  # fmt: skip
    """Train a resolved recipe on this process of the mesh. plan: contents of plan.json; profile: a few steps, into profile/;
    observe: wraps the batches instead."""
    done = published(run.checkpoints)
    store = TokenStore.open(run.tokens)
    if mesh.is_main:
        store.verify()
    devices.make_deterministic()
    if mesh.is_main and not run.environment.exists():
        write_json(run.environment, describe(device.name, device.precision))
    say(f"  on {device.name}, {device.precision}{', compiled' if device.compile else ''}")
    say(f"  {probe(device.arithmetic, device.torch_device)}")
    if not device.is_cuda:
        # Memory freed by measurements and earlier stages must not count as this training's base.
        devices.release_unused(device)
        devices.keep_freed_memory()
        devices.reset_peak_resident()
    config = config_of(recipe, store.vocabulary, len(store.labels))
    # This process's own base and blocks: those of the process that planned differ, as after a resume.
    # Where one process has too little memory, all recompute more: they wait for each other anyway.
    recomputed = max(mesh.gather(blocks_recomputed(recipe.train, recipe.parallel, config, device)))
    memory = memory_of(recipe.train, recipe.parallel, config, device, recomputed, base_bytes(device)).to_dict()
    if mesh.is_main:
        write_json(run.plan, {**read_json(run.plan), "memory_bytes": memory})
    profiler = (
        profiles.of(recipe.train, recipe.checkpoint.every, run.profile, device, done[-1] if done else 0)
        if profile and mesh.is_main
        else None
    )
    peak = plan["peak_flops"] * devices_of(recipe.parallel, recipe.cluster.nodes, device.is_cuda)
    gc.collect()
    gc.freeze()  # collections around a validation took 0.2 s more with the libraries' objects
    try:
        started, journal = perf_counter(), run_journal(run, mesh)
        checkpoint = run_checkpoint(run, journal, mesh, recipe)
        training = set_up(
            recipe, config, run, store, device, mesh, pulse, journal, checkpoint, recomputed, started,
            peak=peak, planned_memory=memory["total"], observe=observe or profiler or (lambda batches: batches),
        )  # fmt: skip
        if training.position.step:
            source = "" if training.is_on_disk else ", from the copy in memory"
            if (last := journal.governing(training.position.step)) is not None and last.rate_factor != 1.0:
                source += f"; the learning rate is x {last.rate_factor:g} since the rollback to step {last.to}"
            say(f"  going on from step {training.position.step} of {recipe.train.steps}{source}")
        summary = train(training)
    finally:
        gc.unfreeze()
    if profiler and profiler.seconds:
        profiles.write(profiler, recipe.train, read_json(run.plan), config, summary.recomputed)
    return summary


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
        looks = read_json_lines(training.run.metrics) if step.mesh.is_main and step.settings.watch_every else []
        trends = Trends(training.run.incidents if step.mesh.is_main else None, looks)
        watch = Watch(step, log, trends, step.settings.watch_every)
        if position.step:
            log.write("resumed", position.step, **({} if training.is_on_disk else {"from": "memory"}))
        if training.scores_first:
            scores = _validate(training, log, position)
        for batch in training.batches():
            gradients = step.gradients(batch, position.scale)
            position, rate = _guarded_update(training, watch, log, position, batch, gradients)
            if rate is None:  # rolled back
                continue
            training.gate_log.stepped(position.step, batch)
            training.stragglers.stepped(log, position.step, training.rates.busy(), training.rates.data_wait)
            trends.stepped(position.step, training.rates.seconds, training.rates.data_wait)
            scores = _revise_log_validate(training, log, position, gradients, rate) or scores
            is_last, stopped_by = position.step == pace.steps, stop.asked()
            if training.saver.is_due(position.step) and not is_last and stopped_by is None:
                with training.timing("saving"):
                    training.saver.save(position)
            if training.saver.is_copied(position.step) and not is_last and stopped_by is None:
                with training.clock.counting("memory"):
                    training.saver.copy(position)
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
        log.write("train", position.step, **_train_line(training, gradients, rate, position))
    if position.step % (settings.validate_every or pace.steps) == 0 or is_last:
        scores = _validate(training, log, position)
    return scores


def _train_line(training: Training, gradients: Gradients, rate: float, position: Position) -> dict[str, object]:
    """The values of a "train" line of metrics.jsonl. Collective."""
    device, sizes = training.step.device, training.pace.sizes
    sums = zip(training.store.sources, gradients.nats, gradients.targets, strict=True)
    numbers: dict[str, object] = {
        "tokens": sizes.tokens_before(position.step),
        "loss": gradients.loss,
        "loss_by_source": {name: nats / count for name, nats, count in sums if count},
    }
    if training.loader_is_gated:
        numbers["gated_targets"] = gradients.gated
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
    training.clock.note(position.step, is_finished=position.step == training.pace.steps)


def _finish(training: Training, log: MetricsLog, position: Position, scores: Validation | None) -> TrainSummary:
    """Save the last checkpoint, log times and memory, and write the audit of the mixture."""
    step, mesh, resumed_at = training.step, training.step.mesh, training.position.step
    if position.step > resumed_at or not training.is_on_disk:
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
        stragglers=tuple(training.stragglers.found.values()),
        gated=summary(training.run.path, position.step) if training.loader_is_gated else "",
    )
