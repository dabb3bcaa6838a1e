"""The agent of a node: torch's elastic agent (the core of torchrun) in a process of its own.

`python -m bessemer.launch.agent JSON` starts `python ARGUMENTS` N times in one group with those of the other nodes, and
restarts the group after one was lost. It is a separate process so that Ctrl-C in a terminal reaches only the command, which
asks the processes to stop.

torchrun itself cannot be configured to do this: its exit code is 1 whatever happened, it restarts a training that was stopped
on request, and it kills a process that still saves 30 s after a stop signal. So this is torch's `elastic_launch` with its
signal handling turned off, and processes report why they end in files (launch/status.py) instead of exit codes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.errors import InputError
from bessemer.run import write_json

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import ProcessFailure

    from bessemer.recipe import Recipe

STORE_SECONDS = 5.0  # for a store to answer
LAST_CALL_SECONDS = 5  # for more nodes, once the minimum is there


@dataclass(frozen=True)
class LaunchSpec:
    """What an agent starts. arguments: of Python; nodes: minimum and maximum; endpoint: host:port of the rendezvous, host:0
    for any port; identity: the same on all nodes of a run and no others; replicas: of the copies in memory, on other nodes."""

    arguments: tuple[str, ...]
    processes: int
    restarts: int
    nodes: tuple[int, int] = (1, 1)
    endpoint: str = "localhost:0"
    identity: str | None = None
    replicas: int = 0

    def command(self) -> list[str]:
        """The command line of its agent."""
        return [sys.executable, "-m", "bessemer.launch.agent", json.dumps(asdict(self))]

    @classmethod
    def parse(cls, text: str) -> LaunchSpec:
        """The specification in a command line."""
        values = json.loads(text)
        return cls(**values | {"arguments": tuple(values["arguments"]), "nodes": tuple(values["nodes"])})

    @classmethod
    def of_node(
        cls, arguments: tuple[str, ...], recipe: Recipe | None, nodes: str, processes: int | None, endpoint: str | None,
        identity: str,
    ) -> LaunchSpec:  # fmt: skip
        """One node of several, from the options that torchrun has under the same names. recipe: None when it cannot be read,
        which the processes then report. Raises InputError."""
        found = re.fullmatch(r"(\d+)(?::(\d+))?", nodes)
        if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]):
            raise InputError(f"--nnodes: {nodes}: write it as N or MIN:MAX, for example 2:4")
        min_nodes, max_nodes = int(found[1]), int(found[2] or found[1])
        if endpoint is None and max_nodes > 1:
            raise InputError("train: --nnodes needs --rdzv-endpoint HOST:PORT, a free port of the first node")
        if endpoint is not None and not re.fullmatch(r"\S+:\d{1,5}", endpoint):
            raise InputError(f"--rdzv-endpoint: {endpoint}: write it as HOST:PORT, for example node001:29500")
        world = 1 if recipe is None else recipe.parallel.world
        if processes is None:
            processes = max(world // max_nodes, 1)
        if processes < 1:
            raise InputError(f"--nproc-per-node: {processes} is not a number of processes; give 1 or more")
        restarts = 0 if recipe is None else recipe.parallel.restarts
        replicas = 0 if recipe is None else recipe.checkpoint.memory_replicas
        if recipe is not None:
            recipe.checkpoint.require_nodes(max_nodes)
        return cls(
            arguments, processes, restarts, (min_nodes, max_nodes), endpoint or "localhost:0", identity, replicas
        )


def main() -> int:
    """Exit code 0 when all processes ended well, 1 when they could not be restarted, 2 when the nodes' rendezvous failed."""
    spec, place = LaunchSpec.parse(sys.argv[1]), Path(os.environ["BESSEMER_NODE"])
    # Stop signals are passed on by the command; schedulers send them to every process of a node. SIG_IGN would be inherited by
    # the processes, a handler is not.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    _end_with_parent()
    os.environ["LOGLEVEL"] = "CRITICAL"  # the command shows what matters
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # with a shared store, restarts fail (torch 2.11 to 2.13)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # not all of its parts look at LOGLEVEL
    _note_losses(place)

    from bessemer.checkpoint.node_memory import hold
    from bessemer.launch import status

    def fail(kind: str, message: str) -> int:
        status.report(place, kind, message=message)
        status.write(place, status.SHOWN, {"status": kind, "message": message})
        return 2

    host = spec.endpoint.rpartition(":")[0]
    if (message := _port_in_use(spec.endpoint)) is not None:
        os._exit(fail("input", message))  # a thread may still be connecting
    is_local = host == "localhost" or host.startswith("127.")
    config = LaunchConfig(
        min_nodes=spec.nodes[0],
        max_nodes=spec.nodes[1],
        nproc_per_node=spec.processes,
        run_id=spec.identity or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=spec.endpoint,
        rdzv_configs={"last_call_timeout": LAST_CALL_SECONDS},
        max_restarts=spec.restarts,
        monitor_interval=0.2,
        local_addr="localhost" if is_local else os.environ.get("POD_IP") or os.environ.get("SLURMD_NODENAME"),
        signals_to_handle="SIGHUP",
    )
    try:
        with hold(place, spec.processes, spec.replicas):
            elastic_launch(config, sys.executable)(*spec.arguments)
    except ChildFailedError as error:
        if killed := _killed(error.failures):
            status.write(place, status.LOST, killed)
        return 1
    except RendezvousError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = status.first_line(cause) or type(cause).__name__
        return fail("failed", f"launch: this node cannot meet the others at {spec.endpoint}: {reason}")
    return 0


