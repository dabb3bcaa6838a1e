"""Goodput: how much of a run's wall time are productive steps, and where the rest goes.

Every few seconds rank 0 appends its totals to time.jsonl, so that a kill loses only the last seconds. A session is the time from
one start to the next. `accounts` derives repeated steps and the time between sessions from the lines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, time
from typing import Any

from bessemer.logfile import LogFile, end_torn_line, json_line
from bessemer.run import read_json_lines

WRITE_SECONDS = 5.0
KINDS = {
    "productive": "productive steps",
    "data_wait": "waiting for data",
    "validation": "validation",
    "saving": "saving",
    "memory": "copies in memory",
    "start": "start-up",
    "recovery": "rolling back",
    "redone": "repeated steps",
    "stopped": "stopped, until the restart",
    "other": "other",
}
"""The kinds of time, with their names in the report."""


class WallClock:
    """Counts the seconds of this session by kind, and how often each was counted."""

    def __init__(self, path: Path | None, step: int, seconds: float, reached: int = 0) -> None:
        """path: of time.jsonl, None on ranks other than 0; step: at which the session starts; seconds: since then; reached: the
        last step of the session before."""
        self._log = None if path is None else LogFile(path)
        if path is not None:
            end_torn_line(path)
        self._began, self._from, self._redone = time() - seconds, step, 0
        self._reached = reached
        self._seconds: defaultdict[str, float] = defaultdict(float, start=seconds)
        self._counts: Counter[str] = Counter()
        self._written = self._mark = perf_counter()

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Count the time of the block as `kind` and not as part of a step."""
        begun = perf_counter()
        yield
        seconds = perf_counter() - begun
        self._seconds[kind] += seconds
        self._counts[kind] += 1
        self._mark += seconds

    def between_steps(self) -> dict[str, float]:
        """Seconds of validations and saves so far."""
        return {kind: self._seconds.get(kind, 0.0) for kind in ("validation", "saving")}

    def mean(self, kind: str) -> float | None:
        """Mean seconds of a validation or a save; None before the first."""
        return self._seconds[kind] / self._counts[kind] if self._counts[kind] else None

    def stepped(self, step: int, data_wait: float) -> None:
        """Count the time since the last step that was not counted otherwise. step: just completed; data_wait: seconds."""
        now = perf_counter()
        self._seconds["steps"] += now - self._mark
        self._seconds["data_wait"] += data_wait
        self._mark = now
        if now - self._written > WRITE_SECONDS:
            self.write(step)

    def rolled_back(self, at: int, to: int) -> None:
        """Count the steps after `to` as repeated."""
        self._redone += at - to

    def write(self, step: int, is_finished: bool = False) -> None:
        """Append the totals. is_finished: the run is at its last step; the time until it is trained longer does not count."""
        self._written = perf_counter()
        if self._log is not None:
            row = {
                "began": self._began,
                "at": time(),
                "from": self._from,
                "reached": self._reached,
                "step": step,
                "redone_steps": self._redone,
            }
            row |= {"finished": True} if is_finished else {}
            self._log.append(json_line(row | {kind: round(seconds, 3) for kind, seconds in self._seconds.items()}))


def accounts(path: Path) -> dict[str, Any] | None:
    """Seconds of a run by kind (KINDS), `total`, `effective`, the share of productive steps, the number of `sessions`, and the
    `restarts` between them: when (UTC), after which step, from which, seconds. None without lines."""
    rows = read_json_lines(path)
    last = {row["began"]: row for row in rows if isinstance(row, dict) and isinstance(row.get("began"), float)}
    sessions = [last[began] for began in sorted(last)]
    if not sessions:
        return None
    seconds, restarts = dict.fromkeys(KINDS, 0.0), []
    for row, following in zip(sessions, [*sessions[1:], None], strict=True):
        redone = row["redone_steps"]
        done, in_steps = row["step"] - row["from"] + redone, row.get("steps", 0.0)
        if following is not None:
            redone += max(row["step"] - following["from"], 0)
            if not row.get("finished"):
                start, pause = following["from"], max(following["began"] - row["at"], 0.0)
                when = datetime.fromtimestamp(following["began"], UTC).isoformat(timespec="seconds")
                after = max(row["step"], following.get("reached", 0), start)  # the last line is some seconds old
                restarts.append({"time": when, "after": after, "from": start, "seconds": pause})
                seconds["stopped"] += pause
        for kind in ("data_wait", "validation", "saving", "memory", "start", "recovery"):
            seconds[kind] += row.get(kind, 0.0)
        redone_seconds = min(redone * in_steps / done, in_steps) if done > 0 else 0.0
        seconds["redone"] += redone_seconds
        seconds["productive"] += max(in_steps - row.get("data_wait", 0.0) - redone_seconds, 0.0)
    total = sum(row["at"] - row["began"] for row in sessions) + seconds["stopped"]
    seconds["other"] = max(total - sum(seconds.values()), 0.0)
    effective = seconds["productive"] / total if total else 0.0
    return {**seconds, "total": total, "effective": effective, "sessions": len(sessions), "restarts": restarts}
