"""Stop requests during a training: a signal to any process, or a callback, stops all processes after the same step."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

from bessemer.common import interrupt
from bessemer.common.errors import BessemerError, Stopped
from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh


class Abandoned(Exception):
    """A validation was abandoned because of a stop request."""


class StopSignal:
    """A context in which a stop signal sets `requested` instead of ending the process; another Ctrl-C ends it at once."""

    def __init__(self, mesh: ProcessMesh = SINGLE_PROCESS) -> None:
        self.mesh = mesh
        self.requested: str | BessemerError | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = interrupt.handle(self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # A process that lost another one must live until it has reported the loss: torchrun sends SIGTERM to all at once.
        is_crash = kind is not None and not issubclass(kind, (BessemerError, KeyboardInterrupt))
        for number, handler in self._before.items():
            # The command repeats SIGUSR1 until all have stopped, so it is ignored after a stop.
            is_repeated = number == signal.SIGUSR1 and kind is not None and issubclass(kind, Stopped)
            # An empty handler is used because child processes would inherit SIG_IGN.
            signal.signal(number, (lambda number, frame: None) if is_repeated or is_crash else handler)

    def request(self, reason: str) -> None:
        """Request a stop; the first reason is kept."""
        self.requested = self.requested or reason

    def fail(self, error: BessemerError) -> None:
        """Request a stop that ends with an error; the first error is kept."""
        if not isinstance(self.requested, BessemerError):
            self.requested = error

    @property
    def acts_at_once(self) -> bool:
        """True if this process is alone and has a request; several processes agree on it after a logged step."""
        return self.mesh.is_single and self.requested is not None

    def is_requested(self) -> bool:
        """Return True if any process has a request. All ranks must call it."""
        return self.mesh.any(self.requested is not None)

    def abandon(self, amount: float = 1, is_alone: bool = False) -> None:
        """Raise Abandoned if a stop is requested. A validation calls it as its progress callback and passes an unused `amount`.

        All ranks must call it, unless a single process runs alone (`is_alone`).
        """
        if self.requested if is_alone else self.is_requested():
            raise Abandoned

    def received(self) -> str | BessemerError | None:
        """Return the request of any process, an error before others; None if there is none.

        All ranks must call it, and all return the same request after the same step.
        """
        requests: list[str | BessemerError | None] = self.mesh.gather(self.requested) if self.is_requested() else []
        return min((one for one in requests if one is not None), key=lambda one: isinstance(one, str), default=None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.request(name := interrupt.plain_name(number))
        interrupt.RECEIVED.append(name)  # a signal after the last step ends the command before its next stage
