"""Files of arrays through which tasks exchange what each has for each.

A task writes one file, cut by who reads it: runs of about `RUN_BYTES`, sorted by target; then where each target begins in each
run (int64, in bytes); then the numbers of runs and targets. So a task writes with bounded memory and few files, and reads what
concerns it with one seek for each run. Arrays are read into memory, never mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from bessemer import store_path

RUN_BYTES = 64 << 20  # of values that wait to be sorted
SIZES = "-sizes"  # ends the name of the file that says how much of a merged one is of each task


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

    def write_merged(self, runs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Append runs as one: what each has for a target, run after run. A run: where each target begins in its bytes and the
        last ends, and the bytes."""
        if not runs:
            return
        self._starts.append(self._file.tell() + np.sum([starts for starts, _ in runs], axis=0))
        ready = [(starts.tolist(), data.data) for starts, data in runs]
        for target in range(self.num_targets):
            self._file.writelines([data[starts[target] : starts[target + 1]] for starts, data in ready])

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
        for starts in _starts(file, None if target is None else range(target, target + 1)):
            yield _values(path, file, starts, kind)


def merge_splits(paths: Sequence[Path], targets: range, place: Path, run_bytes: int) -> None:
    """Write what files of `SplitWriter` have for some consecutive targets as one such file, in runs of about run_bytes; and how
    much of it is of each, in a file whose name ends with SIZES."""
    sizes, waiting, num_bytes = (
        np.zeros((len(targets), len(paths)), dtype="<i8"),
        list[tuple[np.ndarray, np.ndarray]](),
        0,
    )

    def runs_of(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
        with path.open("rb") as file:
            found = _starts(file, targets)
            return [(starts - starts[0], _values(path, file, starts, np.dtype(np.uint8))) for starts in found]

    with SplitWriter(place, len(targets)) as out:
        for number, found in enumerate(store_path.each(runs_of, paths)):
            for starts, data in found:
                sizes[:, number] += np.diff(starts)
                waiting.append((starts, data))
                num_bytes += len(data)
                if num_bytes > run_bytes:
                    out.write_merged(waiting)
                    waiting, num_bytes = [], 0
        out.write_merged(waiting)
    place.with_name(f"{place.name}{SIZES}").write_bytes(sizes.tobytes())


def _values(path: Path, file: BinaryIO, starts: np.ndarray, kind: np.dtype[Any]) -> np.ndarray:
    """The values of a run from starts[0] to starts[-1], in bytes."""
    first, end = int(starts[0]), int(starts[-1])
    file.seek(first)
    values = read_array(file, kind, (end - first) // kind.itemsize)
    if values.nbytes < end - first:
        raise OSError(f"{path}: ends before byte {end}; was it cut?")
    return values


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


def targets_of(path: Path) -> int:
    """For how many targets a file of `SplitWriter` is cut."""
    with path.open("rb") as file:
        file.seek(-8, 2)
        return int.from_bytes(file.read(8), "little")


def _starts(file: BinaryIO, targets: range | None) -> Iterator[np.ndarray]:
    """Where the values for each of some consecutive targets (None: all) begin, and those of the last end, in each run that has
    some for them."""
    size = file.seek(-16, 2)
    num_runs, num_targets = np.frombuffer(file.read(16), dtype="<i8").tolist()
    chosen = range(num_targets) if targets is None else targets
    for run in range(num_runs):
        file.seek(size - 8 * ((num_runs - run) * (num_targets + 1) - chosen.start))
        starts = read_array(file, "<i8", len(chosen) + 1)
        if starts[-1] > starts[0]:
            yield starts


def take_ragged(values: np.ndarray, lengths: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Some of the arrays that lie one behind the other in `values`, by their numbers."""
    starts = np.cumsum(lengths) - lengths
    counts = lengths[chosen].astype(np.int64)
    ends = np.cumsum(counts)
    places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts[chosen] - ends + counts, counts)
    taken: np.ndarray = values[places]
    return taken
