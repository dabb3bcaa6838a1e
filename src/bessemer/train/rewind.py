"""A training at an earlier step of a run, in a scratch folder: to take steps again without touching the run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bessemer.checkpoint import verify
from bessemer.checkpoint.protocol import LATEST, checkpoint_folder, published
from bessemer.checkpoint.reading import SavedCheckpoint
from bessemer.errors import BessemerError
from bessemer.guard.journal import Journal
from bessemer.guard.policy import GuardState, Verdict
from bessemer.guard.pulse import Pulse
from bessemer.parallel.mesh import SINGLE_PROCESS
from bessemer.recipe import Parallel, Recipe
from bessemer.run import RunFolder
from bessemer.terminal import warn
from bessemer.tokens.loader import Batch
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train.healing import judge_step, rate_factor
from bessemer.train.loop import advanced
from bessemer.train.recompute import blocks_recomputed
from bessemer.train.session import set_up
from bessemer.train.state import Position
from bessemer.train.step import Gradients
from bessemer.train.task import config_of
from bessemer.train.training import Training


def in_one_process(recipe: Recipe, precision: str | None = None) -> Recipe:
    """A resolved recipe for one process, in another precision where one is given."""
    train = recipe.train if precision is None else recipe.train.model_copy(update={"precision": precision})
    checkpoint = recipe.checkpoint.model_copy(update={"asynchronous": False})
    return recipe.model_copy(update={"train": train, "checkpoint": checkpoint, "parallel": Parallel()})


def checkpoint_before(run: RunFolder, step: int, journal: Journal) -> SavedCheckpoint | None:
    """The newest whole checkpoint of at most `step` steps on the path that the journal's rollbacks give; None: the start."""
    for number in reversed(published(run.checkpoints)):
        if not 0 < number <= step:
            continue
        try:
            found = verify(checkpoint_folder(run.checkpoints, number))
        except BessemerError as error:
            warn(f"{error}; an earlier checkpoint is taken")
            continue
        before = GuardState.from_dict(found.facts["guard"]).num_rollbacks
        if before <= journal.num_rollbacks and journal.keeps(number, before):
            return found
    return None


@contextmanager
def training_at(
    recipe: Recipe, run: RunFolder, checkpoint: SavedCheckpoint | None, journal: Journal
) -> Iterator[Training]:
    """A training of a resolved recipe in this process, at a checkpoint of the run or at its start. The run's folder is only
    read. Logs and the watchdog of the training are off."""
    device = devices.choose(recipe.train)
    devices.make_deterministic()
    store = TokenStore.open(run.tokens)
    config = config_of(recipe, store.vocabulary, len(store.labels))
    with tempfile.TemporaryDirectory(prefix="bessemer-") as place:
        scratch = RunFolder(Path(place))
        os.symlink(run.tokens.resolve(), scratch.tokens)
        for file in (run.plan, run.recipe):
            if file.exists():
                shutil.copy(file, place)
        journal.copy_to(scratch.journal)
        if checkpoint is not None:
            scratch.checkpoints.mkdir()
            os.symlink(checkpoint.folder.resolve(), scratch.checkpoints / checkpoint.folder.name)
            (scratch.checkpoints / LATEST).write_text(checkpoint.folder.name)
        recomputed = blocks_recomputed(recipe.train, recipe.parallel, config, device)
        silent = Pulse(None, 0, scratch.path / "stacks.txt", 0)
        yield set_up(recipe, config, scratch, store, device, SINGLE_PROCESS, recomputed, 1.0, 0, lambda x: x, silent)


def batch_of(training: Training, step: int) -> Batch:
    """The batch of a step (1-based)."""
    sizes = training.pace.sizes
    return training.loader.batch(sizes.first(step - 1), sizes.sequences(step - 1))


def replayed(
    training: Training,
    position: Position,
    until: int,
    on_step: Callable[[int, Gradients], None] = lambda step, gradients: None,
) -> Position:
    """Take the steps again from `position`, where the training stands, up to `until`. Returns the position there.

    on_step: called with each step (1-based) and its gradients. Raises BessemerError where a step raises an alarm after which
    the run rolled back or stopped: there is no way past it.
    """
    step = training.step
    while position.step < until:
        batch = batch_of(training, position.step + 1)
        gradients = step.gradients(batch, position.scale)
        judgement = judge_step(training, position, gradients)
        on_step(position.step + 1, gradients)
        if judgement.verdict is Verdict.HEAL and judgement.alarm is not None and judgement.alarm.kind == "nonfinite":
            raise BessemerError(
                f"step {position.step + 1}: {judgement.alarm.cause}, and so did the steps before it: the steps cannot be taken "
                f"again as far as step {until}; look at step {judgement.alarm.onset}"
            )
        if judgement.verdict in (Verdict.APPLY, Verdict.HEAL):
            step.update(position.step, gradients.grad_norm, rate_factor(training.journal, position.step))
        position = advanced(training, position, batch, gradients, judgement.state)
    return position
