"""Signals: SIGINT, SIGTERM and SIGUSR1 are remembered in a flag, because a broad `except` in a library can swallow
KeyboardInterrupt."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

ASKED = threading.Event()
NODE = "BESSEMER_NODE"  # folder of the command that started this process; unset where another launcher did
SIGNAL_FILE = "signal"  # in there: the signal that reached the command, which passes all of them on as SIGUSR1

_last: list[str] = []


def listen() -> None:
    """From here on SIGINT, SIGTERM and SIGUSR1 (of schedulers, before the time limit) raise KeyboardInterrupt, and are
    remembered. Training has handlers of its own."""
    ASKED.clear()
    _last.clear()
    sys.unraisablehook = _report_unraisable
    if threading.current_thread() is threading.main_thread():  # only there may handlers be set
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, _interrupt)


def _report_unraisable(what: sys.UnraisableHookArgs) -> None:
    """A signal that came while Python ran a callback of its own is in the flag; it is no error to show."""
    if what.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(what)


def check() -> None:
    """Raise KeyboardInterrupt when one was asked for and came to nothing, as happens while a library is imported."""
    if ASKED.is_set():
        raise KeyboardInterrupt


def stop(number: int, frame: Any) -> NoReturn:
    """A signal handler: remember the signal, and raise KeyboardInterrupt."""
    _last[:] = [signal.Signals(number).name]
    raise KeyboardInterrupt


def name_signal(place: Path) -> None:
    """Write which signal was received into the folder that the processes of this command look in."""
    (place / SIGNAL_FILE).write_text(_last[0] if _last else "SIGINT")


def signal_name(number: int) -> str:
    """Name of a stop signal: SIGUSR1 from our own command stands for the one that the command received."""
    place = os.environ.get(NODE)
    path = Path(place) / SIGNAL_FILE if place and number == signal.SIGUSR1 else None
    return path.read_text() if path is not None and path.exists() else plain_name(number)


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


def name_process(name: str) -> None:
    """How lists of processes name this one (`ps -o comm`, top), at most 15 characters. A fork has the command line of the process
    that it is a fork of."""
    if sys.platform.startswith("linux"):
        set_name = 15  # PR_SET_NAME
        ctypes.CDLL(None).prctl(set_name, name.encode(), 0, 0, 0)


def _interrupt(number: int, frame: Any) -> NoReturn:
    ASKED.set()
    stop(number, frame)
