"""Trainings for the tests of launching: a small recipe, its command, and readers of its run directory."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.cli.commands import bessemer
from tests.newest import Result, training_result
from tests.newest import wait_for_step as wait_for_step
from tests.warm import fork_of

RECIPE = """
[run]
name = "t"
dir = "{folder}/runs"
[[corpus.sources]]
name = "docs"
format = "text"
paths = ["{folder}/texts"]
[corpus.dedup]
minhash = false
[tokenizer]
vocabulary = 300
[tokens]
sequence_length = 32
held_out = 0.05
[model]
depth = 1
[train]
steps = 12
global_batch_tokens = 256
micro_batch = 2
log_every = 1
[checkpoint]
every = 4
[report]
tensorboard = false
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "bessemer", *arguments]


def injected(folder: Path, code: str) -> dict[str, str]:
    """Return variables that make each process run this code first."""
    (folder / "sitecustomize.py").write_text(code)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path}


def node(given: tuple[str, ...], port: int, *more: str, nodes: str = "2") -> list[str]:
    """Return the torchrun command of one node of several, with one process, all on this machine."""
    meet = f"--nnodes={nodes}", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"
    here = "--local-addr=localhost", "--rdzv-id=test", "--max-restarts=3", "--rdzv-conf=last_call_timeout=5"
    program = "-m", "bessemer.launch.worker", *given, *more
    return [sys.executable, "-m", "bessemer.launch.torchrun", *meet, *here, *program]


def tree(pid: int) -> list[int]:
    """Return a process and its descendants, including forks of the tests' server (tests/warm.py)."""
    children = [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]
    children += fork_of(pid)
    return [pid, *(each for child in children for each in tree(child))]


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants at once, and wait until none is alive.

    They are stopped first until no new one appears: a process that is just starting would survive the others.
    """
    doomed: list[int] = []
    while found := [one for one in tree(pid) if one not in doomed]:
        _signal(found, signal.SIGSTOP)
        doomed += found
        time.sleep(0.1)
    _signal(doomed, signal.SIGKILL)
    while any(lives(one) for one in doomed):
        time.sleep(0.02)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def another(recipe: Path, name: str) -> tuple[str, ...]:
    """Return arguments for a separate run on the same tokens."""
    runs = recipe.parent / "runs"
    (runs / name).mkdir()
    for part in ("corpus", "tokens"):
        os.symlink(runs / "t" / part, runs / name / part)
    return str(recipe), "--set", f"run.name={name}"


def trained(recipe: Path, name: str, *keys: str, environment: dict[str, str] | None = None) -> str:
    """Train a separate run to its end and return its name."""
    sets = [part for key in keys for part in ("--set", key)]
    done = bessemer("train", *another(recipe, name), *sets, environment=environment)
    assert done.returncode == 0, done.stderr
    return name


def losses(recipe: Path, name: str, kind: str = "train") -> dict[int, float]:
    return {row["step"]: row["loss"] for row in metrics(recipe, name, kind)}


def metrics(recipe: Path, name: str, kind: str = "train") -> list[dict[str, Any]]:
    """Return the lines of one kind, in order."""
    lines = (recipe.parent / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def facts(recipe: Path, name: str) -> dict[str, object]:
    folder = recipe.parent / "runs" / name / "checkpoints"
    found = json.loads((folder / (folder / "latest").read_text() / "manifest.json").read_text())
    return dict(found["facts"])


def result(recipe: Path, name: str) -> Result:
    return training_result(recipe.parent / "runs" / name)


def pid_of_rank(run: Path, rank: int) -> int:
    return int(json.loads((run / ".training" / f"rank-{rank}.json").read_text())["pid"])


def together(
    commands: list[list[str]], environments: list[dict[str, str]] | None = None
) -> list[tuple[int, str, float]]:
    """Run commands at the same time; return the exit code, standard error and end time of each."""
    started = [
        subprocess.Popen(one, env=os.environ | env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for one, env in zip(commands, environments or [{}] * len(commands), strict=True)
    ]
    try:
        said = [(process.communicate(timeout=400)[1], time.monotonic()) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *one) for process, one in zip(started, said, strict=True)]


def errors(said: str) -> list[str]:
    """Return the lines with errors."""
    return [line for line in said.splitlines() if line.startswith("bessemer: ")]


def differ(one: dict[int, float], two: dict[int, float]) -> float:
    """Return the largest difference between the losses of two runs of the same steps."""
    assert one.keys() == two.keys()
    return max(abs(one[step] - two[step]) for step in one)
