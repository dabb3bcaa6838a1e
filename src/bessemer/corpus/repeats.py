"""Repeated paragraphs and spans, cut out of the documents that stay: a step over the whole corpus, with a receipt.

repeats/texts.parquet   identity, text: documents that lost something, a row group for each bucket that has some
repeats/stage.json      the receipt: which row group is which bucket's, and the counts
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus.dedup import Edit, EditStatistics, earlier_files, parquet_tables
from bessemer.corpus.passed import Passed
from bessemer.corpus.work import made, receipt
from bessemer.recipe import Dedup

if TYPE_CHECKING:
    import pyarrow as pa

TEXTS = "texts.parquet"


def wanted(settings: Dedup) -> bool:
    """Whether the recipe asks for any of it."""
    return settings.paragraphs.mode != "off" or settings.substrings.unit != "off"


def cut_repeats(passed: Passed, settings: Dedup, inputs: str) -> dict[str, Any]:
    """Cut repeats out of all documents that stay, unless that is done; gives the receipt."""
    folder = passed.work / "repeats"
    done = receipt(folder, inputs) if folder.exists() else None
    if done is None:
        facts: dict[str, Any] = {}
        with made(folder, inputs, facts) as staged:
            facts |= _cut(passed, settings, staged)
        done = receipt(folder, inputs)
    assert done is not None
    return done


def _cut(passed: Passed, settings: Dedup, staged: Path) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    texts: Any = passed
    groups: list[list[Any]] = []
    if settings.paragraphs.mode != "off":
        statistics = EditStatistics()
        groups = _write(passed, _paragraphs(passed, settings), staged / TEXTS, statistics)
        counts["paragraphs"] = statistics.to_json()
        texts = _Edited(passed, staged / TEXTS, {(group[0], group[1]): number for number, group in enumerate(groups)})
    if settings.substrings.unit != "off":
        from bessemer.corpus.dedup.substrings import remove_substrings

        statistics = EditStatistics()
        edited = remove_substrings(texts, settings.substrings, staged / "scratch", ("identity", "text"))
        second = staged / f"new-{TEXTS}"
        groups = _write(passed, edited, second, statistics, before=texts if texts is not passed else None)
        second.replace(staged / TEXTS)
        counts["substrings"] = statistics.to_json()
    return {"groups": groups, "counts": counts}


def _paragraphs(passed: Passed, settings: Dedup) -> Iterator[tuple[pa.Table, list[Edit]]]:
    import pyarrow.compute as pc

    from bessemer.corpus.dedup.paragraphs import insert_paragraphs, paragraph_filter, remove_paragraphs

    earlier = [parquet_tables(earlier_files(folder)) for folder in settings.against]
    words = sum(pc.sum(table["words"]).as_py() or 0 for table in passed(["words"]))
    for read in earlier:
        words += sum(text.count(" ") + 1 for table in read(["text"]) for text in table["text"].to_pylist())
    bloom = paragraph_filter(words, settings.paragraphs)
    for read in earlier:
        insert_paragraphs(read(["text"]), bloom, settings.paragraphs)
    yield from remove_paragraphs(passed(["identity", "text"]), bloom, settings.paragraphs)


class _Edited:
    """Documents with the texts that an earlier pass left them."""

    def __init__(self, passed: Passed, path: Path, groups: dict[tuple[str, int], int]) -> None:
        self.passed, self.path, self.groups = passed, path, groups

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        for bucket in self.passed.buckets:
            table = self.passed.bucket(bucket, list({*columns, "identity"}))
            if table.num_rows:
                yield with_new_texts(table, self.new(bucket)).select(list(columns))

    def new(self, bucket: dict[str, Any]) -> dict[str, str]:
        """The edited texts of a bucket by identity."""
        return read_group(self.path, self.groups.get((bucket["source"], bucket["bucket"])))


def read_group(path: Path, group: int | None) -> dict[str, str]:
    """The edited texts in a row group, by identity; none where there is no group."""
    import pyarrow.parquet as pq

    if group is None:
        return {}
    with pq.ParquetFile(path) as file:
        table = file.read_row_group(group)
    return dict(zip(table["identity"].to_pylist(), table["text"].to_pylist(), strict=True))


def with_new_texts(table: pa.Table, new: dict[str, str]) -> pa.Table:
    """A table with identity, and text where that was asked for: the texts replaced where there are new ones."""
    import pyarrow as pa

    if not new or "text" not in table.column_names:
        return table
    pairs = zip(table["identity"].to_pylist(), table["text"].to_pylist(), strict=True)
    texts = [new.get(name, text) for name, text in pairs]
    return table.set_column(table.column_names.index("text"), "text", pa.array(texts, table.schema.field("text").type))


def _write(
    passed: Passed,
    edited: Iterable[tuple[pa.Table, list[Edit]]],
    path: Path,
    statistics: EditStatistics,
    before: _Edited | None = None,
) -> list[list[Any]]:
    """Write the documents that lost something, of this pass or of the one before; gives [source, bucket] by row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("identity", pa.string()), ("text", pa.large_string())])
    groups: list[list[Any]] = []
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        # One table comes for each bucket that has documents.
        there = (bucket for bucket in passed.buckets if passed.bucket(bucket, ["identity"]).num_rows)
        for bucket, (table, edits) in zip(there, edited, strict=True):
            statistics.add(table, edits)
            new = before.new(bucket) if before is not None else {}
            names, texts = table["identity"].to_pylist(), table["text"]
            new |= {names[edit.row]: texts[edit.row].as_py() for edit in edits}
            if new:
                chosen = sorted(new)
                file.write_table(pa.table({"identity": chosen, "text": [new[name] for name in chosen]}, schema=schema))
                groups.append([bucket["source"], bucket["bucket"]])
    return groups
