"""Publishing of cleaned rows after the global steps: sorted documents, rejected documents, and counts.

A task handles one bucket of one source. Its parts stay sorted when concatenated in bucket order. Because each source is
sorted by identity, Parquet's row-group statistics narrow a search for an identity to a few groups.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bessemer.corpus import statistics
from bessemer.corpus.document import COLUMNS, EXCERPT_CHARACTERS, REJECTED_COLUMNS
from bessemer.corpus.filters.chain import INPUT, REJECTED, Tally
from bessemer.corpus.filters.language import routed
from bessemer.corpus.partition import Bucket, context, rows_together
from bessemer.corpus.readers.parts import in_groups
from bessemer.run.files import stage_facts
from bessemer.run_tasks.task import Task
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import arrow_source, copy_files, each, make_folder, open_parquet, stage_files

# Maximum text in a row group, except for a longer document; a reader holds one row group in memory
ROW_GROUP_BYTES = 16 << 20
ROW_BYTES = 1 << 10  # counted for the other columns of a row
EXAMPLE_ROWS = 1 << 14  # rejected documents held as Python objects at a time
PART_BYTES = 256 << 20  # approximate text in a part file
READ = (
    "identity", "path", "place", "url", "metadata", "label", "language", "text", "reason", "detail", "num_bytes", "characters",
)  # fmt: skip
WRITE_OPTIONS = {"compression": "zstd", "use_dictionary": ["source", "language"], "write_page_checksum": True}
COMMAND = "bessemer corpus RECIPE"  # the command that errors suggest for a damaged part
WRITTEN_COLUMNS = {"documents": COLUMNS, "rejected": REJECTED_COLUMNS}


def part_name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def schema(columns: tuple[str, ...]) -> pa.Schema:
    """Return an Arrow schema of non-nullable string columns."""
    return pa.schema([pa.field(name, pa.string(), nullable=False) for name in columns])


@dataclass(frozen=True)
class PublishBucket(Task):
    """A task that writes the kept and the rejected documents of one bucket to Parquet files and counts them."""

    bucket: Bucket

    @property
    def folder(self) -> AnyPath:
        return self.work / "published" / self.bucket.source / f"{self.bucket.number:06d}"

    def __str__(self) -> str:
        return f"source {self.bucket.source}, bucket {self.bucket.number}"

    def make(self, folder: Path) -> dict[str, Any]:
        """Write the bucket's documents/ and rejected/ to `folder`, and return counts and examples of rejected documents.

        Raises BessemerError for missing rows, OSError for a full disk.
        """
        settings, _ = context(self.work)
        source = settings.sources[self.bucket.source]
        ((_, table),) = rows_together([self.bucket], READ)
        is_kept = pc.is_null(table["reason"])
        kept, rejected = table.filter(is_kept), table.filter(pc.invert(is_kept))
        counts, examples = Tally(), dict[str, Any]()
        counts[INPUT].update(documents=table.num_rows, bytes=pc.sum(table["num_bytes"]).as_py() or 0)
        counts[statistics.KEPT].update(
            documents=kept.num_rows, bytes=pc.sum(pc.binary_length(kept["text"])).as_py() or 0
        )
        counts |= {statistics.LENGTHS: _powers(kept), statistics.LENGTHS_REJECTED: _powers(rejected)}
        counts[statistics.LANGUAGES].update(kept["language"].to_pylist())
        rejected = _with_excerpts(rejected, source.name, settings.corpus.keep_rejected)
        for batch in rejected.select([*statistics.EXAMPLE_KEYS, "reason", "num_bytes"]).to_batches(EXAMPLE_ROWS):
            for row in batch.to_pylist():
                reason = row.pop("reason")
                counts[REJECTED][reason] += 1
                counts[statistics.REJECTED_BYTES][reason] += row.pop("num_bytes")
                statistics.add_examples(examples, {reason: [row]})
        parts = [routed(source.name, code or None, settings.corpus.language) for code in kept["language"].to_pylist()]
        write_parts(folder / "documents", kept.append_column("source", pa.array(parts, pa.string())))
        write_parts(folder / "rejected", rejected)
        return {"counts": counts.to_json(), "examples": examples}


def write_parts(folder: Path, table: pa.Table) -> None:
    """Write a table to part-00000.parquet, part-00001.parquet and so on, in row groups of bounded size.

    The name of `folder`, "documents" or "rejected", determines the columns.
    """
    folder.mkdir()
    columns = schema(WRITTEN_COLUMNS[folder.name])
    sizes = [num_bytes + ROW_BYTES for num_bytes in pc.binary_length(table["text"]).to_pylist()]
    groups = in_groups(range(table.num_rows), ROW_GROUP_BYTES, sizes.__getitem__)
    parts = in_groups(groups, PART_BYTES, lambda rows: sum(sizes[rows[0] : rows[-1] + 1]))
    for number, part in enumerate(parts):
        with pq.ParquetWriter(folder / part_name(number), columns, **WRITE_OPTIONS) as file:
            for rows in part:
                chosen = table.slice(rows[0], len(rows)).select(columns.names)
                file.write_table(chosen.cast(columns), row_group_size=len(rows))


def _with_excerpts(table: pa.Table, source: str, keep: str) -> pa.Table:
    """Add the columns `source` and `excerpt` to a table of rejected documents.

    `keep` is `corpus.keep_rejected`. With "excerpt" the excerpt is filled and the text empty, with "text" both are
    filled, and with "none" both are empty.
    """
    nothing, text = pa.repeat("", table.num_rows), table["text"]
    excerpts = nothing if keep == "none" else pc.utf8_slice_codeunits(text, 0, EXCERPT_CHARACTERS)
    table = table.drop_columns("text").append_column("text", text if keep == "text" else nothing)
    return table.append_column("excerpt", excerpts).append_column("source", pa.repeat(source, table.num_rows))


def _powers(table: pa.Table) -> Counter[str]:
    """Count documents by floor(log2(n)) of their number of characters n, the bins of the histogram; 0 for an empty text."""
    return Counter(map(str, np.frexp(np.maximum(table["characters"].to_numpy(), 1))[1] - 1))


def assemble(tasks: Sequence[PublishBucket], folder: AnyPath) -> dict[str, int]:
    """Copy the files of all buckets to documents/ and rejected/ below `folder`, and number them consecutively.

    `tasks` are those that wrote the buckets, in the order of the published corpus. `folder` is local or remote. Returns
    the size in bytes of each file by its path below `folder`.
    """
    written: dict[str, int] = {}
    outputs = [receipt["outputs"] for receipt in each(stage_facts, [task.folder for task in tasks])]
    for kind, columns in WRITTEN_COLUMNS.items():
        make_folder(folder / kind)
        ordered = [
            (task.folder / name, sizes[name])
            for task, sizes in zip(tasks, outputs, strict=True)
            for name in sorted(sizes) if name.startswith(f"{kind}/")
        ]  # fmt: skip
        copy_files([(part, folder / kind / part_name(number)) for number, (part, _) in enumerate(ordered)])
        written |= {f"{kind}/{part_name(number)}": size for number, (_, size) in enumerate(ordered)}
        if not ordered:  # write an empty part, so that readers find the columns
            empty = io.BytesIO()
            pq.write_table(schema(columns).empty_table(), empty, **WRITE_OPTIONS)
            written[f"{kind}/{part_name(0)}"] = (folder / kind / part_name(0)).write_bytes(empty.getvalue())
    return written


# --- Search for rows of a published corpus by identity, URL or path


def look_up(corpus: AnyPath, identities: Iterable[str], columns: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return a dict from identity to row of a published corpus, for the given identities. Unknown ones are left out.

    A row has those of `columns` that its file has, `kind` ("documents" or "rejected"), and `part`, the number of the
    file. Raises DamagedFile for an unreadable file.
    """
    wanted = pc.field("identity").isin(pa.array(identities, pa.string()))

    def rows_of(path: AnyPath) -> list[dict[str, Any]]:
        kind, part = path.parent.name, int(path.stem.removeprefix("part-"))
        present = ["identity", *(name for name in columns if name in WRITTEN_COLUMNS[kind])]
        with open_parquet(path, COMMAND):  # row groups whose statistics exclude all identities are not read
            table = pq.read_table(arrow_source(path), columns=present, filters=wanted, page_checksum_verification=True)
        return [{**row, "kind": kind, "part": part} for row in table.to_pylist()]

    parts = chain.from_iterable(stage_files(corpus, kind) for kind in WRITTEN_COLUMNS)
    return {row["identity"]: row for rows in each(rows_of, parts) for row in rows}


def identities_of(corpus: AnyPath, name: str) -> list[str]:
    """Return the identities of documents and rejected documents whose URL or file is `name`.

    `name` may be a URL, a path in the corpus or a path on disk. If a path equals `name` exactly, paths of which only
    the end equals that of `name` are left out.
    """
    is_url, equal, similar = name.startswith(("http://", "https://")), list[str](), list[str]()
    key, shared = ("url", name) if is_url else ("path", Path(name).name)
    for part in chain.from_iterable(stage_files(corpus, kind) for kind in WRITTEN_COLUMNS):
        with open_parquet(part, COMMAND) as file:
            for batch in file.iter_batches(columns=["identity", key]) if key in file.schema_arrow.names else ():
                for row in batch.filter(pc.ends_with(batch[key], shared)).to_pylist():
                    if row[key] == name:
                        equal.append(row["identity"])
                    elif not is_url and (f"/{name}".endswith(f"/{row[key]}") or row[key].endswith(f"/{name}")):
                        similar.append(row["identity"])
    return equal or similar
