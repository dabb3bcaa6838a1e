"""Stop requests: the current step is finished and saved before the process exits with code 75."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

from bessemer import interrupt
from bessemer.errors import Stopped
from bessemer.parallel.mesh import SINGLE_PROCESS, ProcessMesh

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # USR1: sent by schedulers before the time limit


class StopSignal:
    """Context in which a stop signal sets `requested` instead of ending the process; a Ctrl-C after that ends it at once."""

    def __init__(self, mesh: ProcessMesh = SINGLE_PROCESS) -> None:
        self.mesh = mesh
        self.requested: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # handlers can be set only there
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for number, handler in self._before.items():
            # The command repeats SIGUSR1 until all have stopped: after a stop it says nothing new.
            is_repeated = number == signal.SIGUSR1 and kind is not None and issubclass(kind, Stopped)
            signal.signal(number, _pass_over if is_repeated else handler)

    def received(self) -> str | None:
        """The signal that any process received; all processes return it after the same step. Collective."""
        if self.mesh.is_single:
            return self.requested
        if not self.mesh.any(self.requested is not None):
            return None
        names: list[str | None] = self.mesh.gather(self.requested)
        return next(name for name in names if name is not None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = interrupt.signal_name(number)


def _pass_over(number: int, frame: FrameType | None) -> None:
    """As SIG_IGN, which processes started from here would inherit."""
