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
    """Write the report on how the training ended, unless another process has written it. Return True if this call wrote it.

    `code` is the exit code, and `more` are other values of the report: `summary`, or `message` and `early` for an error.
    """
    with contextlib.suppress(FileExistsError), open(run.status / OUTCOME, "x") as file:
        json.dump({"code": code, "time": time.time(), **more}, file)
        return True
    return False


def read_report(run: RunDirectory) -> dict[str, Any] | None:
    """Return the report that `write_report` wrote, a dict with at least `code` and `time`; None if there is none yet."""
    with contextlib.suppress(FileNotFoundError, ValueError):  # the file may be half-written
        os.listdir(run.status)  # listing a folder refreshes a network file system's cache
        return dict(json.loads((run.status / OUTCOME).read_text()))
    return None


def write_crash(run: RunDirectory, rank: int, error: BaseException) -> None:
    """Write an unexpected error of a process to a file of its rank.

    The launcher's error message and the incident that the next start records are made from it.
    """
    text = f"{type(error).__name__}: {first_line(error)}"[:500]
    is_consequence = any(words in text.lower() for words in NEIGHBOUR_ERRORS)
    facts = {"time": time.time(), "rank": rank, "error": text, "is_consequence": is_consequence}
    write_json(run.status / f"rank-{rank}.error", {**facts, "traceback": traceback.format_exc()})


def read_crashes(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the errors of the last start's processes, as `write_crash` wrote them, causes before consequences."""
    crashes = [json.loads(path.read_text()) for path in run.status.glob("rank-*.error")]
    return sorted(crashes, key=lambda crash: (crash["is_consequence"], crash["time"]))
