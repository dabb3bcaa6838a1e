"""The command's side of a training on several processes: torchrun as a subprocess, on this machine or on this node of several."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bessemer
from bessemer import interrupt
from bessemer.environment import num_cores
from bessemer.errors import InputError, Stopped
from bessemer.launch import outcome, reports
from bessemer.launch.torchrun import LINGER_SECONDS, POLL_SECONDS
from bessemer.launch.worker import PREPARED
from bessemer.recipe import Parallel, Recipe
from bessemer.recipe.parallel import AXES
from bessemer.run import RunFolder
from bessemer.terminal import reported_elsewhere, say

LAST_CALL_SECONDS = 5  # for more nodes, once the minimum is there
JOIN_SECONDS, CONNECT_SECONDS = 1800, 300  # for nodes that are missing; for the first node to answer
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGXCPU"


def train(recipe: Recipe, run: RunFolder, profile: bool) -> dict[str, Any]:
    """Train a resolved recipe, whose run folder is prepared, on `parallel.world` processes. Returns the summary.

    Raises what the processes report: Stopped, InputError, BessemerError.
    """
    world = recipe.parallel.world
    say(f"  on {world} processes: {described(recipe.parallel)}")
    line = _torchrun(recipe, world, ["--standalone"], [str(run.path), *(["--profile"] if profile else [])])
    return _run(line, run, {PREPARED: "1"}, world)


def train_on_node(
    recipe: Recipe, run: RunFolder, arguments: Sequence[str], nodes: str, processes: int | None, endpoint: str | None,
    identity: str,
) -> dict[str, Any]:  # fmt: skip
    """Train with the processes of this node, one of several. Returns the summary. Raises as `train`.

    arguments: of `bessemer train` for the processes; the others are options that torchrun has under the same names.
    """
    counts = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", nodes)
    if counts is None or int(counts[1]) > (max_nodes := int(counts[2] or counts[1])):
        raise InputError(f"--nnodes: {nodes}: write it as N or MIN:MAX, for example 2:4")
    if not re.fullmatch(r"\S+:\d{1,5}", endpoint or ""):
        raise InputError("--rdzv-endpoint: write the first node and a free port of it, for example node001:29500")
    host = str(endpoint).rpartition(":")[0]
    is_local = host == "localhost" or host.startswith("127.")
    address = "localhost" if is_local else os.environ.get("POD_IP") or os.environ.get("SLURMD_NODENAME")
    meet = [
        f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={identity}",
        f"--rdzv-conf=last_call_timeout={LAST_CALL_SECONDS},join_timeout={JOIN_SECONDS},read_timeout={CONNECT_SECONDS}",
        *([f"--local-addr={address}"] if address else []),
    ]  # fmt: skip
    if processes is not None and processes < 1:
        raise InputError(f"--nproc-per-node: {processes} is not a number of processes; give 1 or more")
    processes = processes or max(recipe.parallel.world // max_nodes, 1)
    return _run(_torchrun(recipe, processes, meet, arguments), run, {}, processes)


def described(layout: Parallel) -> str:
    """Return the axes with more than one process: "shard 2 x tensor 2"."""
    used = [f"{axis} {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    return " x ".join(used) or "one"


def _torchrun(recipe: Recipe, processes: int, meet: Sequence[str], arguments: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-m", "bessemer.launch.torchrun", *meet, f"--nproc-per-node={processes}",
        f"--max-restarts={recipe.parallel.restarts}", f"--signals-to-handle={SIGNALS}",
        f"--shutdown-timeout={recipe.cluster.save_seconds}", "-m", "bessemer.launch.worker", *arguments,
    ]  # fmt: skip


def _run(line: Sequence[str], run: RunFolder, variables: Mapping[str, str], processes: int) -> dict[str, Any]:
    """Run torchrun, pass a stop signal on to it, and return the summary of the training, or raise its error."""
    since = time.time()
    with subprocess.Popen(line, env={**_environment(processes), **variables}, start_new_session=True) as torchrun:
        stopped = ""
        try:
            with reported_elsewhere():
                _wait(torchrun, run, since)
        except KeyboardInterrupt:
            stopped = interrupt.last_signal()
            torchrun.send_signal(signal.Signals[stopped])
            try:
                _wait(torchrun, run, since)
            except KeyboardInterrupt:  # a second Ctrl-C
                stopped = "at once"
        finally:
            torchrun.kill()
    if stopped and reports.reported(run) is None:
        raise Stopped(f"stopped by {stopped}; {reports.goes_on(run)}")
    summary: dict[str, Any] = outcome.settle(run, torchrun.returncode, since)["summary"]
    return summary


def _wait(torchrun: subprocess.Popen[bytes], run: RunFolder, since: float) -> None:
    """Wait for the end of torchrun, or end it soon after the training has ended."""
    while torchrun.poll() is None:
        report = reports.reported(run)
        if report is not None and since < report["time"] < time.time() - LINGER_SECONDS:
            torchrun.kill()
        time.sleep(POLL_SECONDS)


def _environment(processes: int) -> dict[str, str]:
    """Return the environment in which the processes share the cores and import this package."""
    path = [str(Path(bessemer.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return {"OMP_NUM_THREADS": str(max(num_cores() // processes, 1)), **os.environ} | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "LOGLEVEL": "CRITICAL",  # of torchrun: the command shows what matters
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # with a shared store, restarts fail (torch 2.11 to 2.13)
    }
