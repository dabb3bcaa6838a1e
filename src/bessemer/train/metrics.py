"""What the run tells while it trains: one JSON line a step, and the same curves for TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bessemer.logfile import LogFile, json_line
from bessemer.run import RunFolder, read_json_lines, write_atomic
from bessemer.train.tensorboard import EventFile


class MetricsLog:
    """Appends to metrics.jsonl and, when asked, to TensorBoard event files.

    A resumed run takes back what was written after its checkpoint, so that every step stands once.
    """

    def __init__(self, run: RunFolder, resumed_at: int, tensorboard: bool) -> None:
        _rewind(run.metrics, resumed_at)
        self._lines = LogFile(run.metrics)
        self._board = EventFile(run.tensorboard, resumed_at) if tensorboard else None
        self._files = ExitStack()

    def __enter__(self) -> Self:
        self._files.enter_context(self._lines)
        if self._board is not None:
            self._files.enter_context(self._board.file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One line. Values that are not finite are written as null: JSON has no NaN, and readers choke on it."""
        now = datetime.now(UTC)
        row = {"kind": kind, "step": step, **_finite(values), "time": now.isoformat(timespec="milliseconds")}
        self._lines.append(json_line(row))
        if self._board is not None:
            self._board.write(step, dict(_scalars(kind, values)), now.timestamp())


class NoLog:
    """The log of a process that leaves the writing to another."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing was opened."""

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Nothing."""


Log = MetricsLog | NoLog


def _rewind(path: Path, step: int) -> None:
    rows = read_json_lines(path)
    kept = [row for row in rows if step and row.get("step", 0) <= step]  # a fresh start validates at step 0 again
    if len(kept) != len(rows) or (path.exists() and not path.read_bytes().endswith(b"\n")):
        write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def _scalars(name: str, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers by their names as TensorBoard shows them: kind/name, or kind/name/key."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _scalars(f"{name}/{key}", value)
        elif isinstance(value, int | float):
            yield f"{name}/{key}", float(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
