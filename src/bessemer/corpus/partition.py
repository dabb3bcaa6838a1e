"""A partition: units of one source, cleaned into one Parquet file with a receipt.

The file is sorted by identity with a row group per identity bucket, so that later steps read one bucket at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus import engine
from bessemer.corpus.clean import Settings, Tally, check_tally, clean_record
from bessemer.corpus.document import EXCERPT_CHARACTERS, Record, identity, printable
from bessemer.corpus.extract import fold
from bessemer.corpus.readers import read
from bessemer.corpus.units import Piece, Unit
from bessemer.corpus.work import made_once, partition_folder, plan_file, receipt
from bessemer.errors import BessemerError
from bessemer.recipe import Corpus, Source, digest
from bessemer.run import read_json, write_json

if TYPE_CHECKING:
    import pyarrow as pa

BUCKET_BYTES = 64 << 20  # input bytes whose documents are sorted in memory at one time
# bounds of the input bytes in a partition: less is not worth a receipt, more would not fit a worker's memory
PARTITION_BYTES = 4 << 20, 64 << 20
# partitions of a corpus, while they stay within those bounds: enough to keep all workers busy to the end
PARTITIONS = 64
CHUNK_BYTES = 4 << 20  # clean text buffered as Python strings before conversion to Arrow
CONTEXT = "context.json"


@dataclass(frozen=True)
class Partition:
    """Units of one source that are cleaned, published and counted together."""

    number: int
    source: str
    units: tuple[Unit, ...]

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(unit.size for unit in self.units)

    @property
    def files(self) -> str:
        """Its files, shortly, for a message."""
        names = [piece.name for unit in self.units for piece in unit.pieces]
        return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else "no file"

    def to_json(self) -> dict[str, Any]:
        """As written into plan/."""
        units = [{"format": unit.format, "pieces": [asdict(piece) for piece in unit.pieces]} for unit in self.units]
        return {"number": self.number, "source": self.source, "units": units}

    @staticmethod
    def from_json(value: dict[str, Any], sources: Iterable[Source]) -> Partition:
        """The inverse of `to_json`."""
        source = next(one for one in sources if one.name == value["source"])
        units = tuple(
            Unit(source, unit["format"], tuple(Piece(**piece) for piece in unit["pieces"])) for unit in value["units"]
        )
        return Partition(value["number"], source.name, units)


def cut(units: list[Unit]) -> list[Partition]:
    """Units in their order as partitions of bounded size; a partition holds one source."""
    smallest, largest = PARTITION_BYTES
    limit = min(max(sum(unit.size for unit in units) // PARTITIONS, smallest), largest)
    groups: list[list[Unit]] = []
    size = 0
    for unit in units:
        if not groups or groups[-1][0].source != unit.source or size + unit.size > limit:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += unit.size
    return [Partition(number, group[0].source.name, tuple(group)) for number, group in enumerate(groups)]


def num_buckets(num_bytes: int) -> int:
    """Buckets for a source of so many bytes."""
    return min(max(-(-num_bytes // BUCKET_BYTES), 1), 4096)


def bucket_of(identity_: str, num_buckets: int) -> int:
    """Which bucket an identity falls into; buckets in order hold identities in order."""
    return int(identity_[:8], 16) * num_buckets >> 32


def write_context(work: Path, corpus: Corpus, buckets: dict[str, int]) -> None:
    """Write what all workers need: the recipe's [corpus] and the number of buckets of each source."""
    write_json(work / CONTEXT, {"corpus": corpus.model_dump(mode="json"), "buckets": buckets})


