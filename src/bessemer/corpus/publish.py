"""Publishing of cleaned rows after the global steps: sorted documents, rejected documents, and counts.

A task handles one bucket of one source. Its parts stay sorted when concatenated in bucket order. Because each source is
sorted by identity, Parquet's row-group statistics narrow a search for an identity to a few groups.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bessemer.corpus.document import COLUMNS, EXCERPT_CHARACTERS, REJECTED_COLUMNS
from bessemer.corpus.filters.language import routed
from bessemer.corpus.partition import Bucket, context, rows_together
from bessemer.corpus.statistics import EXAMPLE_KEYS, Funnel
from bessemer.recipe import Corpus
from bessemer.run_tasks.task import Task, to_plain
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import copy_files, each, make_folder, open_parquet, read_receipt, stage_files

# Maximum text in a row group, except for a longer document; a reader holds one row group in memory
ROW_GROUP_BYTES = 16 << 20
REJECTED_ROWS = 1 << 14  # maximum rows in a row group of rejected documents
PART_BYTES = 256 << 20  # approximate text in a part file
READ = (
    "identity", "path", "place", "url", "metadata", "label", "language", "text", "reason", "detail", "num_bytes", "characters",
)  # fmt: skip
WRITE_OPTIONS = {"compression": "zstd", "use_dictionary": ["source", "language"], "write_page_checksum": True}
COMMAND = "bessemer corpus RECIPE"  # the command that errors suggest for a damaged part
WRITTEN_COLUMNS = {"documents": COLUMNS, "rejected": REJECTED_COLUMNS}


class PartWriter:
    """A writer of tables of string columns to part-00000.parquet, part-00001.parquet and so on."""

    def __init__(self, folder: Path, columns: tuple[str, ...]) -> None:
        folder.mkdir()
        self.folder = folder
        self.schema = schema(columns)
        self.num_parts = self.part_bytes = 0
        self.writer: pq.ParquetWriter | None = None

    def write(self, table: pa.Table) -> None:
        """Append rows, in row groups of bounded size."""
        ends = np.cumsum(pc.binary_length(table["text"]).to_numpy().astype(np.int64))
        start, before = 0, 0
        while start < len(ends):
            end = max(int(np.searchsorted(ends, before + ROW_GROUP_BYTES, side="right")), start + 1)
            self._row_group(table.slice(start, end - start), int(ends[end - 1]) - before)
            start, before = end, int(ends[end - 1])

    def _row_group(self, table: pa.Table, num_bytes: int) -> None:
        if self.writer is not None and self.part_bytes + num_bytes > PART_BYTES:
            self.close()
        if self.writer is None:
            self.writer = pq.ParquetWriter(self.folder / part_name(self.num_parts), self.schema, **WRITE_OPTIONS)
            self.num_parts += 1
            self.part_bytes = 0
        self.writer.write_table(table.cast(self.schema), row_group_size=max(table.num_rows, 1))
        self.part_bytes += num_bytes

    def close(self) -> None:
        """Close the current part file."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def part_name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def schema(columns: tuple[str, ...]) -> pa.Schema:
    """Return an Arrow schema of non-nullable string columns."""
    return pa.schema([pa.field(name, pa.string(), nullable=False) for name in columns])


@dataclass(frozen=True)
class PublishBucket(Task):
    """A task that writes and counts one bucket's documents and rejected documents."""

    bucket: Bucket

    @property
    def folder(self) -> AnyPath:
        return self.work / "published" / self.bucket.source / f"{self.bucket.number:06d}"

    def __str__(self) -> str:
        return f"source {self.bucket.source}, bucket {self.bucket.number}"

    def make(self, folder: Path) -> dict[str, Any]:
        """Write the parts. Raises BessemerError for missing rows, OSError for a full disk."""
        settings, _ = context(self.work)
        source = settings.sources[self.bucket.source]
        ((_, table),) = rows_together([self.bucket], READ)
        funnel = Funnel(source.name, source.shown_format, files=0, documents_in=table.num_rows)
        writers = {kind: PartWriter(folder / kind, columns) for kind, columns in WRITTEN_COLUMNS.items()}
        _split(table, funnel, settings.corpus, writers)
        funnel.check()
        for writer in writers.values():
            writer.close()
        return {"funnel": to_plain(funnel)}


def _split(table: pa.Table, funnel: Funnel, corpus: Corpus, writers: dict[str, PartWriter]) -> None:
    """Write each row to the documents or to the rejected documents, and count it."""
    funnel.bytes_in += pc.sum(table["num_bytes"]).as_py() or 0
    is_kept = pc.is_null(table["reason"])
    good, bad = table.filter(is_kept), table.filter(pc.invert(is_kept))
    funnel.lengths.update(_powers(good["characters"]))
    parts = [routed(funnel.source, code or None, corpus.language) for code in good["language"].to_pylist()]
    good = good.append_column("source", pa.array(parts, pa.string())).select(list(COLUMNS))
    writers["documents"].write(good)
    funnel.documents_kept += good.num_rows
    funnel.bytes_kept += pc.sum(pc.binary_length(good["text"])).as_py() or 0
    funnel.languages.update(good["language"].to_pylist())
    funnel.lengths_rejected.update(_powers(bad["characters"]))
    _write_rejects(bad, funnel, corpus.keep_rejected, writers["rejected"])


