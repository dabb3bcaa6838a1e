"""Files through which the tasks of the search for duplicates exchange arrays: one a task, cut by who reads it.

A file holds runs of about `RUN_BYTES`, sorted by target; then where each target begins in each run (int64, in bytes);
then the numbers of runs and targets. So a task writes with bounded memory and few files, and reads what concerns it
with one seek for each run. Arrays are read into memory, never mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from bessemer import store_path

RUN_BYTES = 64 << 20  # of values that wait to be sorted
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing


class SplitWriter:
    """Arrays cut by target, from 0 to num_targets - 1, into a file."""

    def __init__(self, path: Path, num_targets: int) -> None:
        self.num_targets = num_targets
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
        if self._waiting_bytes > RUN_BYTES:
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


def read_split(paths: Iterable[Path], target: int | None, dtype: npt.DTypeLike) -> np.ndarray:
    """The values for a target (None: for all) in files of `SplitWriter`, one behind the other."""
    parts: list[np.ndarray] = [np.empty(0, dtype=dtype)]
    for found in store_path.each(lambda path: list(split_runs(path, target, dtype)), paths):
        parts += found
    return np.concatenate(parts) if len(parts) != 2 else parts[1]


def split_runs(path: Path, target: int | None, dtype: npt.DTypeLike) -> Iterator[np.ndarray]:
    """The values for a target (None: for all) run by run, as they were written: some `RUN_BYTES` at one time."""
    kind = np.dtype(dtype)
    with path.open("rb") as file:
        for start, end in _spans(file, target):
            file.seek(start)
            values = read_array(file, kind, (end - start) // kind.itemsize)
            if values.nbytes < end - start:
                raise OSError(f"{path}: ends before byte {end}; was it cut?")
            yield values


def read_array(file: BinaryIO, dtype: npt.DTypeLike, count: int) -> np.ndarray:
    """The next `count` values of a file, here or in a store; fewer at its end."""
    values = np.empty(count, dtype=dtype)
    num_bytes = file.readinto(values.view(np.uint8).data)  # type: ignore[attr-defined]
    return values[: num_bytes // values.itemsize]


def load_array(path: Path) -> np.ndarray:
    """An .npy file, here or in a store."""
    with path.open("rb") as file:
        array: np.ndarray = np.load(file)
    return array


def _spans(file: BinaryIO, target: int | None) -> Iterator[tuple[int, int]]:
    """Where the values for a target begin and end in each run that has some."""
    size = file.seek(-16, 2)
    num_runs, num_targets = np.frombuffer(file.read(16), dtype="<i8").tolist()
    first, last = (0, num_targets) if target is None else (target, target + 1)
    for run in range(num_runs):
        place = size - 8 * (num_runs - run) * (num_targets + 1)
        ends = []
        for number in (first, last):
            file.seek(place + 8 * number)
            ends.append(int.from_bytes(file.read(8), "little"))
        if ends[1] > ends[0]:
            yield ends[0], ends[1]


def take_ragged(values: np.ndarray, lengths: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Some of the arrays that lie one behind the other in `values`, by their numbers."""
    starts = np.cumsum(lengths) - lengths
    counts = lengths[chosen].astype(np.int64)
    ends = np.cumsum(counts)
    places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts[chosen] - ends + counts, counts)
    taken: np.ndarray = values[places]
    return taken


def range_of(keys: np.ndarray, num_ranges: int) -> np.ndarray:
    """Which of so many ranges of equal width each well-mixed 64-bit key falls into."""
    found: np.ndarray = (keys >> np.uint64(32)) * np.uint64(num_ranges) >> np.uint64(32)
    return found


def spread(numbers: np.ndarray, num_ranges: int) -> np.ndarray:
    """Which of so many ranges a document's number falls into, evenly."""
    return range_of(numbers * SPREAD, num_ranges)


def runs(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each run of equal values begins, and how long it is."""
    is_first = np.ones(len(ordered), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(is_first)
    return starts, np.diff(np.append(starts, len(ordered)))


def is_new(*columns: np.ndarray) -> np.ndarray:
    """Which rows of sorted columns differ from the row before."""
    new = np.ones(len(columns[0]), dtype=bool)
    new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return new
