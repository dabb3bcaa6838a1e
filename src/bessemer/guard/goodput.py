"""Goodput: the fraction of a run's wall time spent in productive steps, and where the rest goes.

Rank 0 appends its totals to time.jsonl every few seconds, so a kill loses only the last seconds. A session is the time from one
start to the next. Its last line names what stopped it, unless it was killed. `summarize_sessions` derives repeated steps and
the time between sessions from these lines.
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
from bessemer.common.log_file import append_entry, json_line
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_json_lines

WRITE_SECONDS = 5.0
# A step stalled if it took STALL_SECONDS and STALL_RATIO x the median of the last STALL_STEPS steps.
STALL_SECONDS, STALL_RATIO, STALL_STEPS = 5.0, 10.0, 8
BY_GUARD = "the guard"  # the `stopped_by` of a session that the guard ended
ERROR = "an error: "  # the start of the `stopped_by` of a session that an error ended
TIME_KINDS = {
    "productive": "productive steps", "data_wait": "waiting for data", "validation": "validation", "saving": "saving",
    "start": "start-up", "recovery": "rolling back", "redone": "repeated steps", "stalled": "steps that hung",
    "stopped": "stopped, until the restart", "other": "other",
}  # fmt: skip
"""The kinds of time, with their names in the report."""


class WallClock:
    """A clock of a session (one execution of a run's training) that divides its seconds by kind (TIME_KINDS)."""

    def __init__(self, path: Path | None, step: int, seconds: float, reached: int = 0, at: str | None = None) -> None:
        """Start the clock of a session.

        Args:
            path: The path of time.jsonl; None on ranks other than 0.
            step: The step at which the session starts.
            seconds: The seconds since the session started.
            reached: The last step that the previous session logged.
            at: The time (ISO) of that line.
        """
        self._path = path
        self._began, self._from, self._redone = time() - seconds, step, 0
        self._reached, self._reached_at = reached, at
        self._step, self._has_ended = step, False
        self._seconds: defaultdict[str, float] = defaultdict(float, start=seconds)
        self._recent = deque[float](maxlen=STALL_STEPS)  # seconds of the last steps
        self._written = self._mark = perf_counter()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Write a line when the session starts, and another one if an error ends it.

        A session without a line about its end was killed or lost.
        """
        self.write(self._step)
        try:
            yield
        except BaseException as error:
            if not (self._has_ended or isinstance(error, Stopped)):
                message = " ".join(str(error).split()) if isinstance(error, BessemerError) else type(error).__name__
                self.write(self._step, f"{ERROR}{message}")
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
        """Return the `seconds` since the session started, and the parts of them in `validation` and `saving`."""
        return {"seconds": time() - self._began, **{kind: self._seconds[kind] for kind in ("validation", "saving")}}

    def add_step(self, step: int, data_wait: float, num_steps: int = 1) -> None:
        """Count the time since the last call as steps, without what `counting` counted. Excess time of a long step is a stall.

        Args:
            step: The step that was just completed.
            data_wait: The mean seconds for which a step waited for data.
            num_steps: The number of steps since the last call.
        """
        now, self._step = perf_counter(), step
        waited = num_steps * data_wait
        computing = now - self._mark - waited
        usual = median(self._recent) if len(self._recent) == STALL_STEPS else computing / num_steps
        slowest = computing - (num_steps - 1) * usual  # assumes that only one step was slow
        if slowest > max(STALL_SECONDS, STALL_RATIO * usual):
            self._seconds["stalled"] += slowest - usual
            computing = num_steps * usual
        self._recent.append(computing / num_steps)
        self._seconds["steps"] += computing + waited
        self._seconds["data_wait"] += waited
        self._mark = now
        if now - self._written > WRITE_SECONDS:
            self.write(step)

    def add_rollback(self, completed: int, to: int) -> None:
        """Count the steps from `to` to `completed`, both numbers of completed steps, as repeated."""
        self._redone += completed - to

    def write(self, step: int, stopped_by: str | None = None, *, is_finished: bool = False) -> None:
        """Append the totals to time.jsonl.

        Args:
            step: The last completed step.
            stopped_by: The reason for which the session ends here, if it does.
            is_finished: True at the last step of the run; the time until the run is extended does not count.
        """
        self._written, self._has_ended = perf_counter(), is_finished or stopped_by is not None
        if self._path is not None:
            saved = checkpoint_steps(RunDirectory(self._path.parent).checkpoints)
            row: dict[str, Any] = {"began": self._began, "at": time(), "from": self._from, "reached": self._reached}
            row |= {"step": step, "redone_steps": self._redone}
            optional = {"reached_at": self._reached_at, "saved": max(saved, default=0), "finished": is_finished}
            row |= {key: value for key, value in (optional | {"stopped_by": stopped_by}).items() if value}
            row |= {kind: round(seconds, 3) for kind, seconds in self._seconds.items()}
            append_entry(self._path, json_line(row))


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """Return the last line of each session in time.jsonl, ordered by time."""
    last = {row["began"]: row for row in read_json_lines(path) if isinstance(row.get("began"), float)}
    return [last[began] for began in sorted(last)]


def summarize_sessions(
    sessions: list[dict[str, Any]], logged: tuple[int, str | None] | None = None
) -> dict[str, Any] | None:
    """Summarize where the wall time of a run went.

    Args:
        sessions: The last line of each session.
        logged: The last step in metrics.jsonl and its time (ISO). It covers the steps after the last line of a session that is
            still active, was killed or was lost.

    Returns:
        The seconds by kind (TIME_KINDS) and their `total`; `effective`, the share of productive steps; the number of `sessions`
        and the `restarts` between them; what ended the last session (`stopped_by`) and the time of its last line (`last`,
        seconds since the epoch). A restart has its `time` (UTC), its step (`from`), the last step before it (`after`), when
        the run `stopped`, why (`stopped_by`, None if killed or lost) and the `seconds` between. None without sessions.
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
        if not row.get("finished") and stopped_by is None:  # the session trained on after its last line
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
        computing = max(in_steps - row.get("data_wait", 0.0), 0.0)  # the wait for data is a separate kind
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
    """Convert an ISO time from a log to seconds since the epoch; 0 if it is missing or invalid."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (TypeError, ValueError):
        return 0.0
