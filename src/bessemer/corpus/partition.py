"""A partition: parts of one source's files, cleaned into one Parquet file with a receipt.

The file has one row group per identity bucket, sorted by identity, so that later steps can read one bucket at a time. A
bucket has several row groups if the rows did not fit in memory. The metadata maps row groups to buckets.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bessemer.common.errors import BessemerError, FileChanged, InputError
from bessemer.common.extensions import is_own, naming_faults
from bessemer.common.hashing import digest
from bessemer.corpus.document import EXCERPT_CHARACTERS, Document, identity, printable
from bessemer.corpus.filters.chain import PASSED_OVER, Chain, Tally
from bessemer.corpus.readers.base import DAMAGE, MAY_RAISE, Part, Reader, build_reader, damage_of, stamp
from bessemer.corpus.readers.parts import in_groups
from bessemer.corpus.verdicts import VerdictFile, apply_verdicts
from bessemer.recipe import Corpus, Source
from bessemer.recipe.corpus import reader_class
from bessemer.run_tasks.task import Task, check_stop
from bessemer.run_tasks.time_limit import is_left_out, limited
from bessemer.storage import filesystem
from bessemer.storage.filesystem import AnyPath, StorePath
from bessemer.storage.path import arrow_source, write_file
from bessemer.text.normalise import fold, text_digest

# Input bytes of a bucket, whose documents are sorted in memory together. A source has at most MANY_BUCKETS until its buckets
# reach LARGE_BUCKET_BYTES, because each bucket adds a row group to every partition (about 1.2 kB in the footer) and is read
# from all partitions.
BUCKET_BYTES, LARGE_BUCKET_BYTES, MANY_BUCKETS = 64 << 20, 8 << 30, 256
# Bounds of a partition's input bytes: less is not worth a receipt, and more is lost if a worker dies
PARTITION_BYTES = 4 << 20, 64 << 20
PARTITIONS = 64  # target within those bounds, enough to keep all workers busy to the end
# Partitions grow when there would be more than MANY_PARTITIONS, so that a bucket is read from fewer files
MANY_PARTITIONS, LARGE_PARTITION_BYTES = 8192, 1 << 30
RUN_BYTES = 256 << 20  # size of the rows that are sorted at a time
# No statistics, which would take most of the footer (0.9 MB for 256 row groups)
WRITE_OPTIONS = {"compression": "zstd", "use_dictionary": ["reason", "label", "language"], "write_statistics": False}
CHUNK_BYTES = 4 << 20  # clean text buffered as Python strings before conversion to Arrow
MIN_HANGING_BYTES = 64 << 10  # no parser takes long for less markup
METADATA = json.JSONEncoder(sort_keys=True)
CONTEXT = "context.json"
BUCKETS_KEY = b"buckets"  # key of the file metadata with the bucket of each row group, as a JSON list


@dataclass(frozen=True)
class Partition(Task):
    """A task that cleans some parts of one source and counts the results. Its size is the number of bytes to read.

    Attributes:
        number: Number of the partition among those of all sources.
        source: Name of the source.
        parts: Files, or ranges of files, to read.
        max_documents: Number of documents to sample evenly from the parts; None to read all.
    """

    number: int
    source: str
    parts: tuple[Part, ...]
    max_documents: int | None = None

    @property
    def folder(self) -> AnyPath:
        return partition_folder(self.work, self.number)

    @property
    def progress(self) -> Path | None:
        may_hang = any(reader_class(format_).may_hang for format_ in {part.format for part in self.parts})
        if not may_hang or self.size < MIN_HANGING_BYTES:
            return None
        if isinstance(self.folder, StorePath):
            return Path(tempfile.gettempdir()) / f"bessemer-{digest(str(self.folder))[:16]}.progress"
        return self.folder.with_name(f"{self.folder.name}.progress")

    def __str__(self) -> str:
        return f"partition {self.number}"

    def make(self, folder: Path) -> dict[str, Any]:
        """Clean the documents of the parts and write them to `folder`. Raises OSError for a full disk.

        Returns the source, the partition's number, its rows by bucket, their size in bytes, and the counts of the
        filters.
        """
        settings, num_buckets = context(self.work)
        tally = Tally()
        groups = in_groups(_clean(self, settings, tally), CHUNK_BYTES, lambda document: 2 * len(document.text) + 200)
        tables = chain([rows_table((), settings)], (rows_table(some, settings) for some in groups))
        written, num_bytes = write_rows(tables, num_buckets[self.source], folder / "rows.parquet")
        if self.progress is not None:
            self.progress.unlink(missing_ok=True)
        return {
            "source": self.source,
            "partition": self.number,
            "buckets": sorted(written.items()),
            "bytes": num_bytes,
            "counts": tally.to_json(),
        }


def require(holds: bool, problem: str) -> None:
    """Raise BessemerError with `problem` unless a consistency check holds; a failure is a bug of this program."""
    if not holds:
        raise BessemerError(f"corpus: inconsistent result: {problem}; nothing was written; report this as a bug")


def partition_folder(work: AnyPath, number: int) -> AnyPath:
    """Return the folder of a partition's rows and receipt."""
    return work / "partitions" / f"{number:06d}"


