"""Shared parts of the deduplication tasks: document numbers, sort order, records, and files exchanged between tasks.

The number of a document is its part (a bucket of this corpus or a file of an earlier one) times 2^32, plus its row in the
part. Documents are compared by `order` (from `keep`), then by identity, then by number.

Tasks exchange arrays through files. A task writes one file for all targets: runs of about `run_bytes`, each sorted by target,
then the start of each target in each run (int64, in bytes), then the numbers of runs and targets. A task thus writes with
bounded memory and few files, and reads its values with one seek per run. Arrays are read into memory, never memory-mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import PlainSerializer, PlainValidator

from bessemer.corpus.dedup.signatures import signatures
from bessemer.corpus.global_steps import DocumentPart, GlobalStep, StepTask
from bessemer.corpus.readers.files import earlier_files
from bessemer.corpus.verdicts import set_texts
from bessemer.recipe import Dedup
from bessemer.run_tasks.task import from_plain, to_plain
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import each, open_parquet
from bessemer.text.normalise import normalise_foreign

MEBIBYTE = 1 << 20  # tests lower it to get many ranges
RUN_BYTES = 64 << 20  # size of the values that are sorted at a time
PART_BITS, ROW_MASK = np.uint64(32), np.uint64(0xFFFFFFFF)

# `order` has 1 bit that is set for documents of this corpus (earlier corpora come first), 32 bits for the rank by `keep`
# (best first), and 31 bits for the length (longest first).
IS_OWN_BIT, LENGTH_BITS, MAX_CHARACTERS = np.uint64(63), np.uint64(31), np.uint64((1 << 31) - 1)
DOCUMENT = np.dtype([("number", "<u8"), ("order", "<u8"), ("name", "S16")])
EXACT, NEAR = 1, 2  # kinds of duplicates

PAIR = [("first", "<u8"), ("second", "<u8")]  # document numbers, the preferred one first
# A pair of similar documents; in the verdicts a kept document (first) and a rejected one (second)
EDGE = np.dtype([("first", DOCUMENT), ("second", DOCUMENT), ("similarity", "<f4"), ("kind", "u1")])

SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing


@dataclass(frozen=True)
class ParquetPart(DocumentPart):
    """The documents of a Parquet file. `corpus` is the path of the earlier corpus that has the file, or "" for this corpus."""

    path: AnyPath
    corpus: str = ""

    @property
    def size(self) -> int:
        """Number of documents."""
        with open_parquet(self.path, "bessemer corpus RECIPE") as file:
            return int(file.metadata.num_rows)

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield one table per row group with the requested columns that exist.

        Texts of an earlier corpus are normalised like those of this one, because another tool may have written them.
        """
        with open_parquet(self.path, "bessemer corpus RECIPE") as file:
            wanted = [name for name in columns if name in file.schema_arrow.names]
            for number in range(file.num_row_groups):
                table = file.read_row_group(number, columns=wanted)
                if self.corpus and "text" in wanted:
                    texts = [normalise_foreign(text or "") for text in table["text"].to_pylist()]
                    table = set_texts(table, np.arange(len(texts)), texts)
                yield table


def earlier_parts(settings: Dedup) -> list[ParquetPart]:
    """Return a part per Parquet file of the earlier corpora in `settings.against`. Raises InputError for a missing corpus."""
    return [ParquetPart(path, corpus) for corpus in settings.against for path in earlier_files(corpus)]


class SignedStep(GlobalStep, Dedup):
    """Base class for the steps that search for duplicates by MinHash signatures of texts."""

    def sign(self, folded: Sequence[str]) -> np.ndarray:
        """Return the MinHash signatures of folded texts, as uint32 of shape (texts, bands x rows).

        The share of equal values estimates the similarity of two texts. A row of 2^32 - 1 marks a text that is not
        compared.
        """
        return signatures(folded, self)

    @property
    def reads_stored(self) -> bool:
        """True if the hashes and signatures that cleaning stored were computed with the settings of this step."""
        return self.name == "duplicates"


# Pydantic type of a task's field that holds a search
AnySigned = Annotated[SignedStep, PlainValidator(partial(from_plain, base=SignedStep)), PlainSerializer(to_plain)]


