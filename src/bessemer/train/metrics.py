"""What the run tells while it trains: one JSON line a step, and the same curves for TensorBoard."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from bessemer.run import RunFolder, append_json_line, read_json_lines, write_atomic

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class MetricsLog:
    """Appends to metrics.jsonl and, when asked, to TensorBoard event files.

    A resumed run takes back what was written after its checkpoint, so that every step stands once.
    """

    def __init__(self, run: RunFolder, resumed_at: int, tensorboard: bool) -> None:
        self._path = run.metrics
        _rewind(run.metrics, resumed_at)
        self._board: SummaryWriter | None = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run.tensorboard), purge_step=resumed_at + 1 if resumed_at else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._board is not None:
            self._board.close()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One line. Values that are not finite are written as null: JSON has no NaN, and readers choke on it."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        append_json_line(self._path, {"kind": kind, "step": step, **_finite(values), "time": now})
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, dict):
                    for key, inner in value.items():
                        self._board.add_scalar(f"{kind}/{name}/{key}", inner, step)
                else:
                    self._board.add_scalar(f"{kind}/{name}", value, step)


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
    kept = [row for row in rows if row.get("step", 0) <= step]
    if len(kept) != len(rows) or (path.exists() and not path.read_bytes().endswith(b"\n")):
        write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