def _killed(failures: Mapping[int, ProcessFailure]) -> list[int]:
    """Local ranks that a signal ended, but for SIGTERM, with which torch ends the others."""
    codes = {one.local_rank: one.exitcode for one in failures.values()}
    return sorted(local for local, code in codes.items() if code < 0 and code != -signal.SIGTERM)


def _note_losses(place: Path) -> None:
    """Have the agent write each loss of processes into the node's folder before it starts the group again."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.launcher import api

    from bessemer.guard import pulse
    from bessemer.launch import status

    class Agent(api.LocalElasticAgent):  # type: ignore[misc, name-defined]
        def _monitor_workers(self, group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(group)
            if result.state == WorkerState.FAILED and status.reported(place) is None:
                self._note(result.failures)
            return result

        def _note(self, failures: Mapping[int, ProcessFailure]) -> None:
            restarts = self._worker_group.spec.max_restarts
            number = restarts - self._remaining_restarts + 1
            locals_lost, crash = _killed(failures), status.root_crash(place)
            if not locals_lost:
                locals_lost = status.lost_ranks(place)  # by an exception
            lost = []
            for rank, one in failures.items():
                if one.local_rank in locals_lost:
                    reading = pulse.read(place / f"{one.local_rank}.pulse")
                    error = crash["error"] if one.exitcode > 0 and crash is not None else None
                    lost.append({"rank": rank, "pid": one.pid, "code": one.exitcode, "error": error,
                                 "step": 0 if reading is None else reading.step})  # fmt: skip
            if number <= restarts:  # the next loss has other causes
                for path in place.glob("*.error"):
                    path.unlink()
            facts = {"lost": lost, "host": socket.gethostname(), "restart": number, "restarts": restarts}
            write_json(place / status.LOSSES.format(number), facts)

    api.LocalElasticAgent = Agent  # type: ignore[misc]  # which elastic_launch makes


def _port_in_use(endpoint: str) -> str | None:
    """An error message when another program uses the rendezvous port on this machine."""
    from torch.distributed import TCPStore

    host, _, port = endpoint.rpartition(":")
    if port == "0" or not _is_this_machine(host):
        return None
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind((host, int(port)))
            return None
        except OSError:
            pass
    connected = threading.Event()

    def connect() -> None:
        with contextlib.suppress(RuntimeError):
            TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
            connected.set()  # the store of a node that was started earlier

    # A program that accepts the connection and does not answer blocks the store for ever, whatever its timeout.
    threading.Thread(target=connect, daemon=True).start()
    if connected.wait(STORE_SECONDS):
        return None
    return f"launch: port {port} of {host} is in use by another program; choose another one for the nodes to meet at"


def _is_this_machine(host: str) -> bool:
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as own:
            own.bind((address, 0))
        return True
    except OSError:
        return False


def _end_with_parent() -> None:
    """Ask the kernel for a SIGHUP when the command dies, on which the agent ends its processes."""
    if sys.platform.startswith("linux"):
        parent_death_signal = 1  # PR_SET_PDEATHSIG of sys/prctl.h
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGHUP)


if __name__ == "__main__":
    sys.exit(main())
