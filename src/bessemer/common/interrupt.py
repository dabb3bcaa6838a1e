"""Stop signals: each is remembered in a list, because a broad `except` in a library can swallow KeyboardInterrupt."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from typing import Any

from bessemer.common.errors import Stopped

# Of a terminal or a user; of schedulers: the end of a job, before its time limit, a lost terminal, the limit of processor time.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU)
RECEIVED: list[str] = []  # names of the stop signals


def listen() -> None:
    """Raise KeyboardInterrupt on a stop signal from now on, and remember the signal. Training sets its own handlers."""
    RECEIVED.clear()
    sys.unraisablehook = _report_unraisable
    handle(stop)


def handle(handler: Any) -> dict[signal.Signals, Any]:
    """Set the handler of all stop signals. Returns the handlers of before.

    A SIGHUP that is ignored stays ignored, as after nohup.
    """
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        return {}
    kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return {number: signal.signal(number, handler) for number in SIGNALS if number not in kept}


def _report_unraisable(what: sys.UnraisableHookArgs) -> None:
    """Hide a KeyboardInterrupt from a callback of Python itself: it is in RECEIVED."""
    if what.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(what)


def check() -> None:
    """Raise KeyboardInterrupt when a stop was requested and swallowed, as happens while a library is imported."""
    if RECEIVED:
        raise KeyboardInterrupt


def stop(number: int, frame: Any) -> None:
    """Handle a stop signal: remember it and raise KeyboardInterrupt.

    While an earlier stop is handled only Ctrl-C raises again: schedulers repeat their signals, and what cleans up must end.
    """
    remember(signal.Signals(number).name)
    if number == signal.SIGINT or not _is_stopping():
        raise KeyboardInterrupt


def remember(name: str) -> None:
    """Remember that a stop was requested, and by which signal."""
    RECEIVED.append(name)


def _is_stopping() -> bool:
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt | Stopped):
        error = error.__context__
    return error is not None


def last_signal() -> str:
    """Return the name of the stop signal that was received last."""
    return RECEIVED[-1] if RECEIVED else "SIGINT"


def plain_name(number: int) -> str:
    """Name of any signal."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the one that started it ends."""
    if sys.platform.startswith("linux"):
        parent_death_signal = 1  # PR_SET_PDEATHSIG of sys/prctl.h
        ctypes.CDLL(None).prctl(parent_death_signal, number)
