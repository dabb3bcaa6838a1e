"""The command's side of a training on several processes: of this machine, or of this node among others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bessemer
from bessemer import interrupt
from bessemer.environment import num_cores
from bessemer.errors import BessemerError, InputError, Stopped
from bessemer.launch import status
from bessemer.launch.watchdog import Watchdog
from bessemer.recipe import Parallel, Recipe
from bessemer.recipe.parallel import AXES
from bessemer.run import RunFolder, published
from bessemer.terminal import reported_elsewhere, say, warn

STOP_SECONDS = 600.0  # for the current step and the checkpoint after a stop request
POLL_SECONDS = 0.5
LINGER_SECONDS = 5.0  # for other nodes to learn of a failure, before the rendezvous may end
REPEAT_SECONDS = 1.0  # between stop requests, since a process that is just starting misses one


@dataclass(frozen=True)
class LaunchSpec:
    """What an agent starts. arguments: of Python; nodes: minimum and maximum; endpoint: host:port of the rendezvous, host:0
    for any port; identity: the same on all nodes of a run and no others; wait_seconds: for nodes that are missing."""

    arguments: tuple[str, ...]
    processes: int
    restarts: int
    nodes: tuple[int, int] = (1, 1)
    endpoint: str = "localhost:0"
    identity: str | None = None
    wait_seconds: float = 1800.0

    def command(self) -> list[str]:
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
        wait = float(os.environ.get("BESSEMER_WAIT_SECONDS", cls.wait_seconds))
        where = (min_nodes, max_nodes), endpoint or "localhost:0", identity
        return cls(arguments, processes, restarts, *where, wait)


def train(recipe: Recipe, run: RunFolder, profile: bool) -> dict[str, Any]:
    """Train a resolved recipe, whose run folder is prepared, on `parallel.world` processes. Returns the summary.

    With parallel.elastic, processes that cannot be restarted are left out. Raises what the processes report: Stopped,
    InputError, BessemerError.
    """
    layout, slots = recipe.parallel, list(range(recipe.parallel.world))
    arguments = ("-m", "bessemer.launch.member", str(run.path), *(["profile"] if profile else []))
    while True:
        status.begin(run)
        say(f"  on {layout.world} processes: {described(layout)}")
        ended = _run_agent(LaunchSpec(arguments, layout.world, layout.restarts), slots[: layout.world], run)
        status.end(run)
        if ended.report is not None:
            return ended.summary()
        smaller = None
        if recipe.parallel.elastic and ended.lost:
            from bessemer.launch.rendezvous import fitted

            smaller = fitted(recipe, len(slots) - len(ended.lost))
        if smaller is None:
            raise ended.error(run, layout.restarts)
        lost, layout = [slots[local] for local in ended.lost], smaller
        slots = [slot for slot in slots if slot not in lost]
        _record_loss(run, lost, layout, ended)


def train_on_node(spec: LaunchSpec, run: RunFolder | None) -> dict[str, Any]:
    """Train with the processes of this node. Returns the summary, when it is known here.

    run: for the traceback of a crash. Raises what the processes report, or ShownElsewhere.
    """
    ended = _run_agent(spec, range(spec.processes), run)
    if ended.report is not None:
        return ended.summary()
    raise ended.error(run, spec.restarts)


@dataclass(frozen=True)
class EndOfNode:
    """How the processes of this node ended. report: by the processes; shown: the one that this node shows; lost: local ranks;
    code: the agent's exit code."""

    report: dict[str, Any] | None
    shown: dict[str, Any] | None
    crash: dict[str, Any] | None
    lost: list[int]
    code: int

    def summary(self) -> dict[str, Any]:
        """The summary of a completed training. Raises its error otherwise."""
        assert self.report is not None
        if self.shown is not None:
            raise status.as_error(self.shown)
        if self.report["status"] != "done":
            raise status.ShownElsewhere(status.FAILURES[self.report["status"]].exit_code)
        summary: dict[str, Any] = self.report["summary"]
        return summary

    @property
    def cause(self) -> str:
        """The root of a crash, in a line."""
        if self.crash is not None and not (self.lost and status.is_from_neighbour(self.crash)):
            return f"rank {self.crash['rank']}: {self.crash['error']}"
        if self.lost:
            return f"process {', '.join(map(str, self.lost))} of this node was killed"
        return f"the agent of this node ended with {self.code}"

    def error(self, run: RunFolder | None, restarts: int) -> BessemerError:
        """The error of a group that could not be restarted; its traceback is kept in the run folder."""
        see = ""
        if self.crash is not None and run is not None and run.path.exists():
            kept = run.path / "training-error.txt"
            kept.write_text(self.crash["traceback"])
            see = f"; see {kept}"
        ended = "the processes ended " + ("once" if restarts == 0 else f"{restarts + 1} times") + f" ({self.cause})"
        if self.code < 0:
            by = interrupt.plain_name(-self.code)
            ended = f"the agent of this node (bessemer.launch.agent) was ended by {by}, and the processes with it"
        then = "checkpoints are kept, the same command goes on from the last one"
        if run is not None and not published(run.checkpoints):
            then = "no checkpoint was saved yet, the same command begins the training again"
        return BessemerError(f"train: {ended}{see}; {then}")


