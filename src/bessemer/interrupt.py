"""The wish to stop, which a library may swallow: an exception raised by a signal ends where somebody catches all."""

from __future__ import annotations

import signal
import threading
from typing import Any, NoReturn

ASKED = threading.Event()


def listen() -> None:
    """From here on SIGINT and SIGTERM raise KeyboardInterrupt, and are remembered. Training has handlers of its own."""
    ASKED.clear()
    if threading.current_thread() is threading.main_thread():  # only there may handlers be set
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)


def check() -> None:
    """Raise KeyboardInterrupt when one was asked for and came to nothing, as happens while a library is imported."""
    if ASKED.is_set():
        raise KeyboardInterrupt


def _interrupt(number: int, frame: Any) -> NoReturn:
    ASKED.set()
    raise KeyboardInterrupt
