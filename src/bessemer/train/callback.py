"""Callbacks: classes that a training calls at its start, at logged steps, validations and checkpoints, and at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from bessemer.common import extensions
from bessemer.common.console import warn
from bessemer.common.errors import BessemerError, Stopped
from bessemer.recipe.uses import ExtensionBase
from bessemer.run.files import read_steps

if TYPE_CHECKING:  # a recipe that names a callback is loaded without torch
    from bessemer.train.setup import Training
    from bessemer.train.stop import StopSignal

BUILT_IN: Mapping[str, str] = {}


@dataclass(frozen=True)
class Moment:
    """A moment of a training, as a callback sees it.

    Attributes:
        step: The number of completed steps.
        steps: The number of steps of the whole run.
        metrics: The values of a logged step or a validation, by their names in metrics.jsonl; equal on every process.
        run: The run directory.
        rank: The rank of this process.
        world: The number of processes.
        stopped_by: The reason why the training stopped, at an `end` before the last step; else "".
    """

    step: int
    steps: int
    metrics: Mapping[str, Any]
    run: Path
    rank: int
    world: int
    stopped_by: str = ""

    @property
    def is_main(self) -> bool:
        """True on rank 0, the process that writes files."""
        return self.rank == 0

    def history(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl so far of a kind, such as "train" or "validation"."""
        return [row for row in read_steps(self.run / "metrics.jsonl") if row.get("kind") == kind]


class Callback(ExtensionBase):
    """Base class for training callbacks. Fields of a subclass are its settings.

    Every process has its own instance and calls each method at the same steps. Each method except `end` may return a reason to
    stop: all processes then save and stop together, as after a signal. An exception stops the training too. Names of attributes
    that change must start with an underscore.
    """

    one_of = ("start", "step", "validation", "checkpoint", "end")

    def start(self, moment: Moment) -> str | None:
        """Called before the first step, also of a resumed training."""

    def step(self, moment: Moment) -> str | None:
        """Called after each logged step, every `train.log_every` steps, and after the last one."""

    def validation(self, moment: Moment) -> str | None:
        """Called after each validation. A returned text stops the training and is reported as the reason."""

    def checkpoint(self, moment: Moment) -> str | None:
        """Called after each checkpoint, which a background save may still be writing."""

    def end(self, moment: Moment) -> None:
        """Called after the last step, and after a stop or an error."""


@dataclass
class Callbacks:
    """The callbacks of a training on this process. Leaving the context calls `end`.

    `stop` receives the reasons to stop that callbacks return, and the errors that they raise.
    """

    members: Sequence[Callback]
    training: Training
    stop: StopSignal
    step: int = field(init=False)

    def call(self, method: str, step: int, metrics: Mapping[str, Any] | None = None, stopped_by: str = "") -> None:
        """Call `method` of each callback after `step` steps, with a `Moment` that has `metrics` and `stopped_by`.

        A returned reason or an error goes to `stop`.
        """
        self.step, mesh, steps = step, self.training.trainer.mesh, self.training.steps
        shown = MappingProxyType(dict(metrics or {}))
        moment = Moment(step, steps, shown, self.training.run.path, mesh.rank, mesh.world, stopped_by)
        for member in self.members:
            try:
                reason = getattr(member, method)(moment)
                if not isinstance(reason, str | None):
                    raise TypeError(f"returned {type(reason).__name__}; return a reason to stop, as text, or None")
            except Exception as error:
                self.stop.fail(extensions.failure(member, method, error, f"step {step}"))
            else:
                if reason is not None and method != "end" and step < steps:
                    self.stop.request(f"{type(member).__name__}: {reason}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *traceback: object) -> None:
        """Call `end` of each callback. An error in it is raised on every process; after a failed training it is only printed."""
        if not self.members or not isinstance(error, BessemerError | None):
            return
        earlier = self.stop.requested
        self.call("end", self.step, stopped_by=str(error or ""))
        if error is None or isinstance(error, Stopped):
            if isinstance(failed := self.stop.received(), BessemerError):
                raise failed
        elif self.stop.requested is not earlier:
            warn(f"{self.stop.requested}")
