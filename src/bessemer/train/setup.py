"""The parts of a training on this process and their setup: model and starting weights, data, guard, logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from bessemer.checkpoint import SavedCheckpoint, latest
from bessemer.checkpoint.mirror import refetch
from bessemer.checkpoint.protocol import Damage, drop_newer
from bessemer.common.console import say, warn
from bessemer.distributed.mesh import ProcessMesh, on_rank_zero
from bessemer.distributed.sharded_tensors import Difference
from bessemer.distributed.stages import recomputed_total
from bessemer.distributed.step_flops import recomputed_flops_per_token, step_flops_per_token
from bessemer.guard.detection import GuardReference
from bessemer.guard.goodput import WallClock
from bessemer.guard.heartbeat import Heartbeat
from bessemer.guard.incidents import CHECKPOINT_DAMAGED, record
from bessemer.guard.journal import Journal
from bessemer.guard.policy import GuardState
from bessemer.guard.trends import Trends
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import Transformer, meta_model
from bessemer.recipe import Recipe, ResolvedRecipe
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_steps
from bessemer.tokens.degenerate_text import DegenerateTextLog
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch, Loader
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.description import Framing
from bessemer.train.batch_stream import BatchStream
from bessemer.train.device import Device
from bessemer.train.layer_metrics import LayerMonitor
from bessemer.train.metrics import MetricsLog, Rates
from bessemer.train.mixture_audit import no_counts
from bessemer.train.parallelize import initial_weights
from bessemer.train.run_spec import Fresh, Import, RunSpec
from bessemer.train.starting_weights import start_from, starting_model
from bessemer.train.state import Saver, TrainState, restore
from bessemer.train.stragglers import Stragglers
from bessemer.train.trackers import open_trackers
from bessemer.train.trainer import Trainer

Observer = Callable[[Iterator[Batch]], Iterator[Batch]]
# Scores a model on tasks, reports progress to a function, and returns values by score and task.
TaskScorer = Callable[["ScoredModel", Callable[..., None]], dict[str, dict[str, float]]]


@dataclass(frozen=True)
class ScoredModel:
    """A causal model to score.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        framing: The token ids around a text.
        ends: The token ids that end a generated text.
        autocast: The context in which matmuls run in the recipe's precision.
    """

    model: Transformer
    tokenizer: Tokenizer
    framing: Framing
    ends: Sequence[int]
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def before(self) -> list[int]:
        """The token ids before a text.

        If documents start with none, this is end-of-text, since the first prediction needs a token to be conditioned on.
        """
        return list(self.framing.before) or [self.tokenizer.end_of_text]


@dataclass
class Replicas:
    """The results of comparing the weights of replicas.

    Attributes:
        equal_at: The last step at which all replicas were equal.
        suspected: Differences that do not show which rank is wrong, by step.
    """

    equal_at: int
    suspected: dict[int, Difference] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """The parts of a training on this process, built by `set_up`.

    Attributes:
        spec: The specification of the run.
        run: The run directory.
        store: The token shards.
        trainer: The model with its engine and optimizer.
        loader: The loader of training batches.
        held_out: The sequences that a validation scores.
        start_state: The state of the checkpoint, or of a fresh start.
        observe: Wraps the iterator of batches, for the profiler.
        score_tasks: Scores the model on tasks, if the recipe has any.
        journal: The guard's decisions so far.
        log: The log of metrics.
        clock: The wall time of the session by kind.
        heartbeat: The heartbeat for the watchdog.
        trends: The windows in which trends are detected.
        stream: The batches of the steps.
        saver: The writer of checkpoints.
        reference: The constants of the run for the guard's anomaly detector.
        replicas: The results of comparing replicas.
        rates: The speed of steps and the wait for data.
        watch: The statistics of layers.
        stragglers: The comparison of devices.
        gate_log: The log of documents whose targets tokens.gate ignores.
    """

    spec: RunSpec
    run: RunDirectory
    store: TokenStore
    trainer: Trainer
    loader: Loader
    held_out: list[HeldOut]
    start_state: TrainState
    observe: Observer
    score_tasks: TaskScorer | None
    journal: Journal
    log: MetricsLog
    clock: WallClock
    heartbeat: Heartbeat
    trends: Trends
    stream: BatchStream
    saver: Saver
    reference: GuardReference
    replicas: Replicas
    rates: Rates
    watch: LayerMonitor
    stragglers: Stragglers
    gate_log: DegenerateTextLog

    @property
    def recipe(self) -> ResolvedRecipe:
        """The resolved recipe."""
        return self.spec.recipe

    @property
    def steps(self) -> int:
        """The number of steps of the run."""
        return self.spec.steps

    def batches(self) -> Iterator[Batch]:
        """Yield the batches from the start state to the last step, timed; after a rollback, continue from the restored state."""
        return self.observe(self.rates.timed(self.stream.batches(self.start_state.step)))

    def validates(self, step: int) -> bool:
        """Return True if a validation follows `step` steps."""
        return step == self.steps or step % self.trainer.settings.validate_every == 0

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Count the time of the block as "validation" or "saving" and not as part of a step."""
        with self.heartbeat.during(phase), self.clock.counting(phase):
            yield