def context(work: Path) -> tuple[Settings, dict[str, int]]:
    """What `write_context` wrote; prepared once in a process."""
    return _context(work, (work / CONTEXT).stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _context(work: Path, _: int) -> tuple[Settings, dict[str, int]]:
    value = read_json(work / CONTEXT)
    return Settings.of(Corpus.model_validate_json(json.dumps(value["corpus"]))), value["buckets"]


def partition_receipt(work: Path, number: int) -> dict[str, Any] | None:
    """The receipt of a finished partition; None when it has to be cleaned."""
    return receipt(partition_folder(work, number), digest("partition", read_json(plan_file(work, number))))


def clean_partition(task: dict[str, Any]) -> dict[str, Any]:
    """Clean one partition; task: {work, number}. Returns the input size. Raises OSError for a full disk, BessemerError
    for inconsistent counts."""
    work, number = Path(task["work"]), int(task["number"])
    plan = read_json(plan_file(work, number))
    settings, buckets = context(work)
    partition = Partition.from_json(plan, settings.corpus.sources)

    def clean(folder: Path) -> dict[str, Any]:
        counts = Counts()
        tables = list(_chunks(partition, settings, counts))
        written = _write(tables, buckets[partition.source], settings, folder / "rows.parquet")
        rows = sum(rows for _, rows in written)
        if rows != counts.documents_in:
            raise BessemerError(
                f"corpus: source {partition.source}, partition {number} ({partition.files}): {counts.documents_in} "
                f"documents were read but {rows} are in its file; please report this"
            )
        check_tally(counts.tally, counts.documents_in, counts.rejected.total(), f"source {partition.source}")
        return {"source": partition.source, "partition": number, "buckets": written, "counts": counts.to_json()}

    made_once(partition_folder(work, number), digest("partition", plan), clean)
    return {"size": partition.size}


@dataclass
class Counts:
    """What came in, what passed, and why the rest did not: of a partition, or summed over many."""

    documents_in: int = 0
    bytes_in: int = 0
    passed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)

    def add(self, record: Record) -> None:
        """Count one record that went through the steps."""
        self.documents_in += 1
        self.bytes_in += record.num_bytes
        if record.reason is None:
            self.passed += 1
        else:
            self.rejected[record.reason] += 1

    def merge(self, value: dict[str, Any]) -> None:
        """Add other counts, as `to_json` gives them."""
        self.documents_in += value["documents_in"]
        self.bytes_in += value["bytes_in"]
        self.passed += value["passed"]
        self.rejected.update(value["rejected"])
        self.tally.merge(value["tally"])

    def to_json(self) -> dict[str, Any]:
        """For a receipt."""
        return vars(self) | {"rejected": dict(sorted(self.rejected.items())), "tally": self.tally.to_json()}


def _chunks(partition: Partition, settings: Settings, counts: Counts) -> Iterator[pa.Table]:
    """Read and clean; the rows as Arrow tables of bounded size, so that few Python strings live at one time."""
    rows: list[dict[str, Any]] = []
    size = 0
    for unit in partition.units:
        before = counts.documents_in
        for piece, record in read(unit, settings.corpus.rules, settings.corpus.extract):
            engine.check_stop()
            record.source, record.format = partition.source, unit.format
            clean_record(record, settings, counts.tally)
            counts.add(record)
            rows.append(_row(record, piece.name, settings.corpus))
            size += len(rows[-1]["text"]) + len(rows[-1]["folded"]) + 200
            if size > CHUNK_BYTES:
                yield _table(rows, settings)
                rows, size = [], 0
        arrived = counts.documents_in - before
        if unit.format in ("text", "code", "html") and arrived != len(unit.pieces):
            raise BessemerError(
                f"corpus: source {partition.source}: {len(unit.pieces)} files but {arrived} documents came in "
                f"(partition {partition.number}: {partition.files}); nothing was written; please report this"
            )
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
        "exact": hashlib.blake2b(folded.encode(), digest_size=16).digest() if kept else None,
        "words": folded.count(" ") + 1 if folded else 0,
        "folded": folded,
    }


def _table(rows: list[dict[str, Any]], settings: Settings) -> pa.Table:
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


def _write(tables: list[pa.Table], num_buckets_: int, settings: Settings, path: Path) -> list[list[int]]:
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
