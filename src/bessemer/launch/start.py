"""Training on several processes of this machine, from the command's side."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import bessemer
from bessemer.errors import BessemerError
from bessemer.launch import outcome
from bessemer.recipe import Recipe
from bessemer.run import RunFolder
from bessemer.terminal import say

STOP_SECONDS = 120.0  # for the step in hand and the checkpoint after a stop was asked for


def train(recipe: Recipe, run: RunFolder, profile: bool) -> dict[str, Any]:
    """Train a resolved recipe, whose run folder is prepared, on `parallel.world` processes. Returns the summary.

    Raises what the members tell: Stopped, InputError, BessemerError.
    """
    world = recipe.parallel.world
    outcome.begin(run)
    command = [sys.executable, "-m", "bessemer.launch.agent", str(run.path), str(world), str(recipe.parallel.restarts)]
    say(f"  on {world} processes: {described(recipe)}")
    with subprocess.Popen(
        command + (["profile"] if profile else []), env=_environment(world), start_new_session=True
    ) as agent:
        try:
            agent.wait()
        except KeyboardInterrupt:
            _stop(run, agent)
        finally:
            if agent.poll() is None:
                agent.kill()
    found, crash = outcome.told(run), outcome.crash(run)
    if found is None:
        why = f"rank {crash['rank']}: {crash['error']}" if crash else f"the agent ended with {agent.returncode}"
        kept = run.path / "training-error.txt"
        if crash:
            kept.write_text(crash["traceback"])
        outcome.end(run)
        raise BessemerError(
            f"train: the processes ended {recipe.parallel.restarts + 1} times ({why})"
            f"{f'; see {kept}' if crash else ''}; checkpoints are kept, the same command goes on from the last one"
        )
    outcome.end(run)
    if found["status"] != "done":
        raise outcome.FAILURES[found["status"]](found["message"])
    summary: dict[str, Any] = found["summary"]
    return summary


def described(recipe: Recipe) -> str:
    """The ways that are used: "shard 2 x tensor 2"."""
    axes = ("replicate", "shard", "tensor", "pipeline", "context")
    used = [f"{axis} {getattr(recipe.parallel, axis)}" for axis in axes if getattr(recipe.parallel, axis) > 1]
    return " x ".join(used) or "one"


def _environment(world: int) -> dict[str, str]:
    """The members share the cores, find this package, and are reached by local addresses."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    above = str(Path(bessemer.__file__).parent.parent)
    path = [above, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    given = {"OMP_NUM_THREADS": str(max(cores // world, 1)), **os.environ}
    return given | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _stop(run: RunFolder, agent: subprocess.Popen[bytes]) -> None:
    """Ask the members to finish their step and save; a second Ctrl-C ends them at once."""
    for pid in outcome.pids(run):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    try:
        agent.wait(STOP_SECONDS)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        for pid in outcome.pids(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.kill()
