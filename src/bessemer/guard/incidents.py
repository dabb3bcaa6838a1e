"""The record of what went wrong: one line each in incidents.jsonl, with the documents involved."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bessemer.run import append_json_line


def record(path: Path, *, step: int, what: str, cause: str, action: str, rank: int = 0, **more: Any) -> None:
    """Append an incident. what: its kind, as nonfinite_step; cause and action: for a person; more: plain values."""
    append_json_line(
        path,
        {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": step,
            "rank": rank,
            "what": what,
            "cause": cause,
            "action": action,
            **more,
        },
    )
