"""Where the wall time of a run goes: productive steps, and all the rest.

time.jsonl has one line each few seconds with the totals of the process that trains, so that nothing is lost with it when it is
killed. A session is from one start to the next. Steps that had to be done again and the time between sessions follow from the
lines (`accounts`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, time
from typing import Any

from bessemer.logfile import LogFile, json_line
from bessemer.run import read_json_lines

NOTE_SECONDS = 5.0
KINDS = {
    "productive": "productive steps",
    "data_wait": "waiting for data",
    "validation": "validation",
    "saving": "saving",
    "start": "start-up",
    "recovery": "rolling back",
    "redone": "steps done again",
    "stopped": "stopped, until the restart",
    "other": "other",
}
"""What the time is divided into, in words."""


class WallClock:
    """Counts the seconds of this session by kind."""

    def __init__(self, path: Path | None, step: int, seconds: float) -> None:
        """path: of time.jsonl, None on ranks other than 0; step: where the session starts; seconds: since it did."""
        self._log = None if path is None else LogFile(path)
        self._began, self._from, self._redone = time() - seconds, step, 0
        self._seconds: defaultdict[str, float] = defaultdict(float, start=seconds)
        self._noted = self._mark = perf_counter()

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Count the time of the block, which is not a step's."""
        begun = perf_counter()
        yield
        seconds = perf_counter() - begun
        self._seconds[kind] += seconds
        self._mark += seconds

    def stepped(self, step: int, data_wait: float) -> None:
        """After each step: all time since the last one that was not counted otherwise. step: completed; data_wait: seconds."""
        now = perf_counter()
        self._seconds["steps"] += now - self._mark
        self._seconds["data_wait"] += data_wait
        self._mark = now
        if now - self._noted > NOTE_SECONDS:
            self.note(step)

    def rolled_back(self, at: int, to: int) -> None:
        """The steps after `to` will be done again."""
        self._redone += at - to

    def note(self, step: int) -> None:
        """Write the totals."""
        self._noted = perf_counter()
        if self._log is not None:
            totals = {kind: round(seconds, 3) for kind, seconds in self._seconds.items()}
            row = {
                "began": self._began,
                "at": time(),
                "from": self._from,
                "step": step,
                "redone_steps": self._redone,
                **totals,
            }
            self._log.append(json_line(row))


def accounts(path: Path) -> dict[str, Any] | None:
    """Seconds of a run by kind (KINDS), `total`, `effective`, the share of productive steps, and the number of `sessions`; None
    where nothing was noted."""
    last: dict[float, dict[str, Any]] = {}
    for row in read_json_lines(path):
        if isinstance(row, dict) and isinstance(row.get("began"), float):
            last[row["began"]] = row
    sessions = [last[began] for began in sorted(last)]
    if not sessions:
        return None
    seconds = dict.fromkeys(KINDS, 0.0)
    for number, row in enumerate(sessions):
        done = row["step"] - row["from"] + row["redone_steps"]
        step_seconds = row.get("steps", 0.0) / done if done > 0 else 0.0
        redone = row["redone_steps"]
        if number + 1 < len(sessions):
            following = sessions[number + 1]
            redone += max(row["step"] - following["from"], 0)
            seconds["stopped"] += max(following["began"] - row["at"], 0.0)
        for kind in ("data_wait", "validation", "saving", "start", "recovery"):
            seconds[kind] += row.get(kind, 0.0)
        redone_seconds = min(redone * step_seconds, row.get("steps", 0.0))
        seconds["redone"] += redone_seconds
        seconds["productive"] += max(row.get("steps", 0.0) - row.get("data_wait", 0.0) - redone_seconds, 0.0)
    total = sessions[-1]["at"] - sessions[0]["began"]
    seconds["other"] = max(total - sum(seconds.values()), 0.0)
    return {
        **seconds,
        "total": total,
        "effective": seconds["productive"] / total if total else 0.0,
        "sessions": len(sessions),
    }
