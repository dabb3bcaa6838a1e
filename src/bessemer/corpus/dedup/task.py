"""Common parts of the tasks that search for duplicates and repeated lines: numbers, order and records of documents, folders.

A document's number is its part (a bucket of this corpus, or a file of an earlier one) times 2^32, plus its row there.
Documents are compared in the order of `keep`: by `order`, then by `tie`, then by number.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bessemer.corpus.dedup.exchange import read_split
from bessemer.recipe import Dedup
from bessemer.run_tasks.task import CorpusTask, build_once
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import entries, remove_tree

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
    mebibyte: int = field(default_factory=lambda: MEBIBYTE)

    def num_ranges(self, bytes_each: int) -> int:
        """Tasks among which so many bytes for each document are divided, so that each fits into `memory_mib`."""
        return max(-(-self.num_documents * bytes_each // (self.settings.memory_mib * self.mebibyte)), 1)


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
    def folder(self) -> AnyPath:
        return self.work / type(self).__name__ / f"{self.number:06d}"

    @property
    def inputs(self) -> str:
        return self.plan.made_of

    def __str__(self) -> str:
        return f"{self.search}, {type(self).__name__} {self.number}"

    def result(self, step: str, number: int, file: str) -> AnyPath:
        """A file that the task of this number wrote in a step."""
        return self.work / step / f"{number:06d}" / file

    def gather(self, step: str, numbers: range, file: str, dtype: npt.DTypeLike) -> np.ndarray:
        """Return what the tasks of a step wrote for the task of this number."""
        return read_split((self.result(step, number, file) for number in numbers), self.number, dtype)

    def by_task(self, step: str, numbers: range, file: str, dtype: npt.DTypeLike) -> Iterator[tuple[int, np.ndarray]]:
        """Like `gather`, but yields (task number, array) per writing task, without those that wrote nothing."""
        for number in numbers:
            values = read_split([self.result(step, number, file)], self.number, dtype)
            if len(values):
                yield number, values

    @abstractmethod
    def make(self, folder: Path) -> dict[str, Any]:
        """Write the result; returns counts."""


def part_of(numbers: np.ndarray) -> np.ndarray:
    """The part that each document is in."""
    return np.asarray(numbers >> PART_BITS)


def row_of(numbers: np.ndarray) -> np.ndarray:
    """The row of each document in its part."""
    return np.asarray(numbers & ROW_MASK, dtype=np.int64)


def is_earlier(order: np.ndarray) -> np.ndarray:
    """Which documents are of an earlier corpus."""
    return np.asarray(order >> IS_OWN_BIT == 0)


def records(dtype: npt.DTypeLike, size: int, **columns: object) -> np.ndarray:
    """A structured array with these columns; the others are 0."""
    made: np.ndarray = np.zeros(size, dtype=dtype)
    for name, values in columns.items():
        made[name] = values
    return made


class TaskSearch:
    """The steps of a search, in their order. perform: does tasks and gives their receipts; sizes: documents of each part."""

    def __init__(
        self, plan: DedupPlan, folder: AnyPath, parts: Sequence[DocumentPart], sizes: Sequence[int], perform: Perform
    ) -> None:
        self.plan, self.folder, self.parts, self.sizes, self.perform = plan, folder, list(parts), sizes, perform

    def on_parts(
        self, step: type[DedupTask], sizes: Sequence[int] | None = None, reads: bool = False, **more: Any
    ) -> Receipts:
        """Do a task for each part; `reads`: of its documents. sizes: the work of each part."""
        numbered = enumerate(zip(self.parts, sizes or self.sizes, strict=True))
        return self.perform([
            step(self.folder, self.plan, number, size, **more, **({"part": part} if reads else {}))
            for number, (part, size) in numbered
        ])  # fmt: skip

    def on_ranges(self, step: type[DedupTask], num_ranges: int, **more: Any) -> Receipts:
        """Do a task for each of `num_ranges` ranges."""
        size = self.plan.num_documents // max(num_ranges, 1)
        return self.perform([step(self.folder, self.plan, number, size, **more) for number in range(num_ranges)])

    def end(self, facts: dict[str, Any], kept: type[DedupTask]) -> dict[str, Any]:
        """Write the receipt of the search, with these facts, and remove what other steps than `kept` wrote."""
        recorded = build_once(self.folder / RESULT, self.plan.made_of, lambda _: facts)
        for place in entries(self.folder):
            if place.name not in (kept.__name__, RESULT):
                remove_tree(place)
        return recorded


def range_of(keys: np.ndarray, num_ranges: int) -> np.ndarray:
    """Which of so many ranges of equal width each well-mixed 64-bit key falls into."""
    return np.asarray((keys >> np.uint64(32)) * np.uint64(num_ranges) >> np.uint64(32))


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
