"""What the agent of a node does: run torch's elastic agent, note what is lost, and meet the others again after it."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.launcher import api

from bessemer import interrupt
from bessemer.errors import InputError
from bessemer.guard import heartbeat
from bessemer.launch import status, store
from bessemer.launch.fork_server import ForkServer
from bessemer.launch.start import LaunchSpec
from bessemer.terminal import duration

LAST_CALL_SECONDS = 5  # for more nodes, once the minimum is there

logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # not all of its parts look at LOGLEVEL
# Torch names the caller in each event of the rendezvous, by inspect.stack(), which looks through all loaded modules: more than a
# second of processor time at each start, for events that nobody reads.
dynamic_rendezvous.get_method_name = lambda depth=2: "rendezvous"


class NodeAgent:
    """Runs torch's elastic agent, and again where the store was lost with the first node. The memory that is held for checkpoints
    outlives that."""

    def __init__(self, spec: LaunchSpec, place: Path, forks: ForkServer | None) -> None:
        """place: the node's folder; forks: where the processes are started; None: as new interpreters."""
        self.spec, self._place = spec, place
        self._host = spec.endpoint.rpartition(":")[0]
        self._wait = duration(spec.wait_seconds)
        self._restarts_left, self._has_trained = spec.restarts, False
        self._starts: list[int] = []  # restarts that were left at each start of the group, since the store answered
        self._nodes = set[tuple[str, int]]()
        self._forks = forks

    def run(self) -> int:
        """Meet the other nodes and start the processes until they have ended. Returns the exit code of `main`."""
        _use_own_agent(self)
        if self._forks is not None:
            _use_forks(self._forks)
        deadline, attempts_to_host, has_answered = time.monotonic() + self.spec.wait_seconds, 0, False
        while True:
            try:
                with status.waiting(self._place):
                    is_host = store.find(self.spec.endpoint, deadline, has_answered, self._tell_of_silence)
            except store.SilentStoreError as error:
                return self._end_without(
                    f"the first node ({self._host}) did not answer within {self._wait}", str(error)
                )
            except InputError as error:
                os._exit(self._fail("input", str(error)))  # a thread may still be connecting
            has_answered |= not is_host
            self._starts.clear()
            self._nodes.clear()
            try:
                api.elastic_launch(self._config(is_host), sys.executable)(*self.spec.arguments)
                return 0
            except SignalException:  # SIGQUIT, by hand
                return 1
            except ChildFailedError as error:
                if killed := _killed(error.failures):
                    status.write(self._place, status.LOST, killed)
                return 1
            except RendezvousTimeoutError:
                return self._end_without(f"not enough nodes came to {self.spec.endpoint} within {self._wait}")
            except (RendezvousConnectionError, dist.DistError) as error:
                if status.reported(self._place) is not None:  # the training has ended, on the first node earlier
                    return 0
                attempts_to_host += is_host
                if is_host and (self._starts or attempts_to_host > 1):  # not for a node of this machine that was faster
                    return self._fail("failed", self._cannot_meet(error))
                if self._starts:
                    if not self._lose_first_node():
                        return 1
                    deadline = time.monotonic() + self.spec.wait_seconds
            except RendezvousError as error:
                return self._fail("failed", self._cannot_meet(error))
            except Exception as error:
                if status.reported(self._place) is not None:  # as above, seen by another call
                    return 0
                traceback.print_exc()
                then = "checkpoints are kept, the same command goes on from the last one"
                return self._fail("failed", f"launch: the agent of this node failed ({error!r}); {then}")

    def _config(self, is_host: bool) -> api.LaunchConfig:
        spec = self.spec
        is_local = self._host == "localhost" or self._host.startswith("127.")
        return api.LaunchConfig(
            min_nodes=spec.nodes[0],
            max_nodes=spec.nodes[1],
            nproc_per_node=spec.processes,
            run_id=spec.identity or uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=spec.endpoint,
            rdzv_configs={
                "last_call_timeout": LAST_CALL_SECONDS, "join_timeout": math.ceil(spec.wait_seconds), "is_host": is_host
            },
            max_restarts=self._restarts_left,
            monitor_interval=0.2,
            local_addr="localhost" if is_local else os.environ.get("POD_IP") or os.environ.get("SLURMD_NODENAME"),
            signals_to_handle="SIGQUIT",
            logs_specs=DefaultLogsSpecs(str(self._place / "elastic")),  # else in a folder of its own that stays
        )  # fmt: skip

    def _fail(self, kind: str, message: str) -> int:
        status.report(self._place, kind, message=message)
        status.write(self._place, status.SHOWN, {"status": kind, "message": message})
        return 2

    def _cannot_meet(self, error: BaseException) -> str:
        while error.__cause__ is not None:
            error = error.__cause__
        reason = status.first_line(error) or type(error).__name__
        return f"launch: this node cannot meet the others at {self.spec.endpoint}: {reason}"

    def _end_without(self, what: str, reason: str = "") -> int:
        """End since other nodes did not come: a failure, or after some training an end that the scheduler may retry."""
        if self._has_trained or self._starts:
            return self._fail("stopped", f"launch: {what}; the same command goes on from the last checkpoint")
        return self._fail("failed", f"launch: {what}{reason and f' ({reason})'}")

    def _tell_of_silence(self, reason: str) -> None:
        if not self._has_trained:
            cause = f"the first node ({self._host}) does not answer yet ({reason})"
            status.note(self._place, [{"cause": cause, "action": f"waiting up to {self._wait} for it"}])

    def _lose_first_node(self) -> bool:
        """Note the loss of the first node, and of a restart. Returns whether one was left."""
        self._has_trained, self._restarts_left = True, self._starts[-1] - 1
        then = f"waiting up to {self._wait} for it to come back"
        loss = self._node_loss(f"the first node ({self._host})", self._host, self._restart(self._restarts_left, then))
        status.note(self._place, [loss])
        if self._restarts_left >= 0:
            self._forget_crashes()
            return True
        then = "the same command goes on from the last checkpoint"
        self._fail("failed", f"launch: {loss['cause']}; {loss['action']}; {then}")
        return False

    def _node_loss(self, name: str, host: str, action: str) -> dict[str, Any]:
        step = heartbeat.last_step(self._place)
        return {"cause": f"{name} was lost after step {step}", "action": action, "step": step, "host": host}

    def _restart(self, left: int, first: str = "") -> str:
        """What follows a loss, after which so many restarts are left."""
        restarts = self.spec.restarts
        if left < 0:
            return f"no restart is left (parallel.restarts = {restarts})"
        again = f"the group starts again from the newest checkpoint (restart {restarts - left} of {restarts})"
        return f"{first}, then {again}" if first else again

    def _forget_crashes(self) -> None:
        """The next loss has other causes."""
        for path in self._place.glob("*.error"):
            path.unlink()

    def note_start(self, restarts_left: int, nodes: set[tuple[str, int]]) -> None:
        """Remember that the nodes have met and the group starts; note those that were there before and are gone.

        nodes: host and process id of each agent.
        """
        gone = sorted({host for host, _ in self._nodes - nodes})
        action = self._restart(restarts_left)
        status.note(self._place, [self._node_loss(f"node {host}", host, action) for host in gone])
        self._nodes = nodes
        self._starts.append(restarts_left)

    def note_failures(self, failures: Mapping[int, ProcessFailure], restarts_left: int) -> None:
        """Note the lost processes of this node in its folder, before the group starts again; after a training's end, nothing."""
        if status.reported(self._place) is not None:
            return
        locals_lost, crash = _killed(failures), status.root_crash(self._place)
        if not locals_lost:
            locals_lost = status.lost_ranks(self._place)  # by an exception
        host, action, losses = socket.gethostname(), self._restart(restarts_left - 1), []
        for rank, one in failures.items():
            if one.local_rank in locals_lost:
                how = f"failed: {crash['error']}" if crash is not None else f"ended with {one.exitcode}"
                if one.exitcode < 0:
                    how = f"was ended by {interrupt.plain_name(-one.exitcode)}"
                reading = heartbeat.read(self._place / f"{one.local_rank}.heartbeat")
                step = 0 if reading is None else reading.step
                losses.append({"cause": f"rank {rank} on {host} {how} after step {step}", "action": action, "step": step,
                               "rank": rank, "host": host, "code": one.exitcode})  # fmt: skip
        status.note(self._place, losses)
        if restarts_left:
            self._forget_crashes()


