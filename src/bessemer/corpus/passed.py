"""The documents that are still in, for the steps over the whole corpus: in canonical order, one bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus import engine
from bessemer.corpus.dedup import KEPT, Verdicts
from bessemer.corpus.partition import partition_folder
from bessemer.errors import BessemerError

if TYPE_CHECKING:
    import pyarrow as pa

    from bessemer.corpus.quality.classify import Judgement


def buckets_of(receipts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The buckets of each source that have rows, in the order of the published corpus: {source, bucket, pieces}.

    receipts: of all partitions; a piece is [partition, row group, rows].
    """
    pieces: dict[tuple[str, int], list[list[int]]] = {}
    for given in receipts:
        for group, (bucket, rows) in enumerate(given["buckets"]):
            pieces.setdefault((given["source"], bucket), []).append([given["partition"], group, rows])
    return [{"source": source, "bucket": bucket, "pieces": pieces[source, bucket]} for source, bucket in sorted(pieces)]


def bucket_rows(work: Path, bucket: dict[str, Any], columns: Sequence[str]) -> pa.Table:
    """The rows of a bucket from all partitions, sorted by identity, which is among the columns.

    Raises BessemerError for rows that went missing.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for partition, group, _ in bucket["pieces"]:
        engine.check_stop()
        with pq.ParquetFile(partition_folder(work, partition) / "rows.parquet") as file:
            wanted = [name for name in columns if name in file.schema_arrow.names]
            tables.append(file.read_row_group(group, columns=wanted))
    table = pa.concat_tables(tables)
    expected = sum(rows for _, _, rows in bucket["pieces"])
    if table.num_rows != expected:
        raise BessemerError(
            f"corpus: source {bucket['source']}, bucket {bucket['bucket']}: {expected} rows were written but "
            f"{table.num_rows} came back; nothing was written; please report this"
        )
    return table.sort_by("identity")


@dataclass(frozen=True)
class Passed:
    """Called with names of columns, it gives the documents as tables, anew at every call and each time in the same
    order: by source and identity. A column `quality` is there when the documents have scores."""

    work: Path
    buckets: list[dict[str, Any]]
    quality: Judgement | None = None
    verdicts: Verdicts | None = None

    def after(self, *, quality: Judgement | None = None, verdicts: Verdicts | None = None) -> Passed:
        """Those that also passed another step."""
        return replace(self, quality=quality or self.quality, verdicts=verdicts or self.verdicts)

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        for bucket in self.buckets:
            table = self.bucket(bucket, columns)
            if table.num_rows:
                yield table

    def bucket(self, bucket: dict[str, Any], columns: Sequence[str]) -> pa.Table:
        """The documents of one bucket."""
        import pyarrow as pa
        import pyarrow.compute as pc

        table = bucket_rows(self.work, bucket, sorted({*columns, "identity", "reason"} - {"source", "quality"}))
        table = table.filter(pc.is_null(table["reason"]))
        if self.quality is not None:
            rows = self.quality.rows(table["identity"].to_pylist())
            stays = self.quality.stays[rows]
            table = table.append_column("quality", pa.array(self.quality.scores[rows])).filter(pa.array(stays))
        if self.verdicts is not None:
            kept = self.verdicts.verdict[self.verdicts.rows(table["identity"].to_pylist())] == KEPT
            table = table.filter(pa.array(kept))
        if "source" in columns:
            table = table.append_column("source", pa.array([bucket["source"]] * table.num_rows, pa.large_string()))
        return table.select([name for name in columns if name in table.column_names])
