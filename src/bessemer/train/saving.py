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
from bessemer.train.state import Position, capture
from bessemer.train.step import TrainStep


class Saver:
    """Saves a run's checkpoints. Every process makes one and calls it for the same steps."""

    def __init__(self, recipe: Recipe, run: RunFolder, step: TrainStep, store: TokenStore) -> None:
        self._recipe, self._run, self._step, self._store = recipe, run, step, store
        asked = recipe.checkpoint.asynchronous
        beside = step.device.is_cuda if asked is None else asked
        self._beside = AsyncSaver(run.checkpoints, recipe.checkpoint.keep, step.team) if beside else None

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
        tensors, facts = capture(self._step, position, self._recipe, self._store)
        save(self._run.checkpoints, position.step, tensors, facts, self._recipe.checkpoint.keep, self._step.team)

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
