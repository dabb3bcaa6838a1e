"""What the tasks of the searches for duplicates and repeats share: how documents are numbered and ordered, records, folders,
and the files through which they exchange arrays.

A document's number is its part (a bucket of this corpus, or a file of an earlier one) times 2^32, plus its row there.
Documents are compared in the order of `keep`: by `order`, then by `tie`, then by number.

A task writes one file, cut by who reads it: runs of about `RUN_BYTES`, sorted by target; then where each target begins in each
run (int64, in bytes); then the numbers of runs and targets. So a task writes with bounded memory and few files, and reads what
concerns it with one seek for each run. Arrays are read into memory, never mapped.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bessemer import store_path
from bessemer.corpus.work import CorpusTask, build_once
from bessemer.recipe import Dedup

MEBIBYTE = 1 << 20  # tests make it small, for many ranges
PART_BITS, ROW_MASK = np.uint64(32), np.uint64(0xFFFFFFFF)

# order: 1 bit for documents of this corpus (earlier ones come first), 32 for the rank of `keep` (the best first), 31 for
# the length (the longest first). tie: the first 64 bits of the identity
IS_OWN_BIT, LENGTH_BITS, MAX_CHARACTERS = np.uint64(63), np.uint64(31), np.uint64((1 << 31) - 1)
ORDER = [("order", "<u8"), ("tie", "<u8")]
RESULT = "result"  # folder with the receipt of a search

PAIR = [("first", "<u8"), ("second", "<u8")]  # numbers of documents, the first before the second in the order
# a pair of like documents, and later a document (second) and the one that stays in its place (first)
EDGE = np.dtype([
    *PAIR, ("first_order", "<u8"), ("first_tie", "<u8"), ("second_order", "<u8"), ("second_tie", "<u8"),
    ("similarity", "<f4"), ("kind", "u1"),
])  # fmt: skip

RUN_BYTES = 64 << 20  # of values that wait to be sorted
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing

Receipts = list[dict[str, Any]]
Perform = Callable[[Sequence[CorpusTask]], Receipts]


def perform_here(tasks: Sequence[CorpusTask]) -> Receipts:
    """Do tasks one after the other in this process."""
    return [task.run() for task in tasks]


class DocumentPart(Protocol):
    """Documents that one task reads: they arrive in the same order each time."""

    @property
    def size(self) -> int:
        """Documents, or a bound of them."""

    @property
    def corpus(self) -> str:
        """The earlier corpus that they are of; "" for this one."""

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Tables with those of the columns that exist."""


@dataclass(frozen=True)
class DedupPlan:
    """What all tasks of one search know."""

    settings: Dedup
    sources: tuple[str, ...]  # in the order of the recipe, for keep = "first-source"
    num_parts: int
    num_documents: int  # or a bound of them
    made_of: str  # digest of the documents

    def num_ranges(self, bytes_each: int) -> int:
        """Tasks among which so many bytes for each document are divided, so that each fits into `memory_mib`."""
        return max(-(-self.num_documents * bytes_each // memory_bytes(self.settings.memory_mib)), 1)


def memory_bytes(mebibytes: int) -> int:
    """What a task may hold by a key of the recipe."""
    return mebibytes * MEBIBYTE


@dataclass(frozen=True)
class DedupTask(CorpusTask):
    """A part, range or group (`number`) in one step of the search; its result lies in a folder named after the step."""

    plan: DedupPlan
    number: int
    amount: int  # of work: documents

    is_durable = False
    search: ClassVar[str] = "duplicates"  # what is looked for

    @property
    def size(self) -> int:
        return self.amount

    @property
    def step(self) -> str:
        """Name of the step."""
        return type(self).__name__

    @property
    def folder(self) -> Path:
        return self.work / self.step / f"{self.number:06d}"

    @property
    def inputs(self) -> str:
        return self.plan.made_of

    def __str__(self) -> str:
        return f"{self.search}, {self.step} {self.number}"

    def result(self, step: str, number: int, file: str) -> Path:
        """A file that the task of this number wrote in a step."""
        return self.work / step / f"{number:06d}" / file

    def gather(self, step: str, numbers: Iterable[int], file: str, dtype: npt.DTypeLike) -> np.ndarray:
        """What tasks of a step wrote for the task of this number."""
        return read_split((self.result(step, number, file) for number in numbers), self.number, dtype)

    @abstractmethod
    def make(self, folder: Path) -> dict[str, Any]:
        """Write the result; returns counts."""


class RepeatsTask(DedupTask):
    """A part or range in one step of the search for repeated paragraphs and spans (repeats.py). Parts lie in the order of the
    published corpus, behind those of earlier ones."""

    search = "repeats"


def part_of(numbers: np.ndarray) -> np.ndarray:
    """The part that each document is in."""
    parts: np.ndarray = numbers >> PART_BITS
    return parts


def row_of(numbers: np.ndarray) -> np.ndarray:
    """The row of each document in its part."""
    rows: np.ndarray = (numbers & ROW_MASK).astype(np.int64)
    return rows


def is_earlier(order: np.ndarray) -> np.ndarray:
    """Which documents are of an earlier corpus."""
    earlier: np.ndarray = order >> IS_OWN_BIT == 0
    return earlier


def records(dtype: npt.DTypeLike, size: int, **columns: object) -> np.ndarray:
    """A structured array with these columns; the others are 0."""
    made: np.ndarray = np.zeros(size, dtype=dtype)
    for name, values in columns.items():
        made[name] = values
    return made


class TaskSearch:
    """The steps of a search, in their order. perform: does tasks and gives their receipts; sizes: documents of each part."""

    def __init__(
        self, plan: DedupPlan, folder: Path, parts: Sequence[DocumentPart], sizes: Sequence[int], perform: Perform
    ) -> None:
        self.plan, self.folder, self.parts, self.sizes, self.perform = plan, folder, list(parts), sizes, perform

    def on_parts(
        self,
        step: type[DedupTask],
        sizes: Sequence[int] | None = None,
        reads: bool = False,
        first: int = 0,
        **more: Any,
    ) -> Receipts:
        """A task for each part from `first` on; `reads`: of its documents. sizes: the work of each part."""
        numbered = list(enumerate(zip(self.parts, sizes or self.sizes, strict=True)))
        return self.perform([
            step(self.folder, self.plan, number, size, **more, **({"part": part} if reads else {}))
            for number, (part, size) in numbered[first:]
        ])  # fmt: skip

    def on_ranges(self, step: type[DedupTask], num_ranges: int, **more: Any) -> Receipts:
        """A task for each of so many ranges or groups."""
        size = self.plan.num_documents // max(num_ranges, 1)
        return self.perform([step(self.folder, self.plan, number, size, **more) for number in range(num_ranges)])

    def end(self, facts: dict[str, Any], *kept: type[DedupTask]) -> dict[str, Any]:
        """Write the receipt of the search, with these facts, and remove what other steps than `kept` wrote."""
        recorded = build_once(self.folder / RESULT, self.plan.made_of, lambda _: facts)
        self.keep(*kept)
        return recorded

    def keep(self, *steps: type[DedupTask]) -> None:
        """Remove what other steps wrote."""
        for path in self.folder.iterdir():
            if path.name not in (RESULT, *(step.__name__ for step in steps)):
                store_path.remove_tree(path)


# --- Files of arrays


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