def set_up(
    spec: RunSpec, run: RunDirectory, store: TokenStore, device: Device, mesh: ProcessMesh, heartbeat: Heartbeat,
    journal: Journal, checkpoint: SavedCheckpoint | None, started: float, observe: Observer = lambda batches: batches,
    score_tasks: TaskScorer | None = None,
) -> Training:  # fmt: skip
    """Build the parts of a training at a checkpoint or, without one, at the start. All ranks must call it.

    `started` is the start of the training by perf_counter. The other arguments become fields of Training.
    """
    recipe, config = spec.recipe, spec.config
    origin = spec.origin if checkpoint is None else None
    trainer = _trainer(recipe, config, device, store, mesh, origin, spec.recomputed)
    loader = trainer.task.loader(recipe, store, mesh.data_rank, mesh.layout.data)
    held_out = trainer.task.held_out(recipe, store, recipe.evaluate.max_tokens)
    if isinstance(origin, Import) and origin.is_run:
        say(f"  {start_from(trainer, Path(origin.source), store, origin.step)}")
    state = TrainState(counts=no_counts(loader.mixture))
    if checkpoint is not None:
        state = restore(trainer, checkpoint, store)
    state = replace(state, guard=replace(state.guard, num_rollbacks=journal.num_rollbacks))
    rows = read_steps(run.metrics) if mesh.is_main else []
    reached = max((row.get("step", 0) for row in rows), default=0)
    log = MetricsLog(
        run, rows, state.step, recipe.report.tensorboard, journal.num_rollbacks, writes=mesh.is_main,
        trackers=open_trackers(recipe, run) if mesh.is_main else (),
    )  # fmt: skip
    reached_at = rows[-1].get("time") if rows else None
    clock = WallClock(run.times if mesh.is_main else None, state.step, perf_counter() - started, reached, reached_at)
    trends = Trends(run.incidents if mesh.is_main else None, (row for row in rows if row.get("step", 0) <= state.step))
    sizes = recipe.batches.without(journal.omitted).with_position(state.step, state.samples)
    flops = step_flops_per_token(recipe.train, config)
    peak = spec.peak_flops * recipe.parallel.num_devices(recipe.cluster.nodes, device.is_cuda)
    num_recomputed = recomputed_total(config, recipe.parallel, spec.recomputed)
    recomputed_flops = recomputed_flops_per_token(recipe.train.recompute, config, num_recomputed)
    return Training(
        spec, run, store, trainer, loader, held_out, state, observe, score_tasks, journal, log, clock, heartbeat, trends,
        stream=BatchStream(loader, sizes, spec.steps),
        saver=Saver(recipe, run, trainer, store),
        reference=GuardReference(math.log(len(store.labels) or config.vocabulary), recipe.train.optimizer.clip_norm),
        replicas=Replicas(state.step),
        rates=Rates(flops, flops + recomputed_flops, peak, device),
        watch=LayerMonitor(trainer, log, trends, recipe.train.watch_every),
        stragglers=Stragglers(mesh, device, recipe.guard.stragglers_every, run.incidents),
        gate_log=DegenerateTextLog(run.path, loader, store.end_of_text, recipe.tokens.gate and mesh.leads_data),
    )  # fmt: skip


def run_journal(run: RunDirectory, mesh: ProcessMesh) -> Journal:
    """Return the journal of a run, which rank 0 reads and writes. All ranks must call it."""
    journal = on_rank_zero(mesh, lambda: Journal.read_run(run))
    if not mesh.is_main:
        return replace(journal, path=None)
    journal.drop_torn_line()
    return journal


def run_checkpoint(run: RunDirectory, journal: Journal, mesh: ProcessMesh, recipe: Recipe) -> SavedCheckpoint | None:
    """Return the newest checkpoint that no rollback of the journal undid; None if there is none. All ranks must call it.

    Checkpoints that a rollback undid exist if the process was killed during it; they are removed. A damaged checkpoint is
    recorded as an incident and downloaded again from the mirror.
    """

    def on_damage(damage: Damage) -> None:
        if mesh.is_main:
            record_damage(run, damage)

    fetch = partial(refetch, recipe, run)
    while (checkpoint := latest(run.checkpoints, on_damage, mesh, fetch)) is not None:
        num_rollbacks = require_journal(journal, checkpoint)
        if journal.keeps(checkpoint.step, num_rollbacks):
            return checkpoint
        to = min(rollback.to for rollback in journal.rollbacks[num_rollbacks:])
        if mesh.is_main:
            drop_newer(run.checkpoints, to)
        mesh.barrier()
    return None


def record_damage(run: RunDirectory, damage: Damage) -> None:
    """Warn of a checkpoint that does not verify, and record an incident."""
    warn(damage)
    newest = max(checkpoint_steps(run.checkpoints), default=0)
    record(run.incidents, CHECKPOINT_DAMAGED, step=newest, cause=damage.cause, action=damage.action)


def require_journal(journal: Journal, checkpoint: SavedCheckpoint) -> int:
    """Return the number of rollbacks that preceded a checkpoint. Raises InputError if the journal has fewer rollbacks."""
    num_rollbacks = GuardState.from_dict(checkpoint.facts["guard"]).num_rollbacks
    if num_rollbacks > journal.num_rollbacks:
        journal.raise_incomplete(f"the checkpoint of step {checkpoint.step} has", num_rollbacks)
    return num_rollbacks


def _trainer(
    recipe: ResolvedRecipe, config: ModelConfig, device: Device, store: TokenStore, mesh: ProcessMesh,
    origin: Fresh | Import | None, recomputed: int,
) -> Trainer:  # fmt: skip
    """Return the trainer with the starting weights of `origin`; with None, a checkpoint must replace its weights."""
    weights, seed = None, recipe.run.seed
    source = origin.source if isinstance(origin, Import) and not origin.is_run else None
    if mesh.is_single or source is not None:
        model = starting_model(source, config, seed, store, mesh.is_main)
    else:
        model = meta_model(config)
        weights = (lambda name, shape: torch.zeros(shape)) if origin is None else initial_weights(config, seed)
    return Trainer(recipe, model, device, store.end_of_text, len(store.sources), mesh, weights, recomputed)
