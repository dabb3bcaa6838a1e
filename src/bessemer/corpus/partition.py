"""A partition: units of one source, cleaned into one Parquet file with a receipt.

The file is sorted by identity with a row group per identity bucket, so that later steps read one bucket at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus import engine
from bessemer.corpus.clean import CleaningContext, Tally, check_tally, clean_record
from bessemer.corpus.document import EXCERPT_CHARACTERS, Record, identity, printable
from bessemer.corpus.extract import fold, text_digest
from bessemer.corpus.readers import read
from bessemer.corpus.units import Unit, in_groups
from bessemer.corpus.work import CorpusTask
from bessemer.recipe import Corpus
from bessemer.run import read_json, write_json

if TYPE_CHECKING:
    import pyarrow as pa

BUCKET_BYTES = 64 << 20  # input bytes whose documents are sorted in memory at one time
# Bounds of the input bytes in a partition: less is not worth a receipt, more would not fit a worker's memory
PARTITION_BYTES = 4 << 20, 64 << 20
PARTITIONS = 64  # of a corpus, while they stay within those bounds: enough to keep all workers busy to the end
CHUNK_BYTES = 4 << 20  # clean text buffered as Python strings before conversion to Arrow
CONTEXT = "context.json"


@dataclass(frozen=True)
class Partition(CorpusTask):
    """Units of one source that are cleaned and counted together."""

    number: int
    units: tuple[Unit, ...]

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
    def inputs(self) -> str:
        return "partition"

    def __str__(self) -> str:
        return f"partition {self.number}"

    def make(self, folder: Path) -> dict[str, Any]:
        """Clean the units. Raises OSError for a full disk, BessemerError for inconsistent counts."""
        settings, buckets = context(self.work)
        tally = Tally()
        tables = list(_chunks(self, settings, tally))
        written = _write(tables, buckets[self.source], settings, folder / "rows.parquet")
        check_tally(tally, sum(rows for _, rows in written), f"source {self.source}, {self}")
        return {"source": self.source, "partition": self.number, "buckets": written, "counts": tally.to_json()}


def partition_folder(work: Path, number: int) -> Path:
    """A partition's rows and receipt."""
    return work / "partitions" / f"{number:06d}"


def cut(units: list[Unit], work: Path) -> list[Partition]:
    """Units in their order as partitions of bounded size; a partition holds one source."""
    smallest, largest = PARTITION_BYTES
    limit = min(max(sum(unit.size for unit in units) // PARTITIONS, smallest), largest)
    groups = in_groups(units, limit, lambda group, unit: group[0].source != unit.source)
    return [Partition(work, number, tuple(group)) for number, group in enumerate(groups)]


@dataclass(frozen=True)
class Bucket:
    """The documents of one source whose identities are in one range. place: among the buckets of all sources; pieces:
    (partition, row group, rows) of each partition that has some."""

    work: Path
    source: str
    number: int
    place: int
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def size(self) -> int:
        """Rows, rejected ones included."""
        return sum(rows for _, _, rows in self.pieces)

    def rows(self, columns: Sequence[str]) -> pa.Table:
        """Its rows from all partitions, sorted by identity (a required column). Raises BessemerError for missing rows."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables = []
        for partition, group, _ in self.pieces:
            engine.check_stop()
            with pq.ParquetFile(partition_folder(self.work, partition) / "rows.parquet") as file:
                present = [name for name in columns if name in file.schema_arrow.names]
                tables.append(file.read_row_group(group, columns=present))
        table = pa.concat_tables(tables)
        came = f"{self.size} rows were written but {table.num_rows} came back"
        engine.require(table.num_rows == self.size, f"source {self.source}, bucket {self.number}: {came}")
        return table.sort_by("identity")


def buckets_of(work: Path, receipts: list[dict[str, Any]]) -> list[Bucket]:
    """The buckets that have documents, in the order of the published corpus. receipts: of all partitions."""
    pieces: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for done in receipts:
        for group, (bucket, rows) in enumerate(done["buckets"]):
            pieces.setdefault((done["source"], bucket), []).append((done["partition"], group, rows))
    names = enumerate(sorted(pieces))
    return [Bucket(work, source, number, place, tuple(pieces[source, number])) for place, (source, number) in names]


def num_buckets(num_bytes: int) -> int:
    """Buckets for a source of `num_bytes` bytes."""
    return min(max(-(-num_bytes // BUCKET_BYTES), 1), 4096)


def bucket_of(identity_: str, num_buckets: int) -> int:
    """Which bucket an identity falls into; buckets in order hold identities in order."""
    return int(identity_[:8], 16) * num_buckets >> 32


def write_context(work: Path, corpus: Corpus, buckets: dict[str, int]) -> None:
    """Write what all workers need: the recipe's [corpus] and the number of buckets of each source."""
    write_json(work / CONTEXT, {"corpus": corpus.model_dump(mode="json"), "buckets": buckets})


@lru_cache(maxsize=2)
def context(work: Path) -> tuple[CleaningContext, dict[str, int]]:
    """What `write_context` wrote; prepared once in a process."""
    value = read_json(work / CONTEXT)
    return CleaningContext.of(Corpus.model_validate_json(json.dumps(value["corpus"]))), value["buckets"]


def _chunks(partition: Partition, settings: CleaningContext, tally: Tally) -> Iterator[pa.Table]:
    """Read and clean; the rows as Arrow tables of bounded size, so that few Python strings live at one time."""
    rows: list[dict[str, Any]] = []
    size = 0
    for unit in partition.units:
        before = tally.documents_in
        for piece, record in read(unit, settings.corpus.rules, settings.corpus.extract):
            engine.check_stop()
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
    import pyarrow as pa

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


def _write(tables: list[pa.Table], num_buckets_: int, settings: CleaningContext, path: Path) -> list[list[int]]:
    """Sort the rows and write a row group for each bucket that has some: [[bucket, rows], ...] in the file's order."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = pa.concat_tables(tables or [_table([], settings)]).combine_chunks()
    tables.clear()
    names = table["identity"].combine_chunks()
    order = pc.sort_indices(names).to_numpy()
    numbers = np.array([bucket_of(name, num_buckets_) for name in names.take(pa.array(order)).to_pylist()], dtype=int)
    written: list[list[int]] = []
    with pq.ParquetWriter(
        path, table.schema, compression="zstd", use_dictionary=["reason", "label", "language"]
    ) as file:
        for bucket in np.unique(numbers).tolist():
            chosen = order[np.searchsorted(numbers, bucket) : np.searchsorted(numbers, bucket, side="right")]
            file.write_table(table.take(pa.array(chosen)), row_group_size=len(chosen))
            written.append([bucket, len(chosen)])
    return written