def _write_rejects(table: pa.Table, funnel: Funnel, keep: str, writer: PartWriter) -> None:
    """Count and write the rejected documents."""
    nothing = pa.repeat("", table.num_rows)
    excerpts = nothing if keep == "none" else pc.utf8_slice_codeunits(table["text"], 0, EXCERPT_CHARACTERS)
    texts = table["text"] if keep == "text" else nothing
    table = table.drop_columns("text").append_column("text", texts).append_column("excerpt", excerpts)
    table = table.append_column("source", pa.repeat(funnel.source, table.num_rows)).combine_chunks()
    for start in range(0, table.num_rows, REJECTED_ROWS):
        rows = table.slice(start, REJECTED_ROWS)
        for row in rows.select([*EXAMPLE_KEYS, "reason", "num_bytes"]).to_pylist():
            funnel.reject(row["reason"], row["num_bytes"], row)
        writer.write(rows.select(list(REJECTED_COLUMNS)))


def _powers(characters: pa.ChunkedArray) -> list[int]:
    """Return floor(log2(n)) of each number of characters n, the bins of the histogram of lengths; 0 for an empty text."""
    return list((np.frexp(np.maximum(characters.to_numpy(), 1))[1] - 1).tolist())


def assemble(tasks: Sequence[PublishBucket], place: AnyPath) -> dict[str, int]:
    """Copy the parts of all buckets to documents/ and rejected/ below `place`, a local or remote folder.

    `tasks` are in the order of their sources. Returns the size of each file by its path below `place`.
    """
    written: dict[str, int] = {}
    outputs = [receipt["outputs"] for receipt in each(read_receipt, [task.folder for task in tasks])]
    for kind, columns in WRITTEN_COLUMNS.items():
        make_folder(place / kind)
        ordered = [
            (task.folder / name, sizes[name])
            for task, sizes in zip(tasks, outputs, strict=True)
            for name in sorted(sizes) if name.startswith(f"{kind}/")
        ]  # fmt: skip
        copy_files([(part, place / kind / part_name(number)) for number, (part, _) in enumerate(ordered)])
        written |= {f"{kind}/{part_name(number)}": size for number, (_, size) in enumerate(ordered)}
        if not ordered:  # write an empty part, so that readers find the columns
            empty = io.BytesIO()
            pq.write_table(schema(columns).empty_table(), empty, **WRITE_OPTIONS)
            written[f"{kind}/{part_name(0)}"] = (place / kind / part_name(0)).write_bytes(empty.getvalue())
    return written


# --- Search for rows of a published corpus by identity, URL or path


def look_up(corpus: AnyPath, identities: Iterable[str], columns: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return {kind, part, row_group, row} and `columns` of documents and rejected documents, by identity.

    Unknown identities are left out. Raises DamagedFile for an unreadable part.
    """
    wanted = sorted(set(identities))

    def rows_of(path: AnyPath) -> dict[str, dict[str, Any]]:
        result: dict[str, dict[str, Any]] = {}
        place: dict[str, Any] = {"kind": path.parent.name, "part": int(path.stem.removeprefix("part-"))}
        with open_parquet(path, COMMAND) as file:
            number = file.schema_arrow.names.index("identity")
            present = [name for name in columns if name in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                bounds = file.metadata.row_group(group).column(number).statistics
                some = wanted[bisect_left(wanted, bounds.min) : bisect_right(wanted, bounds.max)] if bounds else []
                if not some:
                    continue
                names = file.read_row_group(group, columns=["identity"])["identity"]
                rows = pc.index_in(pa.array(some, names.type), names).drop_null()
                if not rows:
                    continue
                table = file.read_row_group(group, columns=["identity", *present]).take(rows)
                for row, values in zip(rows.to_pylist(), table.to_pylist(), strict=True):
                    result[values["identity"]] = {**values, **place, "row_group": group, "row": row}
        return result

    parts = chain.from_iterable(stage_files(corpus, kind) for kind in WRITTEN_COLUMNS)
    return {identity: row for rows in each(rows_of, parts) for identity, row in rows.items()}


def identities_of(corpus: AnyPath, name: str) -> list[str]:
    """Return the identities of documents and rejected documents with this URL, or this path in the corpus or on disk.

    Scans one column. If a path equals the name exactly, paths that only share their end with it are left out.
    """
    is_url, equal, alike = name.startswith(("http://", "https://")), list[str](), list[str]()
    key, shared = ("url", name) if is_url else ("path", Path(name).name)
    for part in chain.from_iterable(stage_files(corpus, kind) for kind in WRITTEN_COLUMNS):
        with open_parquet(part, COMMAND) as file:
            for batch in file.iter_batches(columns=["identity", key]) if key in file.schema_arrow.names else ():
                for row in batch.filter(pc.ends_with(batch[key], shared)).to_pylist():
                    if row[key] == name:
                        equal.append(row["identity"])
                    elif not is_url and (f"/{name}".endswith(f"/{row[key]}") or row[key].endswith(f"/{name}")):
                        alike.append(row["identity"])
    return equal or alike
