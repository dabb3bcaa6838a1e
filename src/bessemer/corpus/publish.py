"""Clean rows and verdicts to the corpus as it is read: sorted documents, sorted rejects, their index, the counts.

One bucket of one source is a task of its own: it reads the bucket's row groups of all partitions and writes its
parts. Buckets in order hold identities in order, so that their parts, put one after the other, are sorted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus import index
from bessemer.corpus.document import COLUMNS, EXCERPT_CHARACTERS, REJECTED_COLUMNS
from bessemer.corpus.partition import context
from bessemer.corpus.passed import bucket_rows, buckets_of
from bessemer.corpus.statistics import BY_ENDING, KEPT_EXAMPLES, Funnel
from bessemer.corpus.whole import Decided, with_new_texts
from bessemer.corpus.work import made, receipt
from bessemer.recipe import Corpus, digest

if TYPE_CHECKING:
    import pyarrow as pa

ROW_GROUP_BYTES = 16 << 20
"""Text in a row group, at the most (a document is never cut): what a reader holds at one time."""

PART_BYTES = 256 << 20
"""Text in a part file, about."""

READ = (
    "identity", "path", "place", "metadata", "label", "language", "text", "reason", "detail", "num_bytes", "characters",
)  # fmt: skip


class PartWriter:
    """Writes tables of string columns into part-00000.parquet, part-00001.parquet, ..."""

    def __init__(self, folder: Path, columns: tuple[str, ...], size_column: str) -> None:
        folder.mkdir()
        self.folder, self.size_column = folder, size_column
        self.schema = schema(columns)
        self.num_rows = self.num_parts = self.part_bytes = 0
        self.groups: list[tuple[int, int]] = []
        """(part, rows) of every row group."""
        self.writer: Any = None

    def write(self, table: pa.Table) -> None:
        """Append rows, in row groups of bounded size."""
        import numpy as np
        import pyarrow.compute as pc

        sizes = pc.binary_length(table[self.size_column]).to_numpy().astype(np.int64)
        ends = np.cumsum(sizes)
        start, before = 0, 0
        while start < len(sizes):
            end = max(int(np.searchsorted(ends, before + ROW_GROUP_BYTES, side="right")), start + 1)
            self._row_group(table.slice(start, end - start), int(ends[end - 1]) - before)
            start, before = end, int(ends[end - 1])

    def _row_group(self, table: pa.Table, num_bytes: int) -> None:
        import pyarrow.parquet as pq

        if self.writer is not None and self.part_bytes + num_bytes > PART_BYTES:
            self.close()
        if self.writer is None:
            path = self.folder / part_name(self.num_parts)
            self.writer = pq.ParquetWriter(path, self.schema, **WRITING)
            self.num_parts += 1
            self.part_bytes = 0
        self.writer.write_table(table.cast(self.schema), row_group_size=max(table.num_rows, 1))
        self.groups.append((self.num_parts - 1, table.num_rows))
        self.part_bytes += num_bytes
        self.num_rows += table.num_rows

    def close(self) -> None:
        """Finish the part that is open."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


WRITING = {"compression": "zstd", "use_dictionary": ["source", "language"]}


def part_name(number: int) -> str:
    """File name of a part."""
    return f"part-{number:05d}.parquet"


def schema(columns: tuple[str, ...]) -> pa.Schema:
    """Strings, none of them null."""
    import pyarrow as pa

    return pa.schema([pa.field(name, pa.string(), nullable=False) for name in columns])


def bucket_tasks(work: Path, receipts: list[dict[str, Any]], decided: str) -> list[dict[str, Any]]:
    """One task for each bucket of each source that has rows, in the order of the published corpus.

    receipts: of all partitions; decided: the digest of what the steps over the whole corpus were made from.
    """
    return [{"work": str(work), "decided": decided, **bucket} for bucket in buckets_of(receipts)]


def bucket_folder(task: dict[str, Any]) -> Path:
    """Where a bucket's parts and receipt lie."""
    return Path(task["work"]) / "published" / str(task["source"]) / f"{task['bucket']:06d}"


def bucket_receipt(task: dict[str, Any]) -> dict[str, Any] | None:
    """The receipt of a finished bucket; None when it has to be made (again)."""
    folder = bucket_folder(task)
    return receipt(folder, _inputs(task)) if folder.exists() else None


def _inputs(task: dict[str, Any]) -> str:
    return digest("bucket", task["decided"], task["pieces"])


def publish_bucket(task: dict[str, Any]) -> dict[str, Any]:
    """Write one bucket's documents, rejects and index, with its counts in the receipt; gives {size: its rows}.

    Raises BessemerError for rows that went missing, OSError for a full disk.
    """
    work = Path(task["work"])
    settings, _ = context(work)
    source = settings.sources[task["source"]]
    facts: dict[str, Any] = {}
    with made(bucket_folder(task), _inputs(task), facts) as folder:
        table = bucket_rows(work, task, READ)
        decided = Decided.load(work, settings.corpus)
        funnel = Funnel(source.name, source.format or BY_ENDING, files=0, documents_in=table.num_rows)
        documents = PartWriter(folder / "documents", COLUMNS, "text")
        rejected = PartWriter(folder / "rejected", REJECTED_COLUMNS, "text")
        kept = _split(table, task, decided, funnel, settings.corpus, documents, rejected)
        documents.close()
        rejected.close()
        funnel.check()
        names = table["identity"].to_pylist()
        for kind, writer, chosen in (("documents", documents, True), ("rejected", rejected, False)):
            mine = [name for name, stays in zip(names, kept, strict=True) if stays == chosen]
            (folder / f"{kind}.idx").write_bytes(index.records(mine, writer.groups))
        facts |= {
            "funnel": funnel.to_json(),
            "parts": {"documents": documents.num_parts, "rejected": rejected.num_parts},
        }
        facts["funnel"]["languages"] = dict(funnel.languages)
    return {"size": table.num_rows}


