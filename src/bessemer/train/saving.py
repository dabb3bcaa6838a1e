"""Checkpoints of a training: at every interval, before a stop and at the end; beside the training where that is asked for."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from bessemer.checkpoint import AsyncSaver, save
from bessemer.errors import BessemerError
from bessemer.guard.incidents import record
from bessemer.recipe import Recipe
from bessemer.run import RunFolder
from bessemer.terminal import warn
from bessemer.tokens.shards import TokenStore
from bessemer.train.device import release_unused
from bessemer.train.state import Position, capture
from bessemer.train.step import TrainStep


class Saver:
    """Saves a run's checkpoints. Every process makes one and calls it for the same steps."""

    def __init__(self, recipe: Recipe, run: RunFolder, step: TrainStep, store: TokenStore) -> None:
        self._recipe, self._run, self._step, self._store = recipe, run, step, store
        asked, steps = recipe.checkpoint.asynchronous, recipe.train.steps
        assert steps is not None, "the recipe is resolved"
        self._branch = _branch_of(recipe)
        self._every = recipe.checkpoint.every or steps
        beside = step.device.is_cuda if asked is None else asked
        self._beside = AsyncSaver(run.checkpoints, recipe.checkpoint.keep, step.team, self._branch) if beside else None

    def follow(self, recipe: Recipe) -> None:
        """Go on under a recipe with another number of steps."""
        self._recipe, self._branch = recipe, _branch_of(recipe)
        if self._beside is not None:
            self._beside.branch = self._branch

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is saved after so many steps."""
        return step % self._every == 0 or step == self._branch

    def save(self, position: Position) -> None:
        """At an interval. A save that fails (a full disk) costs no training: it is recorded, and the next one tries again."""
        try:
            if self._beside is not None:
                self._beside.save(position.step, *capture(self._step, position, self._recipe, self._store))
            else:
                self._write(position)
        except (BessemerError, OSError) as error:
            self._failed(position, error)

    def save_now(self, position: Position) -> None:
        """What must be on the disk before the run may end. Raises BessemerError or OSError when it cannot be."""
        if self._beside is not None:
            try:
                self._beside.finish()
            except (BessemerError, OSError) as error:
                self._failed(position, error)
        self._write(position)

    def _write(self, position: Position) -> None:
        release_unused(self._step.device)
        tensors, facts = capture(self._step, position, self._recipe, self._store)
        keep, team = self._recipe.checkpoint.keep, self._step.team
        save(self._run.checkpoints, position.step, tensors, facts, keep, team, self._branch)

    def _failed(self, position: Position, error: Exception) -> None:
        warn(f"{error}; training goes on, the next checkpoint tries again")
        if self._step.team.is_first:
            record(
                self._run.incidents, step=position.step, what="checkpoint_failed", cause=str(error),
                action="training went on",
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._beside is not None:
            self._beside.__exit__(kind, error, trace)


def _branch_of(recipe: Recipe) -> int | None:
    """The step at which a longer run of the same recipe parts from this one: saved, and kept whatever comes after it."""
    schedule = recipe.train.schedule
    return schedule.decay_start(recipe.train.steps or 0) if schedule.kind == "wsd" else None