def described(layout: Parallel) -> str:
    """The axes with more than one process: "shard 2 x tensor 2"."""
    used = [f"{axis} {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    return " x ".join(used) or "one"


def _run_agent(spec: LaunchSpec, slots: Sequence[int], run: RunFolder | None) -> EndOfNode:
    """Start the processes of this node, pass a stop signal on to them, and wait for their end."""
    place = Path(tempfile.mkdtemp(prefix="bessemer-"))
    environment = _environment(spec.processes, place, slots)
    try:
        with subprocess.Popen(spec.command(), env=environment, start_new_session=True) as agent:
            try:
                with reported_elsewhere():
                    watchdog = Watchdog(place, run, agent.pid)
                    _wait(place, agent, watchdog)
                    watchdog.note_losses()
            except KeyboardInterrupt:
                _stop(place, agent, run)
            finally:
                if agent.poll() is None:
                    agent.kill()
                _signal(place, signal.SIGKILL)  # what outlives the agent
        if agent.returncode < 0 and status.reported(place) is None:
            watchdog.record_end_of_agent(interrupt.plain_name(-agent.returncode))
        report, shown = status.reported(place), status.read(place, status.SHOWN)
        return EndOfNode(report, shown, status.root_crash(place), status.lost_ranks(place), agent.returncode)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _wait(place: Path, agent: subprocess.Popen[bytes], watchdog: Watchdog) -> None:
    """Wait for the agent. After a reported failure it would wait minutes for the agents of other nodes, so it is killed."""
    alone_since = None
    while agent.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(POLL_SECONDS)
        watchdog.look()
        report = status.reported(place)
        if report is None or report["status"] in ("done", "stopped") or status.pids(place):
            alone_since = None
        elif alone_since is None:
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > LINGER_SECONDS:
            agent.kill()


def _record_loss(run: RunFolder, lost: Sequence[int], layout: Parallel, ended: EndOfNode) -> None:
    from bessemer.guard.incidents import FEWER_PROCESSES, record
    from bessemer.run import published

    steps = published(run.checkpoints)
    action, which = f"going on with {layout.world}: {described(layout)}", ", ".join(map(str, lost))
    warn(f"process {which} cannot be brought back ({ended.cause}); {action}")
    step, cause = steps[-1] if steps else 0, f"process {which}: {ended.cause}"
    record(run.incidents, FEWER_PROCESSES, step=step, cause=cause, action=action)


def _environment(processes: int, place: Path, slots: Sequence[int]) -> dict[str, str]:
    """The processes share the cores, import this package, and report in the node's folder."""
    source = str(Path(bessemer.__file__).parent.parent)
    path = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"OMP_NUM_THREADS": str(max(num_cores() // processes, 1)), **os.environ} | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "LOGLEVEL": "CRITICAL",  # of torch's agent: the command shows what matters
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # with a shared store, restarts fail (torch 2.11 to 2.13)
        status.NODE: str(place),
        "BESSEMER_SLOTS": ",".join(map(str, slots)),
    }


def _stop(place: Path, agent: subprocess.Popen[bytes], run: RunFolder | None) -> None:
    """Ask the processes to finish their step and save; a second Ctrl-C ends them at once."""
    how = "stopped"
    interrupt.name_signal(place)
    deadline = time.monotonic() + STOP_SECONDS
    try:
        while agent.poll() is None and time.monotonic() < deadline:
            if status.pids(place) or status.reported(place) is not None:
                _signal(place, signal.SIGUSR1)
            elif (place / status.WAITING).exists() or deadline - time.monotonic() < STOP_SECONDS - LINGER_SECONDS:
                break  # no process runs: the agent waits for other nodes
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(REPEAT_SECONDS)
    except KeyboardInterrupt:
        how = "stopped at once"
    if agent.poll() is None:
        _signal(place, signal.SIGKILL)
        agent.kill()
        raise Stopped(f"{how}; {status.goes_on(run)}")


def _signal(place: Path, number: int) -> None:
    for pid in status.pids(place):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