def _use_own_agent(node: NodeAgent) -> None:
    """Have `elastic_launch` make an agent that reports each start and each loss of the group to `node`."""

    class Agent(api.LocalElasticAgent):  # type: ignore[misc, name-defined]
        def _rendezvous(self, group: WorkerGroup) -> None:
            store.end_dead_connections(node.spec.endpoint)
            super()._rendezvous(group)
            participants = group.spec.rdzv_handler._state_holder.state.participants  # type: ignore[attr-defined]
            node.note_start(self._remaining_restarts, {(one.addr, one.pid) for one in participants})

        def _monitor_workers(self, group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(group)
            if result.state == WorkerState.FAILED:
                node.note_failures(result.failures, self._remaining_restarts)
            return result

        # torch 2.11 gives no timeout.
        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *timeout: Any, **named: Any) -> None:
            # After the loss of the store, a process whose neighbours still live would take SIGTERM for a stop request.
            if isinstance(sys.exception(), (RendezvousConnectionError, dist.DistError)):
                death_sig = signal.SIGKILL
            super()._shutdown(death_sig, *timeout, **named)

    api.LocalElasticAgent = Agent  # type: ignore[misc]  # which elastic_launch makes


def _use_forks(forks: ForkServer) -> None:
    """Have torch's agent start its processes as forks."""
    new_interpreter = SubprocessHandler._popen

    def started(self: SubprocessHandler, words: tuple[str, ...], environment: dict[str, str]) -> Any:
        fork = forks.start(words[1:], environment) if words[0] == sys.executable else None
        return new_interpreter(self, words, environment) if fork is None else fork

    SubprocessHandler._popen = started  # type: ignore[method-assign, assignment]


def _killed(failures: Mapping[int, ProcessFailure]) -> list[int]:
    """Local ranks that a signal ended, but for SIGTERM, with which torch ends the others."""
    codes = {one.local_rank: one.exitcode for one in failures.values()}
    return sorted(local for local, code in codes.items() if code < 0 and code != -signal.SIGTERM)
