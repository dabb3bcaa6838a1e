"""Set-up of a training on this process: the device, the model and its starting weights, and the other parts of the loop."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bessemer.checkpoint import SavedCheckpoint, latest
from bessemer.checkpoint.protocol import drop_newer, exchange, published
from bessemer.environment import describe
from bessemer.errors import BessemerError
from bessemer.guard.detection import GuardReference
from bessemer.guard.goodput import WallClock
from bessemer.guard.journal import Journal
from bessemer.guard.policy import GuardState
from bessemer.guard.pulse import Pulse
from bessemer.layout.flops import devices_of, recomputed_flops_per_token, step_flops_per_token
from bessemer.layout.pipeline_stages import recomputed_in_all
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import meta_model
from bessemer.parallel.mesh import ProcessMesh
from bessemer.recipe import Recipe
from bessemer.run import RunFolder, read_json, write_json
from bessemer.terminal import say, warn
from bessemer.tokens.loader import Batch
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train import loop
from bessemer.train import profile as profiles
from bessemer.train.audit import MixtureCounts
from bessemer.train.device import Device
from bessemer.train.metrics import Rates
from bessemer.train.pace import Pace
from bessemer.train.precision import probe
from bessemer.train.recompute import base_bytes, blocks_recomputed, memory_of
from bessemer.train.split import initial_weights
from bessemer.train.start import is_continued, no_dropout_line, start_from, starting_model
from bessemer.train.state import Position, Saver, restore
from bessemer.train.step import TrainStep
from bessemer.train.task import config_of
from bessemer.train.training import Replicas, Training, TrainSummary


def train_here(
    recipe: Recipe, run: RunFolder, plan: dict[str, Any], profile: bool, device: Device,
    mesh: ProcessMesh, pulse: Pulse,
) -> TrainSummary:  # fmt: skip
    """Train a resolved recipe on this process of the mesh. plan: contents of plan.json; profile: a few steps, into profile/."""
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
        started, journal = perf_counter(), _journal(run, mesh)
        training = set_up(
            recipe, config, run, store, device, mesh, pulse, journal, _checkpoint(run, journal, mesh), recomputed, started,
            peak=peak, planned_memory=memory["total"], observe=profiler or (lambda batches: batches),
        )  # fmt: skip
        if training.position.step:
            say(f"  going on from step {training.position.step} of {recipe.train.steps}")
        summary = loop.train(training)
    finally:
        gc.unfreeze()
    if profiler and profiler.seconds:
        profiles.write(profiler, recipe.train, read_json(run.plan), config, summary.recomputed)
    return summary


def set_up(
    recipe: Recipe, config: ModelConfig, run: RunFolder, store: TokenStore, device: Device, mesh: ProcessMesh, pulse: Pulse,
    journal: Journal, checkpoint: SavedCheckpoint | None, recomputed: int, started: float, *, peak: float = 1.0,
    planned_memory: int = 0,
    observe: Callable[[Iterator[Batch]], Iterator[Batch]] = lambda batches: batches,
) -> Training:  # fmt: skip
    """The parts of the loop, at a checkpoint or, without one, at the start.

    recomputed: blocks of each process, as planned; started: by perf_counter; peak: FLOP/s of all processes together;
    planned_memory: bytes.
    """
    step = _step(recipe, config, device, store, mesh, checkpoint is not None, recomputed)
    loader = step.task.loader(recipe, store, mesh.data_rank, mesh.layout.data)
    if checkpoint is None and recipe.train.start is not None:
        say(f"  {start_from(step, Path(recipe.train.start), store)}")
    if checkpoint is None and (line := no_dropout_line(recipe.model, recipe.train)) is not None:
        say(f"  {line}")
    position = Position(counts=MixtureCounts.zero(loader.mixture))
    if checkpoint is not None:
        position = restore(step, checkpoint, store)
    if len(position.counts.tokens) != len(loader.mixture.aims):  # an older checkpoint, or --accept-changes
        counts = MixtureCounts.of_order(loader.mixture, position.samples, recipe.batches.length).on_rank_zero(mesh)
        position = replace(position, counts=counts)
    position = replace(position, guard=replace(position.guard, num_rollbacks=journal.num_rollbacks))
    sizes = recipe.batches.without(journal.omitted).going_on(position.step, position.samples)
    held_out = step.task.held_out(recipe, store, recipe.evaluate.max_tokens)
    num_scored = sum(part.inputs.size for part in held_out)
    model_flops = step_flops_per_token(recipe.train, config)
    again = recomputed_in_all(config, recipe.parallel, step.recomputed)
    hardware_flops = model_flops + recomputed_flops_per_token(recipe.train.recompute, config, again)
    rates = Rates(model_flops, hardware_flops, peak, device, mesh, run.plan)
    clock = WallClock(run.times if mesh.is_main else None, position.step, perf_counter() - started)
    return Training(
        run=run,
        store=store,
        step=step,
        loader=loader,
        held_out=held_out,
        guard=recipe.guard,
        journal=journal,
        reference=GuardReference(math.log(len(store.labels) or config.vocabulary), recipe.train.optimizer.clip_norm),
        pace=Pace(recipe, run, mesh, position.step, store.train_tokens, num_scored, started, sizes, clock),
        rates=rates,
        saver=Saver(recipe, run, step, store),
        position=position,
        has_checkpoint=checkpoint is not None,
        scores_first=position.step == 0 and is_continued(recipe.model, recipe.train),
        tensorboard=recipe.report.tensorboard,
        planned_memory=planned_memory,
        started=started,
        observe=observe,
        pulse=pulse,
        clock=clock,
        replicas=Replicas(position.step),
    )


def _journal(run: RunFolder, mesh: ProcessMesh) -> Journal:
    """The journal of a run, which rank 0 reads and writes; collective."""

    def read(by_rank: list[None]) -> list[Journal]:
        return [Journal.read(run.journal)] * len(by_rank)

    journal = exchange(mesh, lambda: None, read)
    if not mesh.is_main:
        return replace(journal, path=None)
    journal.drop_torn_line()
    return journal


def _checkpoint(run: RunFolder, journal: Journal, mesh: ProcessMesh) -> SavedCheckpoint | None:
    """The newest checkpoint on the path of the journal; those of a rollback that a kill interrupted are removed. Collective."""
    while (checkpoint := latest(run.checkpoints, on_damage=warn, mesh=mesh)) is not None:
        num_rollbacks = GuardState.from_dict(checkpoint.facts["guard"]).num_rollbacks
        if num_rollbacks > journal.num_rollbacks:
            raise BessemerError(
                f"{run.journal}: the checkpoint of step {checkpoint.step} knows {num_rollbacks} rollbacks, the journal "
                f"{journal.num_rollbacks}: lines are missing. Put the file back from a backup, or start over with --restart"
            )
        if journal.keeps(checkpoint.step, num_rollbacks):
            return checkpoint
        to = min(rollback.to for rollback in journal.rollbacks[num_rollbacks:])
        if mesh.is_main:
            drop_newer(run.checkpoints, to)
        mesh.barrier()
    return None


def _step(
    recipe: Recipe, config: ModelConfig, device: Device, store: TokenStore, mesh: ProcessMesh, has_checkpoint: bool,
    recomputed: int,
) -> TrainStep:  # fmt: skip
    """The step with its starting weights, or with placeholders that a checkpoint will replace."""
    weights = None
    if mesh.is_single:
        source = None if has_checkpoint else recipe.model.from_
        model = starting_model(source, config, recipe.run.seed)
    elif has_checkpoint:
        model, weights = meta_model(config), lambda name, shape: torch.zeros(shape)
    elif recipe.model.from_ is not None:
        model = starting_model(recipe.model.from_, config, recipe.run.seed, mesh.is_main)
    else:
        model, weights = meta_model(config), initial_weights(config, recipe.run.seed)
    return TrainStep(recipe, model, device, store.end_of_text, len(store.sources), mesh, weights, recomputed)
