"""Keeps the processes of one node: torch's elastic agent (what torchrun is made of), without its own words.

`python -m bessemer.launch.agent JSON` starts `python ARGUMENTS` so many times as one group with those of the other nodes,
and starts all of them again after one was lost. A process of its own, so that a Ctrl-C in a terminal reaches the command
alone, which asks the processes to stop. torchrun itself would end with 1 whatever happened, start a training again that
was stopped on request, and kill one that saves for more than 30 s after a stop signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import uuid
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

MEET_SECONDS = 5.0  # for a store to answer
LAST_CALL_SECONDS = 5  # for more nodes, once the fewest are there


@dataclass(frozen=True)
class Order:
    """What to start. arguments: of Python; nodes: the fewest and the most; endpoint: host:port where they meet, host:0 for
    any port; identity: the same on all nodes of a run and no others."""

    arguments: tuple[str, ...]
    processes: int
    restarts: int
    nodes: tuple[int, int] = (1, 1)
    endpoint: str = "localhost:0"
    identity: str | None = None

    def command(self) -> list[str]:
        """The command line of its agent."""
        return [sys.executable, "-m", "bessemer.launch.agent", json.dumps(asdict(self))]

    @classmethod
    def read(cls, text: str) -> Order:
        """The order in a command line."""
        found = json.loads(text)
        return cls(**found | {"arguments": tuple(found["arguments"]), "nodes": tuple(found["nodes"])})


def main() -> int:
    """Exit code 0 when all processes ended well, 1 when they could not be brought back, 2 when nodes cannot meet."""
    order, place = Order.read(sys.argv[1]), Path(os.environ["BESSEMER_NODE"])
    # Stop signals are the command's to pass on; schedulers send them to every process of a node. What is ignored, and not
    # handled as here, would be ignored by the processes as well.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    _end_with_the_parent()
    os.environ["LOGLEVEL"] = "CRITICAL"  # what has to be said, the command says
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # with it shared, restarts fail (torch 2.11 to 2.13)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from bessemer.launch import outcome

    host = order.endpoint.rpartition(":")[0]
    if (taken := _taken(order.endpoint)) is not None:
        outcome.tell(place, "input", message=taken)
        outcome.say(place, "input", taken)
        os._exit(2)  # a thread may still be greeting
    near = host == "localhost" or host.startswith("127.")
    config = LaunchConfig(
        min_nodes=order.nodes[0],
        max_nodes=order.nodes[1],
        nproc_per_node=order.processes,
        run_id=order.identity or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=order.endpoint,
        rdzv_configs={"last_call_timeout": LAST_CALL_SECONDS},
        max_restarts=order.restarts,
        monitor_interval=0.2,
        local_addr="localhost" if near else os.environ.get("POD_IP") or os.environ.get("SLURMD_NODENAME"),
        signals_to_handle="SIGHUP",
    )
    try:
        elastic_launch(config, sys.executable)(*order.arguments)
    except ChildFailedError as error:
        ends = {one.local_rank: one.exitcode for one in error.failures.values()}
        killed = sorted(local for local, code in ends.items() if code < 0 and code != -signal.SIGTERM)  # that: by us
        if killed:
            outcome.note_lost(place, killed)
        return 1
    except RendezvousError as error:
        message = f"launch: this node cannot meet the others at {order.endpoint}: {_first_line(error)}"
        outcome.tell(place, "failed", message=message)
        outcome.say(place, "failed", message)
        return 2
    return 0


def _taken(endpoint: str) -> str | None:
    """A sentence when the meeting point's port on this machine is another program's."""
    from torch.distributed import TCPStore

    host, _, port = endpoint.rpartition(":")
    if port == "0" or not _is_here(host):
        return None
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind((host, int(port)))
            return None
        except OSError:
            pass
    met = threading.Event()

    def meet() -> None:
        with contextlib.suppress(RuntimeError):
            TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=MEET_SECONDS))
            met.set()  # of a node that was here before us

    # A program that takes the connection and says nothing holds the store's greeting up for ever, whatever its timeout.
    threading.Thread(target=meet, daemon=True).start()
    if met.wait(MEET_SECONDS):
        return None
    return f"launch: port {port} of {host} is in use by another program; choose another one for the nodes to meet at"


def _is_here(host: str) -> bool:
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as own:
            own.bind((address, 0))
        return True
    except OSError:
        return False


def _first_line(error: BaseException) -> str:
    cause: Any = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


def _end_with_the_parent() -> None:
    """Ask the kernel for a SIGHUP when the command dies, after which the agent ends the processes."""
    if sys.platform.startswith("linux"):
        parent_death_signal = 1  # PR_SET_PDEATHSIG of sys/prctl.h
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGHUP)


if __name__ == "__main__":
    sys.exit(main())
