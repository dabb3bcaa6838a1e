"""Run work in a thread of this process, so that signals are handled within 0.1 s even while native code runs."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from bessemer import interrupt
from bessemer.errors import BessemerError, Stopped

Result = TypeVar("Result")

STOP = threading.Event()  # set when the user stops the build; long work looks at it between documents
STOP_SECONDS = 2.0  # how long a stopped build waits for the work to let go of its files


def run(work: Callable[[], Result], stage: str = "corpus") -> Result:
    """Run `work` in a thread. OSError and BessemerError pass; any other failure becomes a BessemerError with the stage and its
    first line."""
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
    finally:
        if not results:
            STOP.set()
            thread.join(STOP_SECONDS)
    if not failures:
        return results[0]
    error = failures[0]
    if isinstance(error, OSError | BessemerError | KeyboardInterrupt | MemoryError):
        raise error
    if f"os error {errno.ENOSPC}" in str(error):  # a library wraps it
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
    raise BessemerError(f"{stage}: the work failed: {type(error).__name__}: {first_line(error)}") from error


def check_stop() -> None:
    """Raise Stopped when the user stops the build; long work calls it now and then."""
    if STOP.is_set():
        raise Stopped("stopped")


def require(holds: bool, problem: str) -> None:
    """Raise BessemerError for counts that do not add up, which is a fault of this program."""
    if not holds:
        raise BessemerError(f"corpus: {problem}; nothing was written; please report this")


def first_line(error: BaseException) -> str:
    """The first line of an error's message; "" for none."""
    return (str(error).strip().splitlines() or [""])[0]