def cut(parts: dict[str, list[Part]], work: AnyPath) -> list[Partition]:
    """Group the parts of each source, in order, into partitions of bounded size. `work` is the work folder of the build."""
    num_bytes, (smallest, largest) = sum(part.size for some in parts.values() for part in some), PARTITION_BYTES
    largest = max(largest, min(num_bytes // MANY_PARTITIONS, LARGE_PARTITION_BYTES))
    limit = min(max(num_bytes // PARTITIONS, smallest), largest)
    groups = [(source, group) for source, some in parts.items() for group in in_groups(some, limit, attrgetter("size"))]
    return [
        Partition(work, "partition 6", sum(part.size for part in group), number, source, group)
        for number, (source, group) in enumerate(groups)
    ]


@dataclass(frozen=True)
class Bucket:
    """The documents of one source whose identities are in one range, stored in row groups of the partitions' files.

    Attributes:
        work: Work folder of the build.
        source: Name of the source.
        number: Number of the range of identities.
        size: Number of rows, including rejected documents.
        partitions: Number of the first partition that may have rows of the bucket, and the number after the last.
        num_bytes: Approximate size of the rows in memory.
        verdicts: Verdicts of the global steps so far.
    """

    work: AnyPath
    source: str
    number: int
    size: int
    partitions: tuple[int, int]
    num_bytes: int = 0
    verdicts: tuple[VerdictFile, ...] = ()


def rows_together(buckets: Sequence[Bucket], columns: Sequence[str]) -> Iterator[tuple[Bucket, pa.Table]]:
    """Yield each bucket with a table of its rows from all partitions, sorted by identity, with its verdicts applied.

    The file of a partition is opened once for all buckets. `columns` must include `identity` and `reason`. Raises
    BessemerError for missing rows.
    """
    for (work, partitions), some in groupby(buckets, lambda bucket: (bucket.work, bucket.partitions)):
        here = list(some)
        tables: dict[int, list[pa.Table]] = {bucket.number: [] for bucket in here}
        for partition in range(*partitions):
            check_stop()
            with pq.ParquetFile(arrow_source(partition_folder(work, partition) / "rows.parquet")) as file:
                present = [name for name in columns if name in file.schema_arrow.names]
                for index, number in enumerate(json.loads(file.metadata.metadata[BUCKETS_KEY])):
                    if number in tables:
                        table = file.read_row_group(index, columns=present)
                        tables[number].append(table.replace_schema_metadata())
        for bucket in here:
            table = pa.concat_tables(tables.pop(bucket.number))
            came = f"{bucket.size} rows were written but {table.num_rows} came back"
            require(table.num_rows == bucket.size, f"source {bucket.source}, bucket {bucket.number}: {came}")
            yield bucket, apply_verdicts(table.sort_by("identity"), bucket.verdicts)


def buckets_of(work: AnyPath, receipts: Iterable[dict[str, Any]]) -> list[Bucket]:
    """Return the buckets that have rows, in the order of the published corpus.

    `receipts` are the dicts that all `Partition` tasks returned, in order.
    """
    rows, num_bytes, partitions = dict[str, Counter[int]](), Counter[str](), dict[str, tuple[int, int]]()
    for done in receipts:
        source, number = done["source"], done["partition"]
        partitions[source] = (partitions.get(source, (number,))[0], number + 1)
        num_bytes[source] += done["bytes"]
        rows.setdefault(source, Counter()).update(dict(done["buckets"]))
    buckets = [(source, number, here[number]) for source, here in sorted(rows.items()) for number in sorted(here)]
    row_bytes = {source: num_bytes[source] / max(here.total(), 1) for source, here in rows.items()}
    return [
        Bucket(work, source, number, size, partitions[source], round(size * row_bytes[source]))
        for source, number, size in buckets
    ]


def num_buckets(num_bytes: int) -> int:
    """Return the number of buckets for a source of `num_bytes` bytes."""
    return max(min(-(-num_bytes // BUCKET_BYTES), MANY_BUCKETS), -(-num_bytes // LARGE_BUCKET_BYTES), 1)


def write_context(work: AnyPath, corpus: Corpus, buckets: dict[str, int]) -> None:
    """Write the recipe's `[corpus]` and the number of buckets of each source to a file in `work` that all workers read."""
    content = {"corpus": corpus.model_dump(mode="json"), "buckets": buckets}
    write_file(work / CONTEXT, json.dumps(content).encode())


@lru_cache(maxsize=2)
def context(work: AnyPath) -> tuple[Chain, dict[str, int]]:
    """Prepare the filters of a build, and read the number of buckets of each source by name, once per process.

    Raises InputError if the file of `write_context` is missing, as on a machine that does not see the folder `work`.
    """
    try:
        written = json.loads((work / CONTEXT).read_bytes())
    except FileNotFoundError:
        raise InputError(f"{work / CONTEXT}: no such file; put the run on a disk that all machines see") from None
    return Chain.prepare(Corpus.model_validate_json(json.dumps(written["corpus"]))), written["buckets"]


def read(
    source: Source, parts: Iterable[Part], corpus: Corpus, passed_over: Counter[str] | None = None
) -> Iterator[Document]:
    """Yield the documents of a source's parts. Bad data never raises an error: it becomes a rejected document.

    Args:
        source: The source of the parts.
        parts: The parts to read. A missing or unreadable file gives one rejected document per part.
        corpus: The `[corpus]` table of the recipe.
        passed_over: A counter to add to: the number of records of each type that never holds a document.

    Raises:
        FileChanged: A file changed since it was listed.
        BessemerError: An object store failed.
        InputError: The library that `[corpus.extract]` names is not installed.
    """
    readers, passed_over = dict[str, Reader](), Counter[str]() if passed_over is None else passed_over
    for part in parts:
        if part.format not in readers:
            readers[part.format] = build_reader(source, part.format, corpus, passed_over=passed_over)
        size = part.size
        try:
            _require_unchanged(part, source)
            for document in _documents_of(readers[part.format], part):
                size = max(size - document.num_bytes, 0)
                yield _in_source(document, source, part)
            with suppress(FileNotFoundError):  # a file that was deleted after the read is complete
                _require_unchanged(part, source)
        except DAMAGE as error:
            lost = Document(f"{part.start}!", size, reason="unreadable", detail=damage_of(error))
            yield _in_source(lost, source, part)


def _in_source(document: Document, source: Source, part: Part) -> Document:
    document.source, document.path, document.format = source.name, part.name, part.format
    document.label = document.label or source.label or ""
    return document


def _documents_of(reader: Reader, part: Part) -> Iterator[Document]:
    """Yield the documents of a part. Raises BessemerError for a user's reader that yields another type or repeats a key."""
    if part.damage:
        yield Document(f"{part.start}!", part.size, reason=part.reason, detail=part.damage)
        return
    keys, is_checked = set[str](), not is_own(type(reader))
    with naming_faults(reader, "read", part.name, *MAY_RAISE):
        for document in reader.read(part):
            if is_checked:
                if not isinstance(document, Document):
                    raise TypeError(f"yields {type(document).__name__}, not Document")
                if document.key in keys:
                    raise TypeError(f"yields two documents with the key {document.key!r}")
                keys.add(document.key)
            yield document


def _require_unchanged(part: Part, source: Source) -> None:
    """Raise FileChanged if a file changed since it was listed, OSError if it is gone."""
    if part.stamp and part.stamp != stamp(*filesystem.version(part.path, source)):
        raise FileChanged(f"corpus.sources.{source.name}: {part.name} changed while it was read")


def _sampled(source: Source, parts: Sequence[Part], corpus: Corpus, max_documents: int) -> Iterator[Document]:
    """Yield at most `max_documents` documents, equally many from each part that has them."""
    left = max_documents
    for number, part in enumerate(parts):
        for document in islice(read(source, [part], corpus), -(-left // (len(parts) - number))):
            left -= 1
            yield document


def _clean(partition: Partition, settings: Chain, tally: Tally) -> Iterator[Document]:
    """Read a partition's documents, apply the filters of `settings` to each, and yield all, rejected ones with their reason.

    Adds each document to the counts of `tally`.
    """
    source, corpus, passed_over = settings.sources[partition.source], settings.corpus, Counter[str]()
    if partition.max_documents is None:
        documents = read(source, partition.parts, corpus, passed_over)
    else:
        documents = _sampled(source, partition.parts, corpus, partition.max_documents)
    if partition.progress is not None:
        documents = limited(documents, partition.progress, corpus.document_seconds)
    for document in documents:
        check_stop()
        if is_left_out():
            document.reject("too_slow", f"more than {corpus.document_seconds:g} s")
        settings.clean(document, tally)
        yield document
    if passed_over:
        tally.merge({PASSED_OVER: passed_over})


def rows_table(documents: Sequence[Document], settings: Chain) -> pa.Table:
    """Convert cleaned and rejected documents to a table of one row per document.

    It has text hashes, and MinHash signatures if the recipe needs them. `settings` is the chain of filters with the
    recipe.
    """
    dedup, stored = settings.corpus.dedup, {"none": 0, "excerpt": EXCERPT_CHARACTERS, "text": None}
    of_rejected = stored[settings.corpus.keep_rejected]
    is_kept = [document.reason is None for document in documents]
    folded = [fold(one.text) if kept else "" for one, kept in zip(documents, is_kept, strict=True)]
    strings = {
        "identity": [identity(one.source, one.path, one.key) for one in documents],
        "path": [printable(one.path) for one in documents],
        "place": [printable(one.key) for one in documents],
        "url": [printable(str(one.metadata.get("url") or "")) for one in documents],
        "metadata": [METADATA.encode(one.metadata) for one in documents],
        "label": [printable(one.label) for one in documents],
        "language": [one.language for one in documents],
        "text": [
            one.text if kept else printable(one.text[:of_rejected])
            for one, kept in zip(documents, is_kept, strict=True)
        ],
        "reason": [one.reason for one in documents],
        "detail": [printable(one.detail) for one in documents],
    }
    numbers = {
        "num_bytes": [one.num_bytes for one in documents],
        "characters": [len(one.text) for one in documents],
        "words": [text.count(" ") + 1 if text else 0 for text in folded],
    }
    exact = [text_digest(text) if kept else None for text, kept in zip(folded, is_kept, strict=True)]
    columns = {name: pa.array(values, pa.large_string()) for name, values in strings.items()}
    columns |= {name: pa.array(values, pa.int64()) for name, values in numbers.items()}
    columns["exact"] = pa.array(exact, pa.binary(16))
    if dedup.minhash:
        from bessemer.corpus.dedup.signatures import num_hashes, signatures

        values = pa.array(signatures(pa.array(folded, pa.large_string()), dedup).reshape(-1))
        columns["signature"] = pa.FixedSizeListArray.from_arrays(values, num_hashes(dedup))
    return pa.table(columns)


def write_rows(tables: Iterator[pa.Table], num_buckets: int, path: Path) -> tuple[Counter[int], int]:
    """Sort rows by identity and write them to a Parquet file, one row group per bucket.

    A bucket is one of `num_buckets` equal ranges of identities. Rows are sorted RUN_BYTES at a time, so larger inputs
    have several row groups per bucket. Returns the number of rows of each bucket, and the size of all rows in memory in
    bytes.
    """
    written, num_bytes, numbers = Counter[int](), 0, list[int]()
    first = next(tables)
    with pq.ParquetWriter(path, first.schema, **WRITE_OPTIONS) as file:
        for some in in_groups(chain([first], tables), RUN_BYTES, attrgetter("nbytes")):
            table = pa.concat_tables(some).combine_chunks()
            num_bytes += table.nbytes
            for number, chosen in rows_by_bucket(table, num_buckets).items():
                file.write_table(table.take(chosen), row_group_size=len(chosen))
                written[number] += len(chosen)
                numbers.append(number)
        file.add_key_value_metadata({BUCKETS_KEY: json.dumps(numbers)})
    return written, num_bytes


def rows_by_bucket(table: pa.Table, num_buckets: int) -> dict[int, pa.Array]:
    """Return the row indices of each bucket that has rows, sorted by identity.

    A bucket is one of `num_buckets` equal ranges of identities, numbered in ascending order.
    """
    names = table["identity"].combine_chunks()
    order = pc.sort_indices(names).to_numpy()
    sorted_names = names.take(pa.array(order)).to_pylist()
    numbers = np.array([int(name[:8], 16) * num_buckets >> 32 for name in sorted_names], dtype=int)
    buckets, starts = np.unique(numbers, return_index=True)
    groups = np.split(order, starts[1:])  # one empty group if there are no rows
    return dict(zip(buckets.tolist(), map(pa.array, groups), strict=False))
