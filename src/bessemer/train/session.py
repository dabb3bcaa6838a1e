"""The parts of a training on this process and their set-up: model and starting weights, data, guard, logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import torch

from bessemer.checkpoint import SavedCheckpoint, latest
from bessemer.checkpoint.memory import newest_in_memory
from bessemer.checkpoint.mirror import refetch
from bessemer.checkpoint.node_memory import NodeMemory
from bessemer.checkpoint.protocol import drop_newer, exchange
from bessemer.errors import BessemerError
from bessemer.guard.detection import GuardReference
from bessemer.guard.goodput import WallClock
from bessemer.guard.incidents import record
from bessemer.guard.journal import Journal
from bessemer.guard.policy import GuardState
from bessemer.guard.pulse import Pulse
from bessemer.layout.flops import recomputed_flops_per_token, step_flops_per_token
from bessemer.layout.pipeline_stages import recomputed_in_all
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import meta_model
from bessemer.parallel.mesh import ProcessMesh
from bessemer.parallel.replicas import Difference
from bessemer.recipe import Guard, Recipe, digest
from bessemer.run import RunFolder, published, read_json_lines
from bessemer.terminal import say, warn
from bessemer.tokens.gate import GateLog
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch, Reader
from bessemer.tokens.shards import TokenStore
from bessemer.train.audit import MixtureCounts
from bessemer.train.device import Device
from bessemer.train.metrics import MetricsLog, Rates
from bessemer.train.pace import Pace
from bessemer.train.split import initial_weights
from bessemer.train.start import is_continued, no_dropout_line, start_from, starting_model
from bessemer.train.state import Position, Saver, restore
from bessemer.train.step import TrainStep
from bessemer.train.stragglers import Stragglers

Observer = Callable[[Iterator[Batch]], Iterator[Batch]]


@dataclass
class Replicas:
    """What comparisons of replicas have found. equal_at: the last step at which all were equal; suspected: by the step of a
    difference, one that does not say which rank is wrong."""

    equal_at: int
    suspected: dict[int, Difference] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """The parts of a training on this process, built by `session.set_up`.

    journal: the guard's decisions so far; reference: what losses and gradients are compared with; position: where it starts;
    is_on_disk: whether a checkpoint of it is; scores_first: validate before the first step; planned_memory: bytes; started:
    by perf_counter; observe: wraps the iterator of batches, for the profiler; pulse: for the watchdog; replicas,
    stragglers: compared so far; gate_log: names what the gate takes away.
    """

    run: RunFolder
    store: TokenStore
    step: TrainStep
    loader: Reader
    held_out: list[HeldOut]
    guard: Guard
    journal: Journal
    reference: GuardReference
    pace: Pace
    rates: Rates
    saver: Saver
    position: Position
    is_on_disk: bool
    scores_first: bool
    tensorboard: bool
    planned_memory: int
    started: float
    observe: Observer
    pulse: Pulse
    clock: WallClock
    replicas: Replicas
    stragglers: Stragglers
    gate_log: GateLog
    loader_is_gated: bool

    def batches(self) -> Iterator[Batch]:
        """The batches of the run from its position on, timed; after a rollback those from there on."""
        return self.observe(self.rates.timed(self.pace.batches(self.loader, self.position.step)))

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Around a "validation" or the "saving" of a checkpoint."""
        with self.pulse.during(what), self.clock.counting(what):
            yield

    def log(self) -> MetricsLog:
        """The log, which only rank 0 writes."""
        return MetricsLog(
            self.run, self.position.step, self.tensorboard, self.journal.num_rollbacks, writes=self.step.mesh.is_main
        )


