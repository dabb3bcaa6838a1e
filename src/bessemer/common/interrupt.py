"""Stop signals, recorded in a list because a broad `except` in a library can swallow KeyboardInterrupt."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from bessemer.common.errors import Stopped

# Ctrl-C; from schedulers the end of a job and a warning before its time limit; a lost terminal; the CPU time limit
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU)
RECEIVED: list[str] = []  # names of received stop signals


def listen() -> None:
    """Install handlers that raise KeyboardInterrupt on a stop signal (SIGNALS) and record its name in RECEIVED.

    Training later replaces them by its own handlers.
    """
    RECEIVED.clear()
    sys.unraisablehook = _report_unraisable
    handle(stop)


def handle(handler: Any) -> dict[signal.Signals, Any]:
    """Set the handler of all stop signals, and return the previous handlers.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers only there
        return {}
    kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return {number: signal.signal(number, handler) for number in SIGNALS if number not in kept}


def _report_unraisable(what: sys.UnraisableHookArgs) -> None:
    """Hide a KeyboardInterrupt that could not propagate, such as one raised in a destructor; RECEIVED records it."""
    if what.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(what)


def check() -> None:
    """Raise KeyboardInterrupt if a stop signal was received, in case a library caught the exception of its handler."""
    if RECEIVED:
        raise KeyboardInterrupt


def stop(number: int, frame: Any) -> None:
    """Record a stop signal and raise KeyboardInterrupt.

    While an earlier stop is handled, only Ctrl-C raises again, because schedulers repeat their signals and cleanup must
    finish.
    """
    RECEIVED.append(signal.Signals(number).name)
    if number == signal.SIGINT or not _is_stopping():
        raise KeyboardInterrupt


def _is_stopping() -> bool:
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt | Stopped):
        error = error.__context__
    return error is not None


def plain_name(number: int) -> str:
    """Return the name of a signal number."""
    with suppress(ValueError):  # a real-time signal
        return signal.Signals(number).name
    return f"signal {number}"


def end_with_parent(number: int) -> None:
    """Make the kernel send this process the signal `number` when its parent process ends."""
    if sys.platform.startswith("linux"):
        parent_death_signal = 1  # PR_SET_PDEATHSIG of sys/prctl.h
        ctypes.CDLL(None).prctl(parent_death_signal, number)
