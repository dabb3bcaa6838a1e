"""What the tasks of the search for duplicates share: how documents are numbered and ordered, records, folders.

A document's number is its part (a bucket of this corpus, or a file of an earlier one) times 2^32, plus its row there.
Documents are compared in the order of `keep`: by `order`, then by `tie`, then by number.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from bessemer.corpus.dedup.exchange import read_split
from bessemer.corpus.work import CorpusTask
from bessemer.recipe import Dedup

if TYPE_CHECKING:
    import pyarrow as pa

MEBIBYTE = 1 << 20  # tests make it small, for many ranges
PART_BITS, ROW_MASK = np.uint64(32), np.uint64(0xFFFFFFFF)

# order: 1 bit for documents of this corpus (earlier ones come first), 32 for the rank of `keep` (the best first), 31 for
# the length (the longest first). tie: the first 64 bits of the identity
IS_OWN_BIT, LENGTH_BITS, MAX_CHARACTERS = np.uint64(63), np.uint64(31), np.uint64((1 << 31) - 1)
ORDER = [("order", "<u8"), ("tie", "<u8")]

PAIR = [("first", "<u8"), ("second", "<u8")]  # numbers of documents, the first before the second in the order
# a pair of like documents, and later a document (second) and the one that stays in its place (first)
EDGE = np.dtype([
    *PAIR, ("first_order", "<u8"), ("first_tie", "<u8"), ("second_order", "<u8"), ("second_tie", "<u8"),
    ("similarity", "<f4"), ("kind", "u1"),
])  # fmt: skip


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
