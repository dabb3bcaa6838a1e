"""What the tasks of the searches for duplicates and repeats share: how documents are numbered and ordered, records, folders,
and who reads what was written for it (exchange.py).

A document's number is its part (a bucket of this corpus, or a file of an earlier one) times 2^32, plus its row there.
Documents are compared in the order of `keep`: by `order`, then by `tie`, then by number.

Of n tasks each would read what each of n others wrote for it: n * n looks into files. Where a step has more than `max_files`
tasks, others merge what it wrote (`MergeFiles`), each for some targets, and who reads looks into one file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bessemer import store_path
from bessemer.corpus.dedup.exchange import SIZES, merge_splits, read_array, read_split, split_runs, targets_of
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

MAX_FILES = 256  # that a task reads of one step; tests make it small
MERGED = "-merged"  # ends the name of the step that merged the files of a step
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
    max_files: int = field(default_factory=lambda: MAX_FILES)
    mebibyte: int = field(default_factory=lambda: MEBIBYTE)

    @property
    def memory(self) -> int:
        """Bytes that a task may sort (`memory_mib`)."""
        return self.settings.memory_mib * self.mebibyte

    def num_ranges(self, bytes_each: int) -> int:
        """Tasks among which so many bytes for each document are divided, so that each fits into `memory_mib`."""
        return max(-(-self.num_documents * bytes_each // self.memory), 1)


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
    exchanged: ClassVar[tuple[str, ...]] = ()  # files that are cut by target, which `gather` and `by_task` read

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

    def gather(self, step: str, numbers: range, file: str, dtype: npt.DTypeLike, prefix: str = "") -> np.ndarray:
        """What the tasks of a step wrote for the task of this number. prefix: of the names of their folders."""
        folders, target = folders_for(self.work / step, numbers, self.number, self.plan.max_files, prefix)
        return read_split((folder / file for folder in folders), target, dtype)

    def by_task(self, step: str, numbers: range, file: str, dtype: npt.DTypeLike) -> Iterator[tuple[int, np.ndarray]]:
        """The same run by run, in the order of the tasks that wrote it, each with the number of its task."""
        folders, target = folders_for(self.work / step, numbers, self.number, self.plan.max_files)
        if len(numbers) <= self.plan.max_files:
            for number, folder in zip(numbers, folders, strict=True):
                yield from ((number, values) for values in split_runs(folder / file, target, dtype))
            return
        with (folders[0] / f"{file}{SIZES}").open("rb") as sizes:
            sizes.seek(8 * target * len(numbers))
            ends = np.cumsum(read_array(sizes, "<i8", len(numbers))) // np.dtype(dtype).itemsize
        place = 0
        for values in split_runs(folders[0] / file, target, dtype):
            while len(values):
                which = int(np.searchsorted(ends, place, side="right"))
                count = min(int(ends[which]) - place, len(values))
                yield numbers[which], values[:count]
                values, place = values[count:], place + count

    def whole_by_task(
        self, step: str, numbers: range, file: str, dtype: npt.DTypeLike
    ) -> Iterator[tuple[int, np.ndarray]]:
        """All that each task that wrote something wrote, task after task."""
        for number, some in groupby(self.by_task(step, numbers, file, dtype), itemgetter(0)):
            parts = [values for _, values in some]
            yield number, np.concatenate(parts) if len(parts) > 1 else parts[0]

    @abstractmethod
    def make(self, folder: Path) -> dict[str, Any]:
        """Write the result; returns counts."""


def folders_for(step: Path, numbers: range, target: int, max_files: int, prefix: str = "") -> tuple[list[Path], int]:
    """The folders in which the tasks `numbers` of a step, or those that merged their files, have what is for a target, and its
    number there."""
    if len(numbers) <= max_files:
        return [step / f"{prefix}{number:06d}" for number in numbers], target
    group, target = divmod(target, targets_each(max_files))
    return [step.with_name(f"{step.name}{MERGED}") / f"{prefix}{group:06d}"], target


def targets_each(max_files: int) -> int:
    """Targets for which one task merges."""
    return max(max_files // 4, 1)


@dataclass(frozen=True)
class MergeFiles(DedupTask):
    """Merge the exchanged files of a step (`of`): each becomes one for some of the num_targets targets, with another of how much
    of it is of each task. prefix: of the names of the tasks' folders."""

    of: str
    names: tuple[str, ...]
    numbers: range
    prefix: str
    num_targets: int

    @property
    def step(self) -> str:
        return f"{self.of}{MERGED}"

    @property
    def folder(self) -> Path:
        return self.work / self.step / f"{self.prefix}{self.number:06d}"

    def __str__(self) -> str:
        return f"{self.step} {self.number}"

    def make(self, folder: Path) -> dict[str, Any]:
        first, each = self.number * targets_each(self.plan.max_files), targets_each(self.plan.max_files)
        targets = range(first, min(first + each, self.num_targets))
        for name in self.names:
            paths = [self.work / self.of / f"{self.prefix}{number:06d}" / name for number in self.numbers]
            merge_splits(paths, targets, folder / name, self.plan.memory // 2)
        return {}


class MergeDurably(MergeFiles):
    """The same of a step whose results stay when the search has ended."""

    is_durable = True


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
        return self._do([
            step(self.folder, self.plan, number, size, **more, **({"part": part} if reads else {}))
            for number, (part, size) in numbered[first:]
        ])  # fmt: skip

    def on_ranges(self, step: type[DedupTask], num_ranges: int, **more: Any) -> Receipts:
        """A task for each of so many ranges or groups."""
        size = self.plan.num_documents // max(num_ranges, 1)
        return self._do([step(self.folder, self.plan, number, size, **more) for number in range(num_ranges)])

    def _do(self, tasks: Sequence[DedupTask]) -> Receipts:
        """Do the tasks of a step, and merge the files that they exchange where they are many."""
        done = self.perform(tasks)
        if len(tasks) > self.plan.max_files and tasks[0].exchanged:
            first, kind = tasks[0], MergeDurably if tasks[0].is_durable else MergeFiles
            num_targets = targets_of(first.folder / first.exchanged[0])
            num_merges = -(-num_targets // targets_each(self.plan.max_files))
            numbers, prefix = range(first.number, tasks[-1].number + 1), first.folder.name[:-6]
            amount = sum(task.amount for task in tasks) // num_merges
            of = first.step, first.exchanged, numbers, prefix, num_targets
            self.perform([kind(self.folder, self.plan, number, amount, *of) for number in range(num_merges)])
        return done

    def end(self, facts: dict[str, Any], *kept: type[DedupTask]) -> dict[str, Any]:
        """Write the receipt of the search, with these facts, and remove what other steps than `kept` wrote."""
        recorded = build_once(self.folder / RESULT, self.plan.made_of, lambda _: facts)
        self.keep(*kept)
        return recorded

    def keep(self, *steps: type[DedupTask]) -> None:
        """Remove what other steps wrote, and what was merged."""
        names = {path.name for path in self.folder.iterdir()}
        kept = {f"{step.__name__}{MERGED * (f'{step.__name__}{MERGED}' in names)}" for step in steps}
        for name in names - kept - {RESULT}:
            store_path.remove_tree(self.folder / name)


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
