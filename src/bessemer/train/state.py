"""The state of a training, its checkpoints, and trained models loaded from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import torch

from bessemer import __version__
from bessemer.checkpoint import AsyncSaver, SavedCheckpoint, save
from bessemer.checkpoint.async_save import BackgroundFailure
from bessemer.checkpoint.format import Tensors, weight_reader
from bessemer.checkpoint.mirror import Mirror
from bessemer.checkpoint.protocol import trained_checkpoints
from bessemer.checkpoint.retention import Retention, rollback_distance
from bessemer.checkpoint.selection import best_validation
from bessemer.common.console import warn
from bessemer.common.errors import BessemerError, InputError
from bessemer.common.hashing import digest
from bessemer.distributed.sharded_tensors import as_shard_of
from bessemer.distributed.tied_embedding import owned_parameters, whole_name
from bessemer.guard.incidents import CHECKPOINT_FAILED, MIRROR_FAILED, record
from bessemer.guard.policy import GuardState
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import build_model
from bessemer.recipe import Recipe, ResolvedRecipe, dump
from bessemer.run.directory import NEWEST, RunDirectory, Weights, checkpoint_name, checkpoint_steps
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train import optimizer as optimizers
from bessemer.train.device import Device, release_unused
from bessemer.train.mixture_audit import Counts
from bessemer.train.precision import LossScale
from bessemer.train.trainer import Trainer


@dataclass(frozen=True)
class TrainState:
    """The state of a training besides tensors, stored in each checkpoint.

    Attributes:
        step: The number of updates applied or skipped.
        samples: The number of sequences consumed.
        guard: The state of the guard.
        scale: The loss scale of fp16.
        counts: The sequences and tokens read so far by this data-parallel rank.
    """

    step: int = 0
    samples: int = 0
    guard: GuardState = field(default_factory=GuardState)
    scale: LossScale = field(default_factory=LossScale)
    counts: Counts = field(default_factory=lambda: np.zeros((2, 0, 0), dtype=np.int64))


def require_same_tokens(checkpoint: SavedCheckpoint, store: TokenStore) -> None:
    """Raise InputError if the token shards are not those that a checkpoint was trained on."""
    if checkpoint.facts["data"] != store.digest:
        since = f"have changed since {checkpoint_name(checkpoint.step)} was saved"
        raise InputError(f"{store.folder}: the token shards {since}; restore them, or train with another run.name")


def capture(trainer: Trainer, state: TrainState, recipe: Recipe, store: TokenStore) -> tuple[Tensors, dict[str, Any]]:
    """Return what a checkpoint stores: this process's tensors by part, and the other values for the manifest ("facts").

    All ranks must call it.
    """
    mesh, parameters = trainer.mesh, dict(owned_parameters(trainer.model))
    suffix = "" if mesh.is_single else f"-{mesh.rank}"
    rng = {f"cpu{suffix}": torch.get_rng_state()}
    if trainer.device.is_cuda:
        rng[f"cuda{suffix}"] = torch.cuda.get_rng_state()
    averaged = {} if trainer.average is None else trainer.average.tensors
    tensors: Tensors = {  # the parts of checkpoint.format.PARTS
        "model": {name: parameter.detach() for name, parameter in parameters.items()},
        "optimizer": optimizers.state_tensors(trainer.model, trainer.optimizer),
        "ema": {name: as_shard_of(parameters[name], value) for name, value in averaged.items() if name in parameters},
        "rng": rng,
    }
    facts = {
        "samples": state.samples, "guard": asdict(state.guard), "loss_scale": asdict(state.scale),
        "given": mesh.sum_over_data(torch.from_numpy(state.counts)).tolist(),
        "model": trainer.model.config.to_dict(), "run": recipe.run.name,
        "recipe": digest(recipe), "recipe_toml": dump(recipe), "data": store.digest, "bessemer": __version__,
        "torch": str(torch.__version__), "threads": torch.get_num_threads(), "world": mesh.world,
        "layout": recipe.parallel.model_dump(),
    }  # fmt: skip
    return {part: named for part, named in tensors.items() if named}, facts


@torch.no_grad()
def restore(trainer: Trainer, checkpoint: SavedCheckpoint, store: TokenStore) -> TrainState:
    """Load the state of a verified checkpoint of any layout. Raises InputError if it was trained on other token shards."""
    facts = checkpoint.facts
    require_same_tokens(checkpoint, store)
    parameters = {name: (whole_name(trainer.model, name), p) for name, p in trainer.model.named_parameters()}
    checkpoint.fill("model", parameters.values())
    if "optimizer" in checkpoint:
        optimizers.load_state(trainer.model, trainer.optimizer, checkpoint)
    if trainer.average is not None:
        averaged = ((*parameters[name], value) for name, value in trainer.average.tensors.items())
        checkpoint.fill("ema", [(name, as_shard_of(parameter, value)) for name, parameter, value in averaged])
    suffix, saved = "" if trainer.mesh.is_single else f"-{trainer.mesh.rank}", checkpoint.contents["rng"]
    with checkpoint.open_files() as files:
        if f"cpu{suffix}" in saved:
            torch.set_rng_state(files.whole("rng", f"cpu{suffix}"))
        if trainer.device.is_cuda and f"cuda{suffix}" in saved:
            torch.cuda.set_rng_state(files.whole("rng", f"cuda{suffix}"))
    counts = np.array(facts["given"]) * (trainer.mesh.data_rank == 0)  # one rank takes the counts of all processes
    guard, scale = GuardState.from_dict(facts["guard"]), LossScale(**facts["loss_scale"])
    return TrainState(checkpoint.step, int(facts["samples"]), guard, scale, counts)


class Saver:
    """The writer of a run's checkpoints: at intervals, before a stop and at the end.

    Every process calls it for the same steps.
    """

    def __init__(self, recipe: ResolvedRecipe, run: RunDirectory, trainer: Trainer, store: TokenStore) -> None:
        self._recipe, self._run, self._trainer, self._store = recipe, run, trainer, store
        config = recipe.checkpoint
        self._decay_start = recipe.train.schedule.decay_start(recipe.train.steps)
        self._best: tuple[float, int] | None = None  # loss and step
        self._async: AsyncSaver | None = None
        if trainer.device.is_cuda if config.asynchronous is None else config.asynchronous:
            self._async = AsyncSaver(run.checkpoints, config.keep, trainer.mesh, trainer.optimizer)
            self._async.on_published = self._follow
        self._mirror = Mirror.from_recipe(recipe, run) if trainer.mesh.is_main else None
        self._follow()  # copies checkpoints that a killed run had not copied

    def is_due(self, step: int) -> bool:
        return step % self._recipe.checkpoint.every == 0 or step == self._decay_start

    def is_best(self, step: int, loss: float) -> bool:
        """Return True if checkpoint.keep_best is set and `loss` is below the held-out loss of each saved checkpoint.

        All ranks must call it.
        """
        if not self._recipe.checkpoint.keep_best:
            return False
        is_best = False
        if self._trainer.mesh.is_main:
            if self._best is None or self._best[1] >= step:  # a rollback has removed that checkpoint
                self._best = best_validation(self._run)
            if is_best := self._best is None or loss < self._best[0]:
                self._best = loss, step
        return self._trainer.mesh.any(is_best)

    def save(self, state: TrainState) -> None:
        """Save a checkpoint while the run continues, in the background if the recipe says so.

        A failure, such as a full disk, is recorded, and the next save tries again.
        """
        with self._recording_failures(state):
            if self._async is not None:
                self._async.keep = self._retention(state)
                self._async.save(state.step, *capture(self._trainer, state, self._recipe, self._store))
            else:
                self._write(state)

    def save_now(self, state: TrainState) -> None:
        """Save before the run ends. Raises BessemerError if that fails."""
        self.finish(state)
        try:
            self._write(state)
        except (BessemerError, OSError) as error:
            raise BessemerError(
                f"the checkpoint of step {state.step} could not be saved: {error}. Fix that, and run the same command "
                f"again to continue from {self._last_good()}"
            ) from error

    def finish(self, state: TrainState) -> None:
        """Wait for the save in the background, and record its failure."""
        if self._async is not None:
            with self._recording_failures(state):
                self._async.finish()

    def _write(self, state: TrainState) -> None:
        release_unused(self._trainer.device)
        tensors, facts = capture(self._trainer, state, self._recipe, self._store)
        save(self._run.checkpoints, state.step, tensors, facts, self._retention(state), self._trainer.mesh)
        self._follow()

    def _follow(self) -> None:
        """Start to copy published checkpoints to the mirror, in a thread."""
        if self._mirror is not None:
            self._mirror.follow(self._report_mirror)

    def _report_mirror(self, message: str) -> None:
        warn(f"{message}; the training continues, and the next checkpoint tries again")
        step = (checkpoint_steps(self._run.checkpoints) or [0])[-1]
        record(self._run.incidents, MIRROR_FAILED, step=step, cause=message, action="training continued")

    def _retention(self, state: TrainState) -> Retention:
        guard, steps = self._recipe.guard, self._recipe.train.steps
        # A finished run does not roll back.
        distance = rollback_distance(guard, steps) if guard.max_rollbacks and state.step < steps else 0
        return Retention(
            self._recipe.checkpoint.keep, self._decay_start, state.guard.healthy_until, distance,
            best=None if self._best is None else self._best[1],
        )  # fmt: skip

    @contextmanager
    def _recording_failures(self, state: TrainState) -> Iterator[None]:
        """Record a failure of the block and print a warning."""
        try:
            yield
        except (BessemerError, OSError) as error:
            cause = str(error)
            if not isinstance(error, BackgroundFailure):  # a BackgroundFailure already names its step
                cause = f"the checkpoint of step {state.step} failed: {cause}"
            self._best = None
            warn(f"{cause}; the training continues and the next save tries again; last good one: {self._last_good()}")
            if self._trainer.mesh.is_main:
                incidents = self._run.incidents
                record(incidents, CHECKPOINT_FAILED, step=state.step, cause=cause, action="training continued")

    def _last_good(self) -> str:
        steps = checkpoint_steps(self._run.checkpoints)
        return f"step {steps[-1]}" if steps else "the start"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._async is not None:
            self._async.__exit__(*error)
        ends_well = error[1] is None or isinstance(error[1], BessemerError)
        if ends_well and self._mirror is not None and not self._mirror.finish():
            self._report_mirror(f"{self._mirror.folder}: copying to the mirror did not finish in time")


@dataclass(frozen=True)
class Restored:
    """A trained model in its trainer, with the state of its checkpoint."""

    trainer: Trainer
    state: TrainState


@torch.no_grad()
def open_trained(
    recipe: ResolvedRecipe, run: RunDirectory, store: TokenStore, device: Device, weights: Weights
) -> Restored:
    """Load the checkpoints that `weights` chooses from a run, or the moving average in them if the run has one.

    The result is for scoring only: its optimizer has no state.
    """
    checkpoints = trained_checkpoints(run, weights)
    checkpoint = checkpoints[0]
    # Nothing is trained: a user's optimizer need not be loaded, and the average needs no second copy of the weights.
    no_code = {"kind": "adamw", "settings": None, "code": None}
    recipe = recipe.changed(train={"ema": 0.0, "optimizer": no_code})
    config = ModelConfig.from_dict(checkpoint.facts["model"])
    trainer = Trainer(recipe, build_model(config, recipe.run.seed), device, store.end_of_text, len(store.sources))
    if weights.average > 1:
        with ExitStack() as stack:
            read = weight_reader(checkpoints, stack)
            for name, parameter in trainer.model.named_parameters():
                parameter.copy_(read(name))
    else:
        checkpoint.fill("ema" if "ema" in checkpoint else "model", trainer.model.named_parameters())
    trainer.model.eval()
    return Restored(trainer, TrainState(checkpoint.step, int(checkpoint.facts["samples"])))


def load_model(recipe: ResolvedRecipe, run: RunDirectory, weights: Weights = NEWEST) -> tuple[TokenStore, Restored]:
    """Return the token shards of a run, and its model with the weights that `weights` chooses, on the recipe's device."""
    store = TokenStore.open(run.tokens)
    return store, open_trained(recipe, run, store, devices.choose(recipe.train), weights)
