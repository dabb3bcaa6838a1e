"""Clean rows and verdicts to the corpus as it is read: sorted documents, sorted rejects, and the counts.

One bucket of one source is in memory at a time; buckets in order hold identities in order, so that the whole
is sorted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus.dedup import EXACT, KEPT, Verdicts, packed
from bessemer.corpus.document import COLUMNS, EXCERPT_CHARACTERS, REJECTED_COLUMNS
from bessemer.corpus.statistics import Funnel
from bessemer.errors import BessemerError

if TYPE_CHECKING:
    import pyarrow as pa

ROW_GROUP_BYTES = 16 << 20
"""Text in a row group, at the most (a document is never cut): what a reader holds at one time."""

PART_BYTES = 256 << 20
"""Text in a part file, about."""

READ = ("identity", "path", "metadata", "label", "text", "reason", "detail", "num_bytes", "characters", "counted")


class PartWriter:
    """Writes tables of string columns into part-00000.parquet, part-00001.parquet, ..."""

    def __init__(self, folder: Path, columns: tuple[str, ...], size_column: str) -> None:
        import pyarrow as pa

        folder.mkdir()
        self.folder, self.size_column = folder, size_column
        self.schema = pa.schema([pa.field(name, pa.string(), nullable=False) for name in columns])
        self.num_rows = self.num_parts = self.part_bytes = 0
        self.writer: Any = None

    def write(self, table: pa.Table) -> None:
        """Append rows, in row groups of bounded size."""
        import numpy as np
        import pyarrow.compute as pc

        sizes = pc.binary_length(table[self.size_column]).to_numpy().astype(np.int64)
        start = 0
        while start < len(sizes):
            within = np.cumsum(sizes[start:]) <= ROW_GROUP_BYTES
            end = start + max(int(within.sum()), 1)
            self._row_group(table.slice(start, end - start), int(sizes[start:end].sum()))
            start = end

    def _row_group(self, table: pa.Table, num_bytes: int) -> None:
        import pyarrow.parquet as pq

        if self.writer is not None and self.part_bytes + num_bytes > PART_BYTES:
            self.close()
        if self.writer is None:
            path = self.folder / f"part-{self.num_parts:05d}.parquet"
            self.writer = pq.ParquetWriter(path, self.schema, compression="zstd", use_dictionary=["source"])
            self.num_parts += 1
            self.part_bytes = 0
        self.writer.write_table(table.cast(self.schema), row_group_size=max(table.num_rows, 1))
        self.part_bytes += num_bytes
        self.num_rows += table.num_rows

    def close(self) -> None:
        """Finish the part that is open; there is always at least one, so that a reader finds the columns."""
        if self.writer is None and self.num_parts == 0:
            self._row_group(self.schema.empty_table(), 0)
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def cleaned_files(cleaned: Path, source: str) -> list[list[Path]]:
    """The Parquet files of a source, by bucket in order."""
    folders = (cleaned / f"source={source}").glob("bucket=*")
    ordered = sorted(folders, key=lambda folder: int(folder.name.partition("=")[2]))
    return [sorted(folder.glob("*.parquet")) for folder in ordered]


def publish(cleaned: Path, verdicts: Verdicts, funnels: dict[str, Funnel], units: dict[str, int], staged: Path) -> None:
    """Write documents/ and rejected/ below `staged` and fill the funnels; `units` is how many each source was
    cut into."""
    documents = PartWriter(staged / "documents", COLUMNS, "text")
    rejected = PartWriter(staged / "rejected", REJECTED_COLUMNS, "excerpt")
    paths = _keeper_paths(cleaned, sorted(funnels), verdicts)
    for source in sorted(funnels):
        funnel, receipts = funnels[source], 0
        for files in cleaned_files(cleaned, source):
            table, counts = _bucket(files)
            receipts += len(counts)
            funnel.documents_in += sum(counts)
            _split(table, source, verdicts, paths, funnel, documents, rejected)
        if receipts != units[source]:
            raise BessemerError(
                f"corpus: source {source} was read in {units[source]} units but {receipts} came back; "
                "nothing was written; please report this"
            )
        funnel.check()
    documents.close()
    rejected.close()


def _bucket(files: list[Path]) -> tuple[pa.Table, list[int]]:
    """The documents of a bucket, sorted by identity, and the counts in its receipts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = pa.concat_tables(_tables(files, list(READ)))
    counted = table["counted"]
    counts: list[int] = counted.drop_null().to_pylist()
    table = table.filter(pc.is_null(counted))
    return table.sort_by("identity"), counts


