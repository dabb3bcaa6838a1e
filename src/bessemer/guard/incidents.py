"""The record of what went wrong: one line each in incidents.jsonl, with the documents involved."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from bessemer.logfile import LogFile, json_line


def record(path: Path, *, step: int, what: str, cause: str, action: str, rank: int = 0, **more: Any) -> None:
    """Append an incident. what: its kind, as nonfinite_step; cause and action: for a person; more: plain values.

    One that cannot be written (a full disk) is written with the next one of this process.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    row = {"time": now, "step": step, "rank": rank, "what": what, "cause": cause, "action": action, **more}
    _log(path).append(json_line(row))


@cache
def _log(path: Path) -> LogFile:
    return LogFile(path)