def set_up(
    recipe: Recipe, config: ModelConfig, run: RunFolder, store: TokenStore, device: Device, mesh: ProcessMesh, pulse: Pulse,
    journal: Journal, checkpoint: SavedCheckpoint | None, recomputed: int, started: float, *, peak: float = 1.0,
    planned_memory: int = 0,
    observe: Observer = lambda batches: batches,
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
    reached = max((row.get("step", 0) for row in read_json_lines(run.metrics)), default=0) if mesh.is_main else 0
    clock = WallClock(run.times if mesh.is_main else None, position.step, perf_counter() - started, reached)
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
        is_on_disk=checkpoint is not None and checkpoint.folder.parent == run.checkpoints,
        scores_first=position.step == 0 and is_continued(recipe.model, recipe.train),
        tensorboard=recipe.report.tensorboard,
        planned_memory=planned_memory,
        started=started,
        observe=observe,
        pulse=pulse,
        clock=clock,
        replicas=Replicas(position.step),
        stragglers=Stragglers(mesh, device, recipe.guard.stragglers_every, run.incidents),
        gate_log=GateLog(run.path, loader, store.end_of_text, recipe.tokens.gate and mesh.leads_data, position.step),
        loader_is_gated=recipe.tokens.gate,
    )


def run_journal(run: RunFolder, mesh: ProcessMesh) -> Journal:
    """The journal of a run, which rank 0 reads and writes; collective."""

    def read(by_rank: list[None]) -> list[Journal]:
        return [Journal.read(run.journal)] * len(by_rank)

    journal = exchange(mesh, lambda: None, read)
    if not mesh.is_main:
        return replace(journal, path=None)
    journal.drop_torn_line()
    return journal


def run_checkpoint(run: RunFolder, journal: Journal, mesh: ProcessMesh, recipe: Recipe) -> SavedCheckpoint | None:
    """The newest checkpoint on the path of the journal, in the memory of the nodes or on the disk. Collective."""
    newest = mesh.broadcast(max(published(run.checkpoints), default=None))
    damage: BessemerError | None = None

    def on_damage(message: str) -> None:
        warn(message)
        if mesh.is_main:
            record(run.incidents, step=newest or 0, what="checkpoint_damaged", cause=message, action="not loaded")

    try:
        on_disk = _checkpoint_on_disk(run, journal, mesh, on_damage)
    except BessemerError as error:
        on_disk, damage = None, error
    # Not one that belonged to an undone rollback: such a checkpoint is removed, and no longer there now.
    is_damaged = newest in published(run.checkpoints) and (on_disk is None or on_disk.step < newest)
    if mesh.any(mesh.is_main and is_damaged and refetch(recipe, run, newest)):
        on_disk = _checkpoint_on_disk(run, journal, mesh, warn)
    elif damage is not None:
        raise damage
    memory = NodeMemory.here(mesh) if recipe.checkpoint.memory_every else None
    first = 0 if on_disk is None else on_disk.step

    def accepts(copied: SavedCheckpoint) -> bool:
        num_rollbacks = GuardState.from_dict(copied.facts["guard"]).num_rollbacks
        is_on_path = num_rollbacks <= journal.num_rollbacks and journal.keeps(copied.step, num_rollbacks)
        return copied.step > first and is_on_path and copied.facts["recipe"] == digest(recipe)

    if not mesh.any(memory is None) and memory is not None:
        return newest_in_memory(memory, accepts, mesh, on_damage) or on_disk
    return on_disk


def _checkpoint_on_disk(
    run: RunFolder, journal: Journal, mesh: ProcessMesh, on_damage: Callable[[str], None]
) -> SavedCheckpoint | None:
    """The newest checkpoint on the path of the journal; those of a rollback that a kill interrupted are removed. Collective."""
    while (checkpoint := latest(run.checkpoints, on_damage=on_damage, mesh=mesh)) is not None:
        num_rollbacks = require_journal(run, journal, checkpoint)
        if journal.keeps(checkpoint.step, num_rollbacks):
            return checkpoint
        to = min(rollback.to for rollback in journal.rollbacks[num_rollbacks:])
        if mesh.is_main:
            drop_newer(run.checkpoints, to)
        mesh.barrier()
    return None


def require_journal(run: RunFolder, journal: Journal, checkpoint: SavedCheckpoint) -> int:
    """The number of rollbacks that a checkpoint knows. Raises BessemerError where the journal has fewer."""
    num_rollbacks = GuardState.from_dict(checkpoint.facts["guard"]).num_rollbacks
    if num_rollbacks > journal.num_rollbacks:
        raise BessemerError(
            f"{run.journal}: the checkpoint of step {checkpoint.step} knows {num_rollbacks} rollbacks, the journal "
            f"{journal.num_rollbacks}: lines are missing. Put the file back from a backup, or start over with --restart"
        )
    return num_rollbacks


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
