"""A partition: units of one source, cleaned into one Parquet file with a receipt.

The file is sorted by identity with a row group for each range of identity buckets (of one bucket while there are few), so
that later steps read one at a time. Its metadata says which ranges.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bessemer.corpus import engine
from bessemer.corpus.clean import PASSED_OVER, CleaningContext, Tally, check_tally, clean_record
from bessemer.corpus.document import EXCERPT_CHARACTERS, Record, identity, printable
from bessemer.corpus.extract import fold, text_digest
from bessemer.corpus.readers import read
from bessemer.corpus.time_limit import is_left_out, limited
from bessemer.corpus.units import Unit, in_groups
from bessemer.corpus.work import CorpusTask
from bessemer.hashing import digest
from bessemer.recipe import Corpus
from bessemer.run import read_json
from bessemer.store_path import StorePath, opened, write_file

# Input bytes whose documents are sorted in memory at one time, and those of a source for which these would be more than
# MANY_BUCKETS: then buckets grow up to LARGE_BUCKET_BYTES first
BUCKET_BYTES, LARGE_BUCKET_BYTES, MANY_BUCKETS = 64 << 20, 8 << 30, 4096
# Row groups in a partition's file: its footer, which everybody who reads one of them parses, has some 1.2 kB for each
RANGES = 256
MAX_RANGE_BUCKETS = 512  # files that a merge has open at one time; of more than 131,072 buckets there are more ranges
# Bounds of the input bytes in a partition: less is not worth a receipt, more is lost with a worker that dies
PARTITION_BYTES = 4 << 20, 64 << 20
PARTITIONS = 64  # of a corpus, while they stay within those bounds: enough to keep all workers busy to the end
# Where that makes more than MANY_PARTITIONS they grow, so that the driver keeps some hundred bytes for each of few
MANY_PARTITIONS, LARGE_PARTITION_BYTES = 400_000, 1 << 30
# Without statistics, which would be most of the footer: of 256 row groups 0.9 MB
WRITE_OPTIONS = {"compression": "zstd", "use_dictionary": ["reason", "label", "language"], "write_statistics": False}
CHUNK_BYTES = 4 << 20  # clean text buffered as Python strings before conversion to Arrow
MIN_HANGING_BYTES = 64 << 10  # of markup; less takes no parser long
CONTEXT = "context.json"
RANGES_KEY = b"ranges"  # of a file's metadata: the range of each row group, as a JSON list


@dataclass(frozen=True)
class Partition(CorpusTask):
    """Units of one source that are cleaned and counted together."""

    number: int
    units: tuple[Unit, ...]

    inputs = "partition 3"

    @property
    def source(self) -> str:
        """Name of its source."""
        return self.units[0].source.name

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(unit.size for unit in self.units)

    @property
    def folder(self) -> Path:
        return partition_folder(self.work, self.number)

    @property
    def progress(self) -> Path | None:
        if self.units[0].format not in ("html", "warc", "mediawiki") or self.size < MIN_HANGING_BYTES:
            return None
        if isinstance(self.work, StorePath):
            return Path(tempfile.gettempdir()) / f"bessemer-{digest(str(self.folder))[:16]}.progress"
        return self.folder.with_name(f"{self.folder.name}.progress")

    def __str__(self) -> str:
        return f"partition {self.number}"

    def make(self, folder: Path) -> dict[str, Any]:
        """Clean the units. Raises OSError for a full disk, BessemerError for inconsistent counts."""
        settings, cuts = context(self.work)
        tally = Tally()
        tables = list(_chunks(self, settings, tally)) or [_table([], settings)]
        num_bytes = sum(table.nbytes for table in tables)
        written = _write(tables, cuts[self.source], folder / "rows.parquet")
        if self.progress is not None:
            self.progress.unlink(missing_ok=True)
        check_tally(tally, sum(rows for _, rows in written), f"source {self.source}, {self}")
        return {
            "source": self.source,
            "partition": self.number,
            "ranges": written,
            "bytes": num_bytes,
            "counts": tally.to_json(),
        }


def partition_folder(work: Path, number: int) -> Path:
    """A partition's rows and receipt."""
    return work / "partitions" / f"{number:06d}"


def cut(units: list[Unit], work: Path) -> list[Partition]:
    """Units in their order as partitions of bounded size; a partition holds one source."""
    limit = partition_bytes(sum(unit.size for unit in units))
    groups = in_groups(units, limit, attrgetter("size"), lambda group, unit: group[0].source != unit.source)
    return [Partition(work, number, group) for number, group in enumerate(groups)]


