"""Buckets of a source, of which each is one task later on, and the merge that comes before when there are many.

Partitions x buckets pieces would be too many and too small to read one by one. So a partition's file has at most some 256
row groups, each a range of buckets; a range of several is read from all partitions and written as a file for each bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bessemer.corpus import engine
from bessemer.corpus.partition import WRITE_OPTIONS, Bucket, cuts, rows_by_bucket, rows_of_range
from bessemer.corpus.work import CorpusTask
from bessemer.hashing import digest

MERGED_BYTES = 256 << 20  # rows in memory before they are divided among the files of the buckets


@dataclass(frozen=True)
class MergeRange(CorpusTask):
    """Write the rows of a range from all partitions of its source as a file for each bucket. cleaned: digest of the
    partitions."""

    cleaned: str
    source: str
    number: int
    num_rows: int
    partitions: range  # of the source

    @property
    def size(self) -> int:
        return self.num_rows

    @property
    def folder(self) -> Path:
        return self.work / "merged" / self.source / f"{self.number:06d}"

    @property
    def inputs(self) -> str:
        return digest("merge", self.cleaned)

    def __str__(self) -> str:
        return f"source {self.source}, range {self.number}"

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises BessemerError for missing rows, OSError for a full disk."""
        num_buckets, written = cuts(self.work)[self.source].num_buckets, Counter[int]()
        files: dict[int, pq.ParquetWriter] = {}
        with ExitStack() as opened:
            for table in self._chunks():
                for bucket, rows in rows_by_bucket(table, num_buckets).items():
                    if bucket not in files:
                        writer = pq.ParquetWriter(folder / file_name(bucket), table.schema, **WRITE_OPTIONS)
                        files[bucket] = opened.enter_context(writer)
                    files[bucket].write_table(table.take(rows), row_group_size=len(rows))
                    written[bucket] += len(rows)
        came = f"{self.size} rows were written but {written.total()} came back"
        engine.require(written.total() == self.size, f"{self}: {came}")
        return {"source": self.source, "buckets": sorted(written.items())}

    def _chunks(self) -> Iterator[pa.Table]:
        """The rows of the range as tables of bounded size."""
        tables, num_bytes = list[pa.Table](), 0
        for table in rows_of_range(self.work, self.partitions, self.number):
            tables.append(table)
            num_bytes += table.nbytes
            if num_bytes > MERGED_BYTES:
                yield pa.concat_tables(tables).combine_chunks()
                tables, num_bytes = [], 0
        if tables:
            yield pa.concat_tables(tables).combine_chunks()


def file_name(bucket: int) -> str:
    """Of a bucket in the folder of its range."""
    return f"{bucket:06d}.parquet"


class RangeCounts:
    """Rows of each range and the partitions of each source, summed over receipts one by one: what the driver keeps of them."""

    def __init__(self, work: Path) -> None:
        self.work, self.cuts = work, cuts(work)
        self.rows: dict[str, Counter[int]] = {}
        self.num_bytes: Counter[str] = Counter()  # of the rows of each source in memory
        self.partitions: dict[str, range] = {}

    def add(self, receipt: dict[str, Any]) -> None:
        """Count a partition; they come in their order, in which those of one source follow each other."""
        source, number = receipt["source"], receipt["partition"]
        first = self.partitions.get(source, range(number, number)).start
        self.partitions[source] = range(first, number + 1)
        self.num_bytes[source] += receipt["bytes"]
        counts = self.rows.setdefault(source, Counter())
        for part, rows in receipt["ranges"]:
            counts[part] += rows

    def merges(self, cleaned: str) -> list[MergeRange]:
        """The ranges to merge: those of sources in which they hold several buckets."""
        return [
            MergeRange(self.work, cleaned, source, number, self.rows[source][number], self.partitions[source])
            for source, number in self._ranges()
            if self.cuts[source].range_size > 1
        ]

    def buckets(self, merged: Iterator[tuple[MergeRange, dict[str, Any]]]) -> list[Bucket]:
        """The buckets that have rows, in the order of the published corpus; merged: the ranges with their receipts."""
        found = []
        for task, receipt in merged:
            for number, rows in receipt["buckets"]:
                found.append(Bucket(self.work, task.source, number, rows, None, task.folder / file_name(number)))
        for source, number in self._ranges():
            if self.cuts[source].range_size == 1:
                found.append(Bucket(self.work, source, number, self.rows[source][number], self.partitions[source]))
        found.sort(key=lambda bucket: (bucket.source, bucket.number))
        row_bytes = {source: self.num_bytes[source] / max(rows.total(), 1) for source, rows in self.rows.items()}
        return [
            replace(bucket, place=place, num_bytes=round(bucket.size * row_bytes[bucket.source]))
            for place, bucket in enumerate(found)
        ]

    def _ranges(self) -> list[tuple[str, int]]:
        return [(source, number) for source in sorted(self.rows) for number in sorted(self.rows[source])]
