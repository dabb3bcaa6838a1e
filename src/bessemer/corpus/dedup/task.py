"""Common parts of the tasks that search for duplicates and repeated lines: numbers, order and records of documents, folders.

A document's number is its part (a bucket of this corpus, or a file of an earlier one) times 2^32, plus its row there.
Documents are compared in the order of `keep`: by `order`, then by `tie`, then by number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import PlainSerializer, PlainValidator

from bessemer.corpus.dedup.exchange import read_split
from bessemer.corpus.dedup.signatures import signatures
from bessemer.corpus.global_steps import DocumentPart, GlobalStep, StepTask
from bessemer.corpus.readers.files import earlier_files
from bessemer.corpus.verdicts import set_texts
from bessemer.recipe import Dedup
from bessemer.run_tasks.task import from_plain, to_plain
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import open_parquet
from bessemer.text.normalise import normalise_foreign

MEBIBYTE = 1 << 20  # tests make it small, for many ranges
PART_BITS, ROW_MASK = np.uint64(32), np.uint64(0xFFFFFFFF)

# order: 1 bit for documents of this corpus (earlier ones come first), 32 for the rank of `keep` (the best first), 31 for
# the length (the longest first). tie: the first 64 bits of the identity
IS_OWN_BIT, LENGTH_BITS, MAX_CHARACTERS = np.uint64(63), np.uint64(31), np.uint64((1 << 31) - 1)
ORDER = [("order", "<u8"), ("tie", "<u8")]
EXACT, NEAR = 1, 2  # kinds of duplicates

PAIR = [("first", "<u8"), ("second", "<u8")]  # numbers of documents, the first before the second in the order
# a pair of like documents, and later a document (second) and the one that stays in its place (first)
EDGE = np.dtype([
    *PAIR, ("first_order", "<u8"), ("first_tie", "<u8"), ("second_order", "<u8"), ("second_tie", "<u8"),
    ("similarity", "<f4"), ("kind", "u1"),
])  # fmt: skip

SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing


@dataclass(frozen=True)
class ParquetPart(DocumentPart):
    """The documents of a Parquet file by row group. corpus: the earlier corpus that they are of; "" for this one."""

    path: AnyPath
    corpus: str = ""

    @property
    def size(self) -> int:
        """Documents."""
        with open_parquet(self.path, "bessemer corpus RECIPE") as file:
            return int(file.metadata.num_rows)

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Tables with those of the columns that exist. Texts of an earlier corpus, which another tool may have written, are
        normalised as those of this one."""
        with open_parquet(self.path, "bessemer corpus RECIPE") as file:
            wanted = [name for name in columns if name in file.schema_arrow.names]
            for number in range(file.num_row_groups):
                table = file.read_row_group(number, columns=wanted)
                if self.corpus and "text" in wanted:
                    texts = [normalise_foreign(text or "") for text in table["text"].to_pylist()]
                    table = set_texts(table, np.arange(len(texts)), texts)
                yield table


def earlier_parts(settings: Dedup) -> list[ParquetPart]:
    """Return the documents of earlier corpora. Raises InputError for a missing one."""
    return [ParquetPart(path, corpus) for corpus in settings.against for path in earlier_files(corpus)]


class SignedStep(GlobalStep, Dedup):
    """A search for duplicates by the signatures of texts."""

    def sign(self, folded: Sequence[str]) -> np.ndarray:
        """Return the signatures of folded texts: uint32 (texts, bands x rows), 2^32 - 1 everywhere for a text that is compared
        with nothing. The share of equal values estimates the similarity of two texts."""
        return signatures(folded, self)

    @property
    def reads_stored(self) -> bool:
        """Whether the hashes and signatures that cleaning wrote are its own."""
        return self.name == "duplicates"


# A search as a field of a task
AnySigned = Annotated[SignedStep, PlainValidator(partial(from_plain, base=SignedStep)), PlainSerializer(to_plain)]


@dataclass(frozen=True)
class DedupPlan:
    """What all tasks of one search know."""

    settings: Dedup
    sources: tuple[str, ...]  # in the order of the recipe, for keep = "first-source"
    num_parts: int
    num_documents: int  # or a bound of them
    mebibyte: int = field(default_factory=lambda: MEBIBYTE)

    def num_ranges(self, bytes_each: int) -> int:
        """Tasks among which so many bytes for each document are divided, so that each fits into `memory_mib`."""
        return max(-(-self.num_documents * bytes_each // (self.settings.memory_mib * self.mebibyte)), 1)


@dataclass(frozen=True)
class DedupTask(StepTask):
    """A part, range or group in one step of the search."""

    plan: DedupPlan

    is_durable = False

    def gather(self, step: str, numbers: range, file: str, dtype: npt.DTypeLike) -> np.ndarray:
        """Return what the tasks of a step wrote for the task of this number."""
        return read_split((self.result(step, number) / file for number in numbers), self.number, dtype)

    def by_task(self, step: str, numbers: range, file: str, dtype: npt.DTypeLike) -> Iterator[tuple[int, np.ndarray]]:
        """Like `gather`, but yields (task number, array) per writing task, without those that wrote nothing."""
        for number in numbers:
            values = read_split([self.result(step, number) / file], self.number, dtype)
            if len(values):
                yield number, values


def packed(identities: Sequence[str]) -> np.ndarray:
    """Hexadecimal identities as 16-byte strings, whose order is the same."""
    return np.frombuffer(bytes.fromhex("".join(identities)), dtype="S16")


def identity_of(name: bytes) -> str:
    """The identity in hexadecimal of a 16-byte string, of which NumPy drops the zeros at the end."""
    return name.ljust(16, b"\0").hex()


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
