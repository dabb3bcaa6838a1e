"""The store through which the nodes meet, torch's TCPStore at the endpoint: who hosts it, and how long it is waited for.

The agent of the endpoint's machine, the first node, hosts it, so it is lost with that node. The agents of the other nodes then
wait until it answers again. The name of the endpoint is resolved anew at each try: a node may come back at another address.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

from bessemer.errors import InputError

STORE_SECONDS = 5.0  # for a store to answer
RETRY_SECONDS = 1.0
UNTOLD_SECONDS = 5.0  # nodes are not started at the same instant
TAKE_OVER_SECONDS = 30.0  # for another agent of the endpoint's machine to host the store that was lost
DEAD_SECONDS = 30  # without an answer, after which the kernel ends a connection


class SilentStoreError(Exception):
    """The store has not answered in time; the message is the last reason."""


class _OtherProgramError(OSError):
    """Something accepts connections and does not answer as a store."""


def find(endpoint: str, deadline: float, was_lost: bool, tell: Callable[[str], None]) -> bool:
    """Wait until the store answers. Returns whether this agent has to host it: nobody does, and the endpoint is this machine's.

    endpoint: host:port, port 0 for any free one of this machine; deadline: by the monotonic clock; was_lost: whether it has
    answered before; tell: called with the reason, once, when there is something to wait for.
    Raises SilentStoreError at the deadline, InputError when another program uses the port on this machine.
    """
    host, _, port = endpoint.rpartition(":")
    if port == "0":
        return True
    began, is_told = time.monotonic(), False
    while (reason := _silence(host, int(port))) is not None:
        waited = time.monotonic() - began
        if _is_this_machine(host):
            if isinstance(reason, _OtherProgramError) and not was_lost:
                raise InputError(
                    f"launch: port {port} of {host} is in use by another program; choose another one for the nodes to meet at"
                )
            if not was_lost or waited > TAKE_OVER_SECONDS:
                return True
        if time.monotonic() > deadline:
            raise SilentStoreError(str(reason))
        if waited > UNTOLD_SECONDS and not is_told:
            is_told = True
            tell(str(reason))
        time.sleep(RETRY_SECONDS)
    return False


def end_dead_connections(endpoint: str) -> None:
    """Have the kernel end this process's connections to the store when the other side does not answer, as a node without power
    or network does not: an agent would otherwise wait for a quarter of an hour."""
    if sys.platform != "linux":
        return
    port = int(endpoint.rpartition(":")[2])
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.getpeername()[1] == port:
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_SECONDS // 6)
                    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_SECONDS // 6)
                    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_SECONDS)
        except (OSError, IndexError):  # not a connection over IP, or closed since
            continue


def _silence(host: str, port: int) -> OSError | None:
    """Why no store answers there; None where one does."""
    try:
        socket.create_connection((host, port), STORE_SECONDS).close()
    except OSError as error:
        return error
    answered = threading.Event()

    def connect() -> None:
        with contextlib.suppress(RuntimeError):
            TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
            answered.set()

    # A program that accepts the connection and does not answer blocks the store for ever, whatever its timeout.
    threading.Thread(target=connect, daemon=True).start()
    return None if answered.wait(STORE_SECONDS) else _OtherProgramError("another program answers there")


def _is_this_machine(host: str) -> bool:
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as own:
            own.bind((address, 0))
        return True
    except OSError:
        return False
