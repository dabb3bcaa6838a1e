"""Training on several processes of this machine, or on this node among others, from the command's side."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bessemer
from bessemer import interrupt
from bessemer.errors import BessemerError, Stopped
from bessemer.launch import outcome
from bessemer.launch.agent import Order
from bessemer.recipe import Parallel, Recipe
from bessemer.run import RunFolder
from bessemer.terminal import reported_elsewhere, say, warn

STOP_SECONDS = 600.0  # for the step in hand and the checkpoint after a stop was asked for
POLL_SECONDS = 0.5
LINGER_SECONDS = 5.0  # for other nodes to hear of a failure, before the place where they meet may go
AGAIN_SECONDS = 1.0  # a process that was just being started hears a later one


def train(recipe: Recipe, run: RunFolder, profile: bool) -> dict[str, Any]:
    """Train a resolved recipe, whose run folder is prepared, on `parallel.world` processes. Returns the summary.

    With parallel.elastic, processes that cannot be brought back are left out, and the rest goes on. Raises what the
    members tell: Stopped, InputError, BessemerError.
    """
    layout, slots = recipe.parallel, list(range(recipe.parallel.world))
    arguments = ("-m", "bessemer.launch.member", str(run.path), *(["profile"] if profile else []))
    while True:
        outcome.begin(run)
        say(f"  on {layout.world} processes: {described(layout)}")
        ended = _on_this_node(Order(arguments, layout.world, layout.restarts), slots[: layout.world])
        outcome.end(run)
        if ended.told is not None:
            return ended.result()
        fewer = _without(recipe, slots, ended.lost)
        if fewer is None:
            raise ended.given_up(run, layout.restarts)
        gone, layout = [slots[local] for local in ended.lost], fewer
        slots = [slot for slot in slots if slot not in gone]
        _record(run, gone, layout, ended)


def train_on_node(order: Order, run: RunFolder | None) -> dict[str, Any]:
    """Take part in a training with this node. Returns the summary, when it is known here.

    run: for what is kept of a crash. Raises what the members tell, or SaidElsewhere.
    """
    ended = _on_this_node(order, list(range(order.processes)))
    if ended.told is not None:
        return ended.result()
    raise ended.given_up(run, order.restarts)


@dataclass(frozen=True)
class Ended:
    """How the processes of this node ended. told: by themselves; said: what is for this node to say; lost: local ranks."""

    told: dict[str, Any] | None
    said: dict[str, Any] | None
    crash: dict[str, Any] | None
    lost: list[int]
    code: int

    def result(self) -> dict[str, Any]:
        """The summary of a training that is done, else its error."""
        assert self.told is not None
        if self.said is not None:
            raise outcome.as_error(self.said)
        if self.told["status"] != "done":
            raise outcome.SaidElsewhere(outcome.FAILURES[self.told["status"]].exit_code)
        summary: dict[str, Any] = self.told["summary"]
        return summary

    @property
    def why(self) -> str:
        """The root of a crash, in a line."""
        if self.crash is not None:
            return f"rank {self.crash['rank']}: {self.crash['error']}"
        if self.lost:
            return f"process {', '.join(map(str, self.lost))} of this node was killed"
        return f"the agent ended with {self.code}"

    def given_up(self, run: RunFolder | None, restarts: int) -> BessemerError:
        """The error of a group that could not be brought back; its traceback is kept in the run folder."""
        see = ""
        if self.crash is not None and run is not None and run.path.exists():
            kept = run.path / "training-error.txt"
            kept.write_text(self.crash["traceback"])
            see = f"; see {kept}"
        times = "once" if restarts == 0 else f"{restarts + 1} times"
        return BessemerError(
            f"train: the processes ended {times} ({self.why}){see}; checkpoints are kept, the same command goes on from the "
            "last one"
        )


def described(layout: Parallel) -> str:
    """The ways that are used: "shard 2 x tensor 2"."""
    axes = ("replicate", "shard", "tensor", "pipeline", "context")
    used = [f"{axis} {getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1]
    return " x ".join(used) or "one"


def _on_this_node(order: Order, slots: Sequence[int]) -> Ended:
    """Start the processes of this node, pass a stop signal on to them, and wait for their end."""
    place = Path(tempfile.mkdtemp(prefix="bessemer-"))
    try:
        with subprocess.Popen(
            order.command(), env=_environment(order.processes, place, slots), start_new_session=True
        ) as agent:
            try:
                with _stop_signals(), reported_elsewhere():
                    _wait(place, agent)
            except KeyboardInterrupt:
                _stop(place, agent)
            finally:
                if agent.poll() is None:
                    agent.kill()
        return Ended(
            outcome.told(place), outcome.said(place), outcome.crash(place), outcome.lost(place), agent.returncode
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _wait(place: Path, agent: subprocess.Popen[bytes]) -> None:
    """Until the agent ends. After a failure that was told it would wait minutes for agents of nodes that do not come."""
    alone_since = None
    while agent.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(POLL_SECONDS)
        found = outcome.told(place)
        if found is None or found["status"] in ("done", "stopped") or outcome.pids(place):
            alone_since = None
        elif alone_since is None:
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > LINGER_SECONDS:
            agent.kill()


def _without(recipe: Recipe, slots: Sequence[int], lost: Sequence[int]) -> Parallel | None:
    """The layout that goes on without the processes that could not be brought back; None when there is none."""
    from bessemer.launch.elastic import fitted

    if not recipe.parallel.elastic or not lost:
        return None
    return fitted(recipe, len(slots) - len(lost))


def _record(run: RunFolder, gone: Sequence[int], layout: Parallel, ended: Ended) -> None:
    from bessemer.checkpoint.protocol import published
    from bessemer.guard.incidents import record

    done = published(run.checkpoints)
    action = f"going on with {layout.world}: {described(layout)}"
    which = ", ".join(map(str, gone))
    warn(f"process {which} cannot be brought back ({ended.why}); {action}")
    step = done[-1] if done else 0
    record(run.incidents, step=step, what="fewer_processes", cause=f"process {which}: {ended.why}", action=action)


def _environment(processes: int, place: Path, slots: Sequence[int]) -> dict[str, str]:
    """The members share the cores, find this package, and tell in the node's folder."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    above = str(Path(bessemer.__file__).parent.parent)
    path = [above, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    given = {"OMP_NUM_THREADS": str(max(cores // processes, 1)), **os.environ}
    return given | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        outcome.NODE: str(place),
        "BESSEMER_SLOTS": ",".join(map(str, slots)),
    }


@contextlib.contextmanager
def _stop_signals() -> Iterator[None]:
    """SIGUSR1, which schedulers send before the time limit, asks for a stop as Ctrl-C and SIGTERM do."""

    before = signal.signal(signal.SIGUSR1, interrupt.stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _stop(place: Path, agent: subprocess.Popen[bytes]) -> None:
    """Ask the members to finish their step and save; a second Ctrl-C ends them at once."""
    repeated = (signal.SIGUSR1, signal.SIGTERM)  # by schedulers
    before = [signal.signal(number, signal.SIG_IGN) for number in repeated]
    interrupt.name_signal(place)
    deadline = time.monotonic() + STOP_SECONDS
    try:
        while agent.poll() is None and time.monotonic() < deadline:
            if outcome.pids(place) or outcome.told(place) is not None:
                _signal(place, signal.SIGUSR1)
            elif deadline - time.monotonic() < STOP_SECONDS - LINGER_SECONDS:
                break  # there is nobody to stop: the agent waits for other nodes
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(AGAIN_SECONDS)
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in zip(repeated, before, strict=True):
            signal.signal(number, handler)
    if agent.poll() is None:
        _signal(place, signal.SIGKILL)
        agent.kill()
        raise Stopped("stopped at once; the same command goes on from the last checkpoint")


def _signal(place: Path, number: int) -> None:
    for pid in outcome.pids(place):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
