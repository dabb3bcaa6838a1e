"""Work in this process that a person can stop.

Work goes on in a thread of its own while the main thread waits in short steps: a signal is then handled within
a tenth of a second even while native code runs. Work that is cut into tasks goes to other processes or to a
cluster (tasks.py).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from bessemer import interrupt
from bessemer.errors import BessemerError, Stopped

Result = TypeVar("Result")

STOP = threading.Event()
"""Set when the person stops the build; work inside the engine looks at it between documents."""

STOP_SECONDS = 2.0
"""How long a stopped build waits for the work to let go of its files."""


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
            interrupt.check()
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
    if f"os error {errno.ENOSPC}" in str(error):  # a library wraps it; the person should read what it is
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
    first = (str(error).strip().splitlines() or [""])[0]
    raise BessemerError(f"corpus: the work failed: {type(error).__name__}: {first}") from error


def check_stop() -> None:
    """Raise Stopped when the person stops the build; long work calls it now and then."""
    if STOP.is_set():
        raise Stopped("corpus: stopped")


def _wind_up(thread: threading.Thread) -> None:
    """Let the work end early, and wait until it has."""
    STOP.set()
    thread.join(STOP_SECONDS)