def _tables(files: list[Path], columns: list[str]) -> Iterator[pa.Table]:
    import pyarrow.parquet as pq

    for path in files:
        with pq.ParquetFile(path) as file:
            yield file.read(columns=columns)


def _keeper_paths(cleaned: Path, sources: list[str], verdicts: Verdicts) -> dict[int, str]:
    """Where the documents stand that others are duplicates of, by their row in the verdicts."""
    import numpy as np

    wanted = np.unique(verdicts.keeper[verdicts.verdict != KEPT])
    paths = dict(verdicts.earlier)
    if not len(wanted):
        return paths
    names = verdicts.identities[wanted]
    for source in sources:
        for files in cleaned_files(cleaned, source):
            for table in _tables(files, ["identity", "path"]):
                found = np.isin(packed(table["identity"].to_pylist()), names)
                part = table.filter(found)
                rows = verdicts.rows(part["identity"].to_pylist())
                paths.update(zip(rows.tolist(), part["path"].to_pylist(), strict=True))
    return paths


def _split(
    table: pa.Table,
    source: str,
    verdicts: Verdicts,
    paths: dict[int, str],
    funnel: Funnel,
    documents: PartWriter,
    rejected: PartWriter,
) -> None:
    """Send each row of a bucket to the documents or to the rejects, and count it."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    funnel.bytes_in += pc.sum(table["num_bytes"]).as_py() or 0
    passed = pc.is_null(table["reason"]).to_numpy(zero_copy_only=False)
    kept = passed.copy()
    rows = np.full(len(passed), -1, dtype=np.int64)
    if passed.any():
        rows[passed] = verdicts.rows(table["identity"].filter(passed).to_pylist())
        kept[passed] = verdicts.verdict[rows[passed]] == KEPT
    good = table.filter(kept)
    good = good.append_column("source", pa.array([source] * good.num_rows, pa.string())).select(list(COLUMNS))
    documents.write(good)
    characters = table["characters"].to_numpy()[kept]
    funnel.documents_kept += good.num_rows
    funnel.bytes_kept += pc.sum(pc.binary_length(good["text"])).as_py() or 0
    funnel.lengths.update((np.frexp(np.maximum(characters, 1))[1] - 1).tolist())

    bad = table.filter(~kept)
    columns: dict[str, list[str]] = {name: [] for name in REJECTED_COLUMNS}
    for values, row in zip(bad.to_pylist(), rows[~kept].tolist(), strict=True):
        reason, detail = values["reason"], values["detail"]
        if reason is None:
            keeper = int(verdicts.keeper[row])
            exact = verdicts.verdict[row] == EXACT
            reason = "exact_duplicate" if exact else "near_duplicate"
            detail = f"kept instead: {verdicts.identities[keeper].ljust(16, bytes(1)).hex()} {paths[keeper]}"
            if not exact:
                detail += f" ({verdicts.statistics.jaccard_is} Jaccard {verdicts.similarity[row]:.2f})"
        excerpt = values["text"][:EXCERPT_CHARACTERS]
        funnel.reject(reason, values["num_bytes"], values["path"], excerpt, detail)
        line = (values["identity"], source, values["path"], reason, excerpt, detail)
        for name, value in zip(REJECTED_COLUMNS, line, strict=True):
            columns[name].append(value)
    if bad.num_rows:
        rejected.write(pa.table(columns, schema=rejected.schema))