def _split(
    table: pa.Table,
    task: dict[str, Any],
    decided: Decided,
    funnel: Funnel,
    corpus: Corpus,
    documents: PartWriter,
    rejected: PartWriter,
) -> list[bool]:
    """Send each row to the documents or to the rejects, and count it; gives which rows are documents."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    funnel.bytes_in += pc.sum(table["num_bytes"]).as_py() or 0
    kept = pc.is_null(table["reason"]).to_numpy(zero_copy_only=False).copy()
    passed = np.flatnonzero(kept)
    new = decided.new_texts(task["source"], task["bucket"])
    reasons = decided.reasons(table["identity"].take(pa.array(passed)).to_pylist(), new, corpus.rules.min_characters)
    later = {int(passed[place]): verdict for place, verdict in reasons.items()}
    kept[list(later)] = False
    good = with_new_texts(table.filter(pa.array(kept)), new)
    powers = _powers(good["characters"].to_numpy())
    parts = decided.parts(corpus, task["source"], good["identity"].to_pylist(), good["language"].to_pylist())
    good = good.append_column("source", pa.array(parts, pa.string())).select(list(COLUMNS))
    documents.write(good)
    funnel.documents_kept += good.num_rows
    funnel.bytes_kept += pc.sum(pc.binary_length(good["text"])).as_py() or 0
    funnel.lengths.update(powers)
    funnel.lengths_rejected.update(_powers(table["characters"].to_numpy()[~kept]))
    funnel.languages.update(good["language"].to_pylist())
    for row in good.slice(0, KEPT_EXAMPLES).to_pylist():
        example = {"identity": row["identity"], "path": row["path"], "excerpt": row["text"][:EXCERPT_CHARACTERS]}
        funnel.kept_examples.append(example)
    places = iter(np.flatnonzero(~kept).tolist())
    rejects = (
        _reject(values, later.get(place), funnel, corpus.keep_rejected)
        for batch in table.filter(pa.array(~kept)).to_batches(max_chunksize=1024)
        for values, place in zip(batch.to_pylist(), places, strict=False)
    )
    _write_rejects(rejects, rejected)
    stays: list[bool] = kept.tolist()
    return stays


def _reject(values: dict[str, Any], later: tuple[str, str] | None, funnel: Funnel, keep: str) -> dict[str, str]:
    """Count one rejected row; gives its line in rejected/. later: why a step over the whole corpus rejected it."""
    reason, detail = later if later is not None else (values["reason"], values["detail"])
    excerpt = values["text"][:EXCERPT_CHARACTERS] if keep != "none" else ""
    funnel.reject(reason, values["num_bytes"], values["path"], excerpt, detail, values["identity"], values["place"])
    text = values["text"] if keep == "text" else ""
    line = {**values, "source": funnel.source, "reason": reason, "detail": detail, "excerpt": excerpt, "text": text}
    return {name: line[name] for name in REJECTED_COLUMNS}


def _write_rejects(rejects: Iterator[dict[str, str]], rejected: PartWriter) -> None:
    import pyarrow as pa

    chunk: list[dict[str, str]] = []
    held = 0
    for line in rejects:
        chunk.append(line)
        held += len(line["text"]) + len(line["excerpt"])
        if held > ROW_GROUP_BYTES or len(chunk) == 1 << 14:
            rejected.write(pa.Table.from_pylist(chunk, schema=rejected.schema))
            chunk, held = [], 0
    if chunk:
        rejected.write(pa.Table.from_pylist(chunk, schema=rejected.schema))


def _powers(characters: Any) -> list[int]:
    import numpy as np

    powers: list[int] = (np.frexp(np.maximum(characters, 1))[1] - 1).tolist()
    return powers


def assemble(tasks: list[dict[str, Any]], sources: list[str], staged: Path) -> None:
    """Put the buckets' parts and indexes together below `staged`: documents/, rejected/, index/."""
    import pyarrow.parquet as pq

    first = dict.fromkeys(index.KINDS, 0)
    for kind in index.KINDS:
        (staged / kind).mkdir()
    (staged / "index").mkdir()
    for source in sources:
        for kind in index.KINDS:
            index.index_file(staged, kind, source).write_bytes(index.MAGIC)
    for task in tasks:
        folder = bucket_folder(task)
        for kind in index.KINDS:
            with open(index.index_file(staged, kind, task["source"]), "ab") as file:
                file.write(index.shifted((folder / f"{kind}.idx").read_bytes(), first[kind]))
            for part in sorted((folder / kind).iterdir()):
                _link(part, staged / kind / part_name(first[kind]))
                first[kind] += 1
    for kind, columns in (("documents", COLUMNS), ("rejected", REJECTED_COLUMNS)):
        if not first[kind]:  # one part at least, so that a reader finds the columns
            path = staged / kind / part_name(0)
            with pq.ParquetWriter(path, schema(columns), **WRITING) as file:
                file.write_table(schema(columns).empty_table())


def _link(part: Path, place: Path) -> None:
    """The same file under another name: the bucket stays whole until the corpus is published."""
    try:
        os.link(part, place)
    except OSError:  # a file system without links
        shutil.copyfile(part, place)
