"""Ports for processes that connect on this machine."""

import random
import socket
import time


def free_port() -> int:
    """Return a port without a listener, below the kernel's range for connections (from 32768 on Linux).

    A port of that range could be taken between the check and its use.
    """
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(15_000, 30_000)
        with socket.socket() as own:
            try:
                own.bind(("localhost", port))
            except OSError:
                continue
            return port


def wait_for_listener(port: int, seconds: float = 120.0) -> None:
    """Wait until a process listens at a port of this machine, without sending anything."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as own:
            try:
                own.bind(("localhost", port))
            except OSError:
                return
        time.sleep(0.05)
    raise AssertionError(f"nobody listens at {port}")
