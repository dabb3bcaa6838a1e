"""Files of arrays through which tasks exchange what each has for each.

A task writes one file, cut by who reads it: runs of about `run_bytes`, sorted by target; then where each target begins in each
run (int64, in bytes); then the numbers of runs and targets. So a task writes with bounded memory and few files, and reads what
concerns it with one seek for each run. Arrays are read into memory, never mapped.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import each

RUN_BYTES = 64 << 20  # of values that wait to be sorted


class SplitWriter:
    """Arrays cut by target, from 0 to num_targets - 1, into a file."""

    def __init__(self, path: Path, num_targets: int, run_bytes: int = RUN_BYTES) -> None:
        self.num_targets, self.run_bytes = num_targets, run_bytes
        self._file = path.open("wb")
        self._starts: list[np.ndarray] = []
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]] = []
        self._waiting_bytes = 0

    def write(self, targets: np.ndarray, values: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Append values[i] for targets[i], in this order within a target. With `lengths` values are ragged: the first
        lengths[0] are for targets[0], and so on; so in all calls or in none."""
        if len(targets):
            self._waiting.append((targets, values, lengths))
            self._waiting_bytes += values.nbytes
        if self._waiting_bytes > self.run_bytes:
            self._write_run()

    def _write_run(self) -> None:
        targets, values = (np.concatenate([part[place] for part in self._waiting]) for place in (0, 1))
        lengths = None
        if self._waiting[0][2] is not None:
            lengths = np.concatenate([part[2] for part in self._waiting])
        if self.num_targets > 1:
            narrow = targets.astype(np.uint16) if self.num_targets <= 1 << 16 else targets  # these NumPy sorts by radix
            order = np.argsort(narrow, kind="stable")
            values = values[order] if lengths is None else take_ragged(values, lengths, order)
        counts = np.bincount(targets.astype(np.int64), lengths, self.num_targets).astype(np.int64)
        self._starts.append(self._file.tell() + np.append(0, np.cumsum(counts) * values.itemsize))
        self._file.write(np.ascontiguousarray(values).view(np.uint8).data)
        self._waiting, self._waiting_bytes = [], 0

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file as file:
            if error is None and self._waiting:
                self._write_run()
            for starts in (*self._starts, np.array([len(self._starts), self.num_targets])):
                file.write(starts.astype("<i8").tobytes())


def write_split(
    path: Path, num_targets: int, targets: np.ndarray, values: np.ndarray, lengths: np.ndarray | None = None
) -> None:
    """Write arrays that are in memory, as one call of `SplitWriter.write`."""
    with SplitWriter(path, num_targets) as file:
        file.write(targets, values, lengths)


def read_split(paths: Iterable[AnyPath], target: int | None, dtype: npt.DTypeLike) -> np.ndarray:
    """Return the values for a target (None: for all) in files of `SplitWriter`, one behind the other."""
    parts: list[np.ndarray] = [np.empty(0, dtype=dtype)]
    for found in each(lambda path: _read_runs(path, target, np.dtype(dtype)), paths):
        parts += found
    return np.concatenate(parts) if len(parts) != 2 else parts[1]


def _read_runs(path: AnyPath, target: int | None, kind: np.dtype[Any]) -> list[np.ndarray]:
    """Return the values for a target (None: for all) in each run that has some."""
    found = []
    with path.open("rb") as file:
        size = file.seek(-16, 2)
        num_runs, num_targets = np.frombuffer(file.read(16), dtype="<i8").tolist()
        wanted = range(num_targets) if target is None else range(target, target + 1)
        for run in range(num_runs):
            file.seek(size - 8 * ((num_runs - run) * (num_targets + 1) - wanted.start))
            starts = read_array(file, "<i8", len(wanted) + 1)
            first, end = int(starts[0]), int(starts[-1])
            if end > first:
                file.seek(first)
                found.append(read_array(file, kind, (end - first) // kind.itemsize))
                if found[-1].nbytes < end - first:
                    raise OSError(f"{path}: ends before byte {end}; was it cut?")
    return found


def read_array(file: BinaryIO, dtype: npt.DTypeLike, count: int) -> np.ndarray:
    """The next `count` values of a file, here or in a store; fewer at its end."""
    values = np.empty(count, dtype=dtype)
    num_bytes = file.readinto(values.view(np.uint8).data)  # type: ignore[attr-defined]
    return values[: num_bytes // values.itemsize]


def load_array(path: AnyPath) -> np.ndarray:
    """An .npy file, here or in a store."""
    with path.open("rb") as file:
        return np.asarray(np.load(file))


def take_ragged(values: np.ndarray, lengths: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Some of the arrays that lie one behind the other in `values`, by their numbers."""
    starts = np.cumsum(lengths) - lengths
    counts = lengths[chosen].astype(np.int64)
    ends = np.cumsum(counts)
    places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts[chosen] - ends + counts, counts)
    return np.asarray(values[places])
