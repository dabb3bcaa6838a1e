"""Daft, started quietly, run so that a person can stop it.

The engine works in a thread of its own while the main thread waits in short steps: a signal is then handled
within a tenth of a second even while native code runs. Embedded by default; with DAFT_RUNNER=ray the same
plans run on a Ray cluster that sees the run folder and the sources under the same paths.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from bessemer.errors import BessemerError

Result = TypeVar("Result")

STOP = threading.Event()
"""Set when the person stops the build; work inside the engine looks at it between documents."""

STOP_SECONDS = 2.0
"""How long a stopped build waits for the engine to let go of its files and of Python."""

SETTLE_SECONDS = 0.1
"""After its last call into Python, the engine's thread still has to hand back the interpreter lock."""


class Calls:
    """How many calls of our Python code the engine has under way.

    The engine reports a failed or cancelled plan while its threads still run Python. A process that ends then
    is aborted ("exception not rethrown"): the interpreter unwinds those threads through native frames.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0

    def __enter__(self) -> None:
        with self._changed:
            self._under_way += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until there are none, or for so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way == 0, seconds)


CALLS = Calls()


def quiet_daft() -> Any:
    """The Daft module, with its usage reports, progress bars and log lines off."""
    os.environ.setdefault("DAFT_ANALYTICS_ENABLED", "0")
    os.environ.setdefault("DAFT_PROGRESS_BAR", "0")
    os.environ.setdefault("DAFT_SHOW_QUERY_ID", "0")
    os.environ.setdefault("DAFT_RUNNER", "native")
    import daft

    logging.getLogger("daft").setLevel(logging.CRITICAL)
    return daft


def run(work: Callable[[], Result], poll: Callable[[], None] = lambda: None) -> Result:
    """Do `work` in a thread; `poll` is called about ten times a second meanwhile.

    OSError and BessemerError pass; any other failure becomes a BessemerError with its first line.
    """
    results: list[Result] = []
    failures: list[BaseException] = []

    def target() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    STOP.clear()
    thread = threading.Thread(target=target, name="corpus-engine", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
            poll()
    except BaseException:
        _wind_up(thread)
        raise
    if not failures:
        return results[0]
    _wind_up(thread)
    error = failures[0]
    if isinstance(error, OSError | BessemerError | KeyboardInterrupt | MemoryError):
        raise error
    if f"os error {errno.ENOSPC}" in str(error):  # the engine wraps it; the person should read what it is
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
    first = (str(error).strip().splitlines() or [""])[0]
    raise BessemerError(f"corpus: the data engine failed: {type(error).__name__}: {first}") from error


def _wind_up(thread: threading.Thread) -> None:
    """Let the work end early, and wait until it has."""
    STOP.set()
    deadline = time.monotonic() + STOP_SECONDS
    thread.join(STOP_SECONDS)
    CALLS.wait(max(deadline - time.monotonic(), 0))
    time.sleep(SETTLE_SECONDS)
