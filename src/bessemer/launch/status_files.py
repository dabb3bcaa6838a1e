"""Reports of the processes of a training to each other, and to what started them.

Files in .training/ of the run directory, which rank 0 makes at each start of the group:
outcome.json   how the training ended: the exit code, with a message; the first process to report wins
rank-N.json    the heartbeat of rank N (guard/heartbeat.py), rank-N.stacks its threads' stacks where its watchdog ended it
rank-N.error   the unexpected failure of rank N, with its traceback
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from typing import Any

from bessemer.common.errors import BessemerError, InputError, Stopped, first_line
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import write_atomic

ERRORS = {error.exit_code: error for error in (BessemerError, InputError, Stopped)}
OUTCOME = "outcome.json"
# In the messages of exceptions in a process whose neighbour has died.
NEIGHBOUR_ERRORS = ("connection", "broken pipe", "socket", "ncclremoteerror", "timed out")


def write_report(run: RunDirectory, code: int, **more: Any) -> bool:
    """Report how the training ended, unless another process has done so. Returns whether this report is the first."""
    own = run.status / f"outcome-{os.getpid()}-{time.monotonic_ns()}"
    own.write_text(json.dumps({"code": code, "time": time.time(), **more}))
    try:
        os.link(own, run.status / OUTCOME)  # fails where the file exists
        return True
    except FileExistsError:
        return False
    finally:
        own.unlink()


def read_report(run: RunDirectory) -> dict[str, Any] | None:
    """Return how the training ended, if it has."""
    with contextlib.suppress(FileNotFoundError):
        os.listdir(run.status)  # to open a folder refreshes a network file system's cache
        return dict(json.loads((run.status / OUTCOME).read_text()))
    return None


def write_crash(run: RunDirectory, rank: int, error: BaseException) -> None:
    """Keep an unexpected failure of a process for the message, and for the incident that the next start records."""
    crash = {
        "time": time.time(), "rank": rank, "error": f"{type(error).__name__}: {first_line(error)}"[:500],
        "traceback": traceback.format_exc(),
    }  # fmt: skip
    write_atomic(run.status / f"rank-{rank}.error", json.dumps(crash))


def read_crashes(run: RunDirectory) -> dict[int, dict[str, Any]]:
    """Return the unexpected failures of the last start of the group, by rank."""
    found = [json.loads(path.read_text()) for path in run.status.glob("rank-*.error")]
    return {crash["rank"]: crash for crash in found}


def root_crash(run: RunDirectory) -> dict[str, Any] | None:
    """Return the first crash that was not caused by a neighbour's."""
    found = read_crashes(run).values()
    roots = [crash for crash in found if not is_from_neighbour(crash)] or found
    return min(roots, key=lambda crash: float(crash["time"]), default=None)


def is_from_neighbour(crash: dict[str, Any]) -> bool:
    """Whether a crash followed from the end of another process."""
    return any(words in crash["error"].lower() for words in NEIGHBOUR_ERRORS)


def describe_resume(run: RunDirectory) -> str:
    """Return from where the same command continues."""
    if not checkpoint_steps(run.checkpoints):
        return "no step of the training is saved yet; the same command begins it"
    return "the same command continues from the last checkpoint"