@dataclass(frozen=True)
class DedupPlan:
    """The settings and sizes that all tasks of one search for duplicates share.

    Attributes:
        settings: The `[corpus.dedup]` table of the recipe.
        sources: Names of the sources in the order of the recipe, for keep = "first-source".
        num_parts: Number of parts that the documents of this and earlier corpora are divided into.
        num_documents: Number of documents in these parts, or an upper bound.
        earlier: Number of the first part of each earlier corpus.
        mebibyte: Bytes of one MiB. Tests lower it to get many ranges.
    """

    settings: Dedup
    sources: tuple[str, ...]
    num_parts: int
    num_documents: int
    earlier: tuple[int, ...] = ()
    mebibyte: int = field(default_factory=lambda: MEBIBYTE)

    def num_ranges(self, bytes_each: int) -> int:
        """Return the number of tasks such that each has `memory_mib` for `bytes_each` bytes per document of its share."""
        return max(-(-self.num_documents * bytes_each // (self.settings.memory_mib * self.mebibyte)), 1)


@dataclass(frozen=True)
class DedupTask(StepTask):
    """Base class for the tasks of a search for duplicates.

    A task handles one part of the documents, one range of hashes, or one group of connected documents. It reads what
    earlier tasks wrote for this part, range or group.
    """

    plan: DedupPlan

    @property
    def targets(self) -> range:
        """The target numbers to read: earlier tasks address each value to the number of the task that reads it."""
        return range(self.number, self.number + 1)

    def gather(self, task: str, numbers: range, file: str, dtype: npt.DTypeLike) -> np.ndarray:
        """Return the values that earlier tasks wrote for this task into their files named `file`, concatenated.

        `task` is the class name of these tasks, and `numbers` are their numbers.
        """
        return read_split((self.result(task, number) / file for number in numbers), self.targets, dtype)


def packed(identities: Sequence[str]) -> np.ndarray:
    """Convert hexadecimal identities to 16-byte strings, which sort in the same order."""
    return np.frombuffer(bytes.fromhex("".join(identities)), dtype="S16")


def identity_of(name: bytes) -> str:
    """Convert a value of `packed`, whose trailing zero bytes NumPy has stripped, back to a hexadecimal identity."""
    return name.ljust(16, b"\0").hex()


def part_of(numbers: np.ndarray) -> np.ndarray:
    """Return the part of each document number: its upper 32 bits."""
    return np.asarray(numbers >> PART_BITS)


def row_of(numbers: np.ndarray) -> np.ndarray:
    """Return the row of each document number in its part: the lower 32 bits."""
    return np.asarray(numbers & ROW_MASK, dtype=np.int64)


def is_earlier(order: np.ndarray) -> np.ndarray:
    """Return a mask of the documents that belong to an earlier corpus. `order` has their uint64 sort keys."""
    return np.asarray(order >> IS_OWN_BIT == 0)


def records(dtype: npt.DTypeLike, size: int, **columns: object) -> np.ndarray:
    """Return a structured array of `size` records whose fields have the values `columns`. Other fields of `dtype` are 0."""
    table: np.ndarray = np.zeros(size, dtype=dtype)
    for name, values in columns.items():
        table[name] = values
    return table


def range_of(keys: np.ndarray, num_ranges: int) -> np.ndarray:
    """Return the number of the range that each uniformly distributed 64-bit key falls into, of `num_ranges` equal ranges."""
    return np.asarray((keys >> np.uint64(32)) * np.uint64(num_ranges) >> np.uint64(32))


def spread(numbers: np.ndarray, num_ranges: int) -> np.ndarray:
    """Assign each document number to one of `num_ranges` ranges by a hash, so that ranges have about equal size."""
    return range_of(numbers * SPREAD, num_ranges)


def larger(edges: np.ndarray) -> np.ndarray:
    """Return the larger of the two document numbers of each EDGE record."""
    return np.asarray(np.maximum(edges["first"]["number"], edges["second"]["number"]))


def runs(*ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and length of each run of consecutive rows that are equal in all of the given sorted columns."""
    starts = np.flatnonzero(is_new(*ordered))
    return starts, np.diff(np.append(starts, len(ordered[0])))


def is_new(*columns: np.ndarray) -> np.ndarray:
    """Return a mask of the rows of sorted columns that differ from the previous row. The first row always counts as new."""
    new = np.ones(len(columns[0]), dtype=bool)
    new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return new


# --- Files of arrays, cut by target


class SplitWriter:
    """A writer of a file in which each value is addressed to a target, one of 0 to num_targets - 1.

    A target is the number of a reading task, which can read its values without the others. About `run_bytes` of values
    are held in memory, sorted by target and written at a time.
    """

    def __init__(self, path: Path, num_targets: int, run_bytes: int = RUN_BYTES) -> None:
        self.num_targets, self.run_bytes = num_targets, run_bytes
        self._file = path.open("wb")
        self._starts: list[np.ndarray] = []
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]] = []
        self._waiting_bytes = 0

    def write(self, targets: np.ndarray, values: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Append values[i] to the values for targets[i].

        With `lengths`, values are ragged: the first lengths[0] values belong to targets[0], the next lengths[1] to
        targets[1], and so on. All calls must agree on whether they pass `lengths`.
        """
        if len(targets):
            self._waiting.append((targets, values, lengths))
            self._waiting_bytes += values.nbytes
        if self._waiting_bytes > self.run_bytes:
            self._write_run()

    def _write_run(self) -> None:
        targets, values = (np.concatenate([part[column] for part in self._waiting]) for column in (0, 1))
        lengths = None
        if self._waiting[0][2] is not None:
            lengths = np.concatenate([part[2] for part in self._waiting])
        if self.num_targets > 1:
            # NumPy uses the fast radix sort for 16-bit integers only.
            narrow = targets.astype(np.uint16) if self.num_targets <= 1 << 16 else targets
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
    """Write values to a new file with one call of `SplitWriter.write`."""
    with SplitWriter(path, num_targets) as file:
        file.write(targets, values, lengths)


def read_split(paths: Iterable[AnyPath], targets: range, dtype: npt.DTypeLike) -> np.ndarray:
    """Return the values that files of `SplitWriter` have for a range of targets, concatenated in the order of files."""
    parts: list[np.ndarray] = [np.empty(0, dtype=dtype)]
    for runs in each(lambda path: _read_runs(path, targets, np.dtype(dtype)), paths):
        parts += runs
    return np.concatenate(parts) if len(parts) != 2 else parts[1]


def _read_runs(path: AnyPath, targets: range, dtype: np.dtype[Any]) -> list[np.ndarray]:
    """Return the values for a range of targets from one file of `SplitWriter`, one array per sorted block of the file."""
    runs = []
    with path.open("rb") as file:
        size = file.seek(-16, 2)
        num_runs, num_targets = np.frombuffer(file.read(16), dtype="<i8").tolist()
        for run in range(num_runs):
            file.seek(size - 8 * ((num_runs - run) * (num_targets + 1) - targets.start))
            starts = read_array(file, "<i8", len(targets) + 1)
            first, end = int(starts[0]), int(starts[-1])
            if end > first:
                file.seek(first)
                runs.append(read_array(file, dtype, (end - first) // dtype.itemsize))
                if runs[-1].nbytes < end - first:
                    raise OSError(f"{path}: the file ends before byte {end}; remove its folder and run again")
    return runs


def read_array(file: BinaryIO, dtype: npt.DTypeLike, count: int) -> np.ndarray:
    """Read the next `count` values of a local or remote file; fewer at its end."""
    values = np.empty(count, dtype=dtype)
    num_bytes = file.readinto(values.view(np.uint8).data)  # type: ignore[attr-defined]
    return values[: num_bytes // values.itemsize]


def load_array(path: AnyPath) -> np.ndarray:
    """Load an .npy file from the local disk or an object store."""
    with path.open("rb") as file:
        return np.asarray(np.load(file))


def take_ragged(values: np.ndarray, lengths: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the arrays with the indices `chosen`, concatenated in this order.

    The arrays to choose from have the given lengths and are concatenated in `values`.
    """
    offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
    arrays = pa.LargeListArray.from_arrays(offsets, values)
    return np.asarray(arrays.take(pa.array(chosen)).flatten().to_numpy())