def partition_bytes(num_bytes: int) -> int:
    """Input bytes of a partition, at the most, of a corpus of `num_bytes`."""
    smallest, largest = PARTITION_BYTES
    largest = max(largest, min(num_bytes // MANY_PARTITIONS, LARGE_PARTITION_BYTES))
    return min(max(num_bytes // PARTITIONS, smallest), largest)


@dataclass(frozen=True)
class Bucket:
    """The documents of one source whose identities hash to one number; they lie in row groups of partitions, or merged in a
    file of their own. place: among the buckets of all sources."""

    work: Path
    source: str
    number: int
    size: int  # rows, rejected ones included
    partitions: range | None  # among which its rows are; None: they are merged
    merged: Path | None = None  # the file that has them
    place: int = 0
    num_bytes: int = 0  # of its rows in memory, about

    def rows(self, columns: Sequence[str]) -> pa.Table:
        """Its rows from all partitions, sorted by identity (a required column). Raises BessemerError for missing rows."""
        if self.partitions is not None:
            return self._checked(list(rows_of_range(self.work, self.partitions, self.number, columns)))
        assert self.merged is not None
        with pq.ParquetFile(opened(self.merged)) as file:
            return self._checked([file.read(columns=[name for name in columns if name in file.schema_arrow.names])])

    def _checked(self, tables: list[pa.Table]) -> pa.Table:

        table = pa.concat_tables(tables)
        came = f"{self.size} rows were written but {table.num_rows} came back"
        engine.require(table.num_rows == self.size, f"source {self.source}, bucket {self.number}: {came}")
        return table.sort_by("identity")


def rows_together(buckets: Sequence[Bucket], columns: Sequence[str]) -> Iterator[tuple[Bucket, pa.Table]]:
    """Each bucket with its rows, as `Bucket.rows`; all of them are read at one time, each partition once."""
    for (work, partitions), some in groupby(buckets, lambda bucket: (bucket.work, bucket.partitions)):
        if partitions is None:
            yield from ((bucket, bucket.rows(columns)) for bucket in some)
            continue
        here = list(some)
        tables: dict[int, list[pa.Table]] = {bucket.number: [] for bucket in here}
        for number, table in _rows_of_ranges(work, partitions, tables, columns):
            tables[number].append(table)
        yield from ((bucket, bucket._checked(tables.pop(bucket.number))) for bucket in here)


def rows_of_range(
    work: Path, partitions: range, number: int, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """The rows of a range of buckets from each partition that has some. columns: those that are there of them; all."""
    return (table for _, table in _rows_of_ranges(work, partitions, (number,), columns))


def _rows_of_ranges(
    work: Path, partitions: range, numbers: Collection[int], columns: Sequence[str] | None
) -> Iterator[tuple[int, pa.Table]]:
    """The rows of some ranges, with the number of each: partition by partition, of which all parse a footer."""
    for partition in partitions:
        engine.check_stop()
        with pq.ParquetFile(opened(partition_folder(work, partition) / "rows.parquet")) as file:
            ranges: list[int] = json.loads(file.metadata.metadata[RANGES_KEY])
            present = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
            for place, number in enumerate(ranges):
                if number in numbers:
                    yield number, file.read_row_group(place, columns=present).replace_schema_metadata()


def num_buckets(num_bytes: int) -> int:
    """Buckets for a source of `num_bytes` bytes."""
    return max(min(-(-num_bytes // BUCKET_BYTES), MANY_BUCKETS), -(-num_bytes // LARGE_BUCKET_BYTES), 1)


def range_size(num_buckets: int) -> int:
    """Buckets that make a range, and a row group of a partition's file, of a source with `num_buckets`."""
    return min(-(-num_buckets // RANGES), MAX_RANGE_BUCKETS)


def bucket_of(identity_: str, num_buckets: int) -> int:
    """Which bucket an identity falls into; buckets in order hold identities in order."""
    return int(identity_[:8], 16) * num_buckets >> 32


class Cut(NamedTuple):
    """How the identities of a source are cut: into buckets, of which `range_size` make a range."""

    num_buckets: int
    range_size: int


def write_context(work: Path, corpus: Corpus, buckets: dict[str, int]) -> None:
    """Write what all workers need: the recipe's [corpus] and the number of buckets of each source."""
    sizes = {source: Cut(number, range_size(number)) for source, number in buckets.items()}
    write_file(work / CONTEXT, json.dumps({"corpus": corpus.model_dump(mode="json"), "cuts": sizes}))


def cuts(work: Path) -> dict[str, Cut]:
    """The cut of each source, as `write_context` wrote it."""
    return {source: Cut(*cut) for source, cut in read_json(work / CONTEXT)["cuts"].items()}


@lru_cache(maxsize=2)
def context(work: Path) -> tuple[CleaningContext, dict[str, Cut]]:
    """What `write_context` wrote; prepared once in a process."""
    corpus = read_json(work / CONTEXT)["corpus"]
    return CleaningContext.of(Corpus.model_validate_json(json.dumps(corpus))), cuts(work)


def _chunks(partition: Partition, settings: CleaningContext, tally: Tally) -> Iterator[pa.Table]:
    """Read and clean; the rows as Arrow tables of bounded size, so that few Python strings live at one time."""
    rows: list[dict[str, Any]] = []
    size, passed_over = 0, Counter[str]()
    for unit in partition.units:
        before = tally.documents_in
        records = read(unit, settings.corpus.rules, settings.corpus.extract, passed_over)
        if partition.progress is not None:
            records = limited(records, partition.progress, settings.corpus.document_seconds, tally.documents_in)
        for piece, record in records:
            engine.check_stop()
            if is_left_out():
                record.reject("too_slow", f"more than {settings.corpus.document_seconds:g} s")
            record.source = partition.source
            record.format = "chat" if unit.source.format == "chat" else unit.format
            clean_record(record, settings, tally)
            rows.append(_row(record, piece.name, settings.corpus))
            size += len(rows[-1]["text"]) + len(rows[-1]["folded"]) + 200
            if size > CHUNK_BYTES:
                yield _table(rows, settings)
                rows, size = [], 0
        arrived = tally.documents_in - before
        if unit.format in ("text", "code", "html"):
            came = f"{len(unit.pieces)} files but {arrived} documents came in ({unit.pieces[0].name}, ...)"
            engine.require(arrived == len(unit.pieces), f"source {partition.source}, {partition}: {came}")
    if passed_over:
        tally.merge({PASSED_OVER: passed_over})
    if rows:
        yield _table(rows, settings)


def _row(record: Record, name: str, corpus: Corpus) -> dict[str, Any]:
    kept = record.reason is None
    folded = fold(record.text) if kept else ""
    text = record.text
    if not kept and corpus.keep_rejected != "text":
        text = "" if corpus.keep_rejected == "none" else text[:EXCERPT_CHARACTERS]
    return {
        "identity": identity(record.source, name, record.key),
        "path": printable(name),
        "place": printable(record.key),
        "url": printable(str(record.metadata.get("url") or "")),
        "metadata": json.dumps(record.metadata, sort_keys=True),
        "label": printable(record.label),
        "language": record.language,
        "text": text if kept else printable(text),
        "reason": record.reason,
        "detail": printable(record.detail),
        "num_bytes": record.num_bytes,
        "characters": len(record.text),
        "exact": text_digest(folded) if kept else None,
        "words": folded.count(" ") + 1 if folded else 0,
        "folded": folded,
    }


def _table(rows: list[dict[str, Any]], settings: CleaningContext) -> pa.Table:
    """Rows as Arrow, with their MinHash signatures in place of the folded text."""
    types = dict.fromkeys(("num_bytes", "characters", "words"), pa.int64()) | {"exact": pa.binary(16)}
    names = list(_row(Record("", 0), "", settings.corpus))
    columns = {name: pa.array([row[name] for row in rows], types.get(name, pa.large_string())) for name in names}
    rows.clear()
    folded = columns.pop("folded")
    dedup = settings.corpus.dedup
    if dedup.minhash:
        from bessemer.corpus.dedup.signatures import num_hashes, signatures

        values = pa.array(signatures(folded, dedup).reshape(-1))
        columns["signature"] = pa.FixedSizeListArray.from_arrays(values, num_hashes(dedup))
    return pa.table(columns)


def _write(tables: list[pa.Table], cut: Cut, path: Path) -> list[list[int]]:
    """Sort the rows and write a row group for each range of buckets that has some: [[range, rows], ...] in the file's
    order."""
    table = pa.concat_tables(tables).combine_chunks()
    tables.clear()
    rows = rows_by_bucket(table, *cut)
    schema = table.schema.with_metadata({RANGES_KEY: json.dumps(list(rows))})
    with pq.ParquetWriter(path, schema, **WRITE_OPTIONS) as file:
        for chosen in rows.values():
            file.write_table(table.take(chosen), row_group_size=len(chosen))
    return [[number, len(chosen)] for number, chosen in rows.items()]


def rows_by_bucket(table: pa.Table, num_buckets: int, range_size: int = 1) -> dict[int, pa.Array]:
    """The numbers of the rows of each bucket that has some, or each range of several, in the order of the identities."""
    names = table["identity"].combine_chunks()
    order = pc.sort_indices(names).to_numpy()
    sorted_names = names.take(pa.array(order)).to_pylist()
    numbers = np.array([bucket_of(name, num_buckets) // range_size for name in sorted_names], dtype=int)
    found, starts = np.unique(numbers, return_index=True)
    groups = np.split(order, starts[1:])  # of no rows: one, empty
    return dict(zip(found.tolist(), map(pa.array, groups), strict=False))
