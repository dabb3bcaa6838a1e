"""Reports that the processes of a training write for each other and for the process that started them.

They are files in .training/ of the run directory, which rank 0 creates at each start of the group:

outcome.json   how the training ended: the exit code, with a message; the first process to report wins
rank-N.json    the heartbeat of rank N (guard/heartbeat.py)
rank-N.stacks  the stacks of its threads if its watchdog ended it
rank-N.error   the unexpected failure of rank N, with its traceback
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from typing import Any

from bessemer.common.errors import first_line
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_json

OUTCOME = "outcome.json"
# Words in the messages of exceptions in a process whose neighbour has died.
NEIGHBOUR_ERRORS = ("connection", "broken pipe", "socket", "ncclremoteerror", "timed out")


def write_report(run: RunDirectory, code: int, **more: Any) -> bool:
    """Report how the training ended, unless another process has done so. Returns True if this report is the first."""
    with contextlib.suppress(FileExistsError), open(run.status / OUTCOME, "x") as file:
        json.dump({"code": code, "time": time.time(), **more}, file)
        return True
    return False


def read_report(run: RunDirectory) -> dict[str, Any] | None:
    """Return the report of how the training ended; None if there is none yet."""
    with contextlib.suppress(FileNotFoundError, ValueError):  # the file may be half-written
        os.listdir(run.status)  # listing a folder refreshes a network file system's cache
        return dict(json.loads((run.status / OUTCOME).read_text()))
    return None


def write_crash(run: RunDirectory, rank: int, error: BaseException) -> None:
    """Store an unexpected failure of a process, for the message and for the incident that the next start records."""
    text = f"{type(error).__name__}: {first_line(error)}"[:500]
    is_consequence = any(words in text.lower() for words in NEIGHBOUR_ERRORS)
    facts = {"time": time.time(), "rank": rank, "error": text, "is_consequence": is_consequence}
    write_json(run.status / f"rank-{rank}.error", {**facts, "traceback": traceback.format_exc()})


def read_crashes(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the contents of rank-N.error of the last start, the cause of the others first."""
    crashes = [json.loads(path.read_text()) for path in run.status.glob("rank-*.error")]
    return sorted(crashes, key=lambda crash: (crash["is_consequence"], crash["time"]))
