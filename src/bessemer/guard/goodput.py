"""Goodput: how much of a run's wall time are productive steps, and where the rest goes.

Every few seconds rank 0 appends its totals to time.jsonl, so that a kill loses only the last seconds; the last line of a session
says what stopped it, unless it was killed. A session is the time from one start to the next. `summarize_sessions` derives
repeated steps and the time between sessions from the lines.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter, time
from typing import Any

from bessemer.common.errors import BessemerError, Stopped
from bessemer.common.log_file import LogFile, json_line
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_json_lines

WRITE_SECONDS = 5.0
# A step hung that takes so long, and so many times the median of so many steps before it.
STALL_SECONDS, STALL_RATIO, STALL_STEPS = 5.0, 10.0, 8
BY_GUARD = "the guard"  # what ended a session
ERROR = "an error: "  # before the message of what ended a session
TIME_KINDS = {
    "productive": "productive steps", "data_wait": "waiting for data", "validation": "validation", "saving": "saving",
    "start": "start-up", "recovery": "rolling back", "redone": "repeated steps", "stalled": "steps that hung",
    "stopped": "stopped, until the restart", "other": "other",
}  # fmt: skip
"""The kinds of time, with their names in the report."""


class WallClock:
    """Counts the seconds of this session by kind."""

    def __init__(self, path: Path | None, step: int, seconds: float, reached: int = 0, at: str | None = None) -> None:
        """path: of time.jsonl, None on ranks other than 0; step: at which the session starts; seconds: since then; reached, at:
        the last step that the session before logged, and the time (ISO) of its last line."""
        self._log = None if path is None else LogFile(path)
        self._began, self._from, self._redone = time() - seconds, step, 0
        self._reached, self._reached_at = reached, at
        self._step, self._has_ended = step, False
        self._seconds: defaultdict[str, float] = defaultdict(float, start=seconds)
        self._recent = deque[float](maxlen=STALL_STEPS)  # seconds of the last steps
        self._written = self._mark = perf_counter()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Write when the session begins, and where an error ends it: one with no line about its end was killed or lost."""
        self.write(self._step)
        try:
            yield
        except BaseException as error:
            if not (self._has_ended or isinstance(error, Stopped)):
                said = " ".join(str(error).split()) if isinstance(error, BessemerError) else type(error).__name__
                self.write(self._step, f"{ERROR}{said}")
            raise

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Count the time of the block as `kind` and not as part of a step."""
        assert kind in TIME_KINDS, kind
        begun = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - begun
            self._seconds[kind] += seconds
            self._mark += seconds

    def totals(self) -> dict[str, float]:
        """Seconds since the session began, and of validations and saves in it."""
        return {"seconds": time() - self._began, **{kind: self._seconds[kind] for kind in ("validation", "saving")}}

    def stepped(self, step: int, data_wait: float, num_steps: int = 1) -> None:
        """Count the time since the last call that was not counted otherwise. step: just completed, the last of `num_steps`;
        data_wait: mean seconds of a step."""
        now, self._step = perf_counter(), step
        waited = num_steps * data_wait
        computing = now - self._mark - waited
        usual = median(self._recent) if len(self._recent) == STALL_STEPS else computing / num_steps
        slowest = computing - (num_steps - 1) * usual  # where the others took the usual time
        if slowest > max(STALL_SECONDS, STALL_RATIO * usual):
            self._seconds["stalled"] += slowest - usual
            computing = num_steps * usual
        self._recent.append(computing / num_steps)
        self._seconds["steps"] += computing + waited
        self._seconds["data_wait"] += waited
        self._mark = now
        if now - self._written > WRITE_SECONDS:
            self.write(step)

    def rolled_back(self, completed: int, to: int) -> None:
        """Count the completed steps after `to` as repeated."""
        self._redone += completed - to

    def write(self, step: int, stopped_by: str | None = None, *, is_finished: bool = False) -> None:
        """Append the totals. stopped_by: what ends the session here; is_finished: the run is at its last step; the time until it
        is trained longer does not count."""
        self._written, self._has_ended = perf_counter(), is_finished or stopped_by is not None
        if self._log is not None:
            saved = checkpoint_steps(RunDirectory(self._log.path.parent).checkpoints)
            row: dict[str, Any] = {"began": self._began, "at": time(), "from": self._from, "reached": self._reached}
            row |= {"step": step, "redone_steps": self._redone}
            optional = {"reached_at": self._reached_at, "saved": max(saved, default=0), "finished": is_finished}
            row |= {key: value for key, value in (optional | {"stopped_by": stopped_by}).items() if value}
            self._log.append(json_line(row | {kind: round(seconds, 3) for kind, seconds in self._seconds.items()}))


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """The last line of each session in time.jsonl, in order of time."""
    last = {row["began"]: row for row in read_json_lines(path) if isinstance(row.get("began"), float)}
    return [last[began] for began in sorted(last)]


def summarize_sessions(
    sessions: list[dict[str, Any]], logged: tuple[int, str | None] | None = None
) -> dict[str, Any] | None:
    """Return where the wall time of a run went; None without sessions.

    It has the seconds by kind (TIME_KINDS), `total`, `effective` (the share of productive steps), the number of `sessions`, the
    `restarts` between them, what ended the last one as `stopped_by`, and the time of its last line (seconds since the epoch) as
    `last`. A restart has its `time` (UTC), `from` its step, `after` the last step before, when the run `stopped`, what it was
    `stopped_by` (None for killed or lost), and the `seconds` between.

    Args:
        sessions: The last line of each.
        logged: The last step in metrics.jsonl and its time (ISO), for what was trained after the last line of a session that has
            not ended, or was killed, or lost.
    """
    if not sessions:
        return None
    seconds, restarts, total = dict.fromkeys(TIME_KINDS, 0.0), [], 0.0
    for row, following in zip(sessions, [*sessions[1:], None], strict=True):
        redone = row["redone_steps"]
        done, in_steps = row["step"] - row["from"] + redone, row.get("steps", 0.0)
        ended, stopped_by, after = row["at"], row.get("stopped_by"), row["step"]
        start, until = after, float("inf")
        reached, reached_at = logged or (0, None)
        if following is not None:
            start, until = following["from"], following["began"]
            reached, reached_at = max(following.get("reached", 0), start), following.get("reached_at")
        if not row.get("finished") and stopped_by is None:  # the last line is some seconds old
            after = max(after, reached)
            ended = max(ended, min(seconds_of(reached_at), until))
            if after > row["step"]:
                done, in_steps = done + after - row["step"], in_steps + ended - row["at"]
        if following is not None:
            redone += max(after - start, 0)
            if not row.get("finished"):
                pause = max(following["began"] - ended, 0.0)
                restarts.append({
                    "time": _iso(following["began"]), "after": after, "from": start, "seconds": pause,
                    "stopped": _iso(ended), "stopped_by": stopped_by,
                })  # fmt: skip
                seconds["stopped"] += pause
        total += ended - row["began"]
        for kind in seconds.keys() & row.keys():
            seconds[kind] += row[kind]
        computing = max(in_steps - row.get("data_wait", 0.0), 0.0)  # the wait is a kind of its own
        redone_seconds = min(redone / done, 1.0) * computing if done > 0 else 0.0
        seconds["redone"] += redone_seconds
        seconds["productive"] += computing - redone_seconds
    total += seconds["stopped"]
    seconds["other"] = max(total - sum(seconds.values()), 0.0)
    effective = seconds["productive"] / total if total else 0.0
    return {
        **seconds, "total": total, "effective": effective, "sessions": len(sessions), "restarts": restarts,
        "stopped_by": sessions[-1].get("stopped_by"), "last": ended,
    }  # fmt: skip


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def seconds_of(moment: Any) -> float:
    """Seconds since the epoch of an ISO time; 0 where it is none."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (TypeError, ValueError):
        return 0.0
