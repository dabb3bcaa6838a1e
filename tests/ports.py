"""Ports for processes that meet on this machine."""

import random
import socket
import time


def free_port() -> int:
    """A port that nobody listens at, from below those that the kernel gives to connections (from 32768 on Linux): one of these
    could be taken between being looked for and being used."""
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
    """Until somebody listens at a port of this machine; nothing is said to them."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as own:
            try:
                own.bind(("localhost", port))
            except OSError:
                return
        time.sleep(0.05)
    raise AssertionError(f"nobody listens at {port}")
