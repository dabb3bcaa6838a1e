"""Stop requests during a training: a signal to any process, or its callback, stops all of them after the same step."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

from bessemer.common import interrupt
from bessemer.common.errors import BessemerError, Stopped
from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh


class Abandoned(Exception):
    """A validation was abandoned for a stop request."""


class StopSignal:
    """Context in which a stop signal sets `requested` instead of ending the process; a Ctrl-C after that ends it at once."""

    def __init__(self, mesh: ProcessMesh = SINGLE_PROCESS) -> None:
        self.mesh = mesh
        self.requested: str | BessemerError | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = interrupt.handle(self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # A process that lost another one must live until it has reported that: torchrun sends SIGTERM to all at once.
        is_crash = kind is not None and not issubclass(kind, (BessemerError, KeyboardInterrupt))
        for number, handler in self._before.items():
            # The command repeats SIGUSR1 until all have stopped: after a stop it says nothing new.
            is_repeated = number == signal.SIGUSR1 and kind is not None and issubclass(kind, Stopped)
            # Not SIG_IGN, which processes started from here would inherit.
            signal.signal(number, (lambda number, frame: None) if is_repeated or is_crash else handler)

    def request(self, reason: str) -> None:
        """Ask for a stop."""
        self.requested = self.requested or reason

    def fail(self, error: BessemerError) -> None:
        """Ask for a stop that ends with an error; the first one counts."""
        if not isinstance(self.requested, BessemerError):
            self.requested = error

    @property
    def acts_at_once(self) -> bool:
        """True where this process is alone and has a request; several agree on it after a logged step."""
        return self.mesh.is_single and self.requested is not None

    def is_requested(self) -> bool:
        """True where any process has a request. Collective."""
        return self.mesh.any(self.requested is not None)

    def abandon(self, amount: float = 1, is_alone: bool = False) -> None:
        """Raise Abandoned where a stop is requested, as progress of a validation. Collective, unless of one process alone."""
        if self.requested if is_alone else self.is_requested():
            raise Abandoned

    def received(self) -> str | BessemerError | None:
        """The signal or request of any process, an error before others; all return it after the same step. Collective."""
        found: list[str | BessemerError | None] = self.mesh.gather(self.requested) if self.is_requested() else []
        return min((one for one in found if one is not None), key=lambda one: isinstance(one, str), default=None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.request(name := interrupt.plain_name(number))
        interrupt.remember(name)  # one that comes after the last step ends the command before its next stage
