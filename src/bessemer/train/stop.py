"""Stop signals: the step in hand is finished and saved before the process leaves with exit code 75."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from bessemer import interrupt
from bessemer.parallel.team import ALONE, Team

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # USR1: what schedulers send before the time limit


class StopSignal:
    """While entered, a stop signal sets `requested` instead of ending the process; a second Ctrl-C ends it at once."""

    def __init__(self, team: Team = ALONE) -> None:
        self.team = team
        self.requested: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self) -> str | None:
        """The signal that asked any of the processes to stop; all hear of it after the same step."""
        if self.team.is_alone:
            return self.requested
        if not self.team.any(self.requested is not None):
            return None
        names: list[str | None] = self.team.gather(self.requested)
        return next(name for name in names if name is not None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = interrupt.signal_name(number)
