"""Verdicts of the global steps: which documents are rejected, why, and which characters are cut out of the others.

A step writes one Arrow file per bucket with one row per judged document. A document without a row is kept unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import feather

from bessemer.storage.filesystem import AnyPath

Spans: TypeAlias = "Sequence[tuple[int, int]]"  # character ranges [start, end) of a text, ascending
# `row` is the index of the document among those that the step received, `spans` are cut out of its text, and `score` is a
# value that the step measured.
SCHEMA = pa.schema({
    "row": pa.int64(), "reason": pa.string(), "detail": pa.string(), "spans": pa.list_(pa.list_(pa.int64(), 2)),
    "score": pa.float32(),
})  # fmt: skip


@dataclass(frozen=True)
class VerdictFile:
    """A file with the decisions of a step on the documents of a bucket: rejections, cuts and scores (see SCHEMA).

    Attributes:
        step: Name of the step.
        path: Path of the file.
        prefix: Prefix of the reasons for rejection in the statistics.
    """

    step: str
    path: AnyPath
    prefix: str = ""


def make_verdicts(rows: Iterable[int], **columns: Any) -> pa.Table:
    """Return a table of verdicts (SCHEMA) on the documents `rows`, with the given columns; other columns are null.

    A row with a reason is a rejection.
    """
    number = pa.array(rows, pa.int64())
    table = {field.name: pa.nulls(len(number), field.type) for field in SCHEMA}
    return pa.table(table | {"row": number} | columns).cast(SCHEMA)


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as an Arrow file."""
    feather.write_feather(table, str(path), compression="zstd")


def read_table(path: AnyPath) -> pa.Table:
    """Read the table of an Arrow file from the local disk or an object store."""
    with path.open("rb") as file:
        return feather.read_table(file).combine_chunks()


def apply_verdicts(table: pa.Table, files: Sequence[VerdictFile]) -> pa.Table:
    """Apply verdict files to a table of the documents in a bucket, in the order of the steps that wrote the files.

    It sets `reason` and `detail` of rejected documents and cuts spans out of other texts. The scores of a step become a
    column with its name, NaN for a document without one.
    """
    for file in files:
        verdicts = read_table(file.path)
        rows = np.flatnonzero(pc.is_null(table["reason"]))[verdicts["row"].to_numpy()]
        if verdicts["score"].null_count < len(verdicts):
            scores = np.full(table.num_rows, np.nan, np.float32)
            scores[rows] = verdicts["score"].to_numpy()
            table = table.append_column(file.step, pa.array(scores))
        goes = pc.is_valid(verdicts["reason"]).to_numpy()
        is_cut = ~goes & pc.is_valid(verdicts["spans"]).to_numpy()
        if is_cut.any() and "text" in table.column_names:
            texts, spans = table["text"].take(rows[is_cut]).to_pylist(), verdicts["spans"].filter(is_cut).to_pylist()
            table = set_texts(table, rows[is_cut], [without(*one) for one in zip(texts, spans, strict=True)])
        rejects = verdicts.filter(goes)
        reasons = [full_reason(file.prefix, word) for word in rejects["reason"].to_pylist()]
        table = _set_values(table, rows[goes], reason=reasons, detail=rejects["detail"].fill_null("").to_pylist())
    return table


def full_reason(prefix: str, word: str) -> str:
    """Return the reason of a rejection as statistics show it: "prefix.word", or only one of them if the other is ""."""
    return ".".join(filter(None, (prefix, word)))


def without(text: str, spans: Spans, mask: str = "") -> str:
    """Replace each of the character ranges `spans` of a text by `mask`, by default with nothing."""
    pieces, position = [], 0
    for start, end in spans:
        pieces += [text[position:start], mask]
        position = end
    return "".join([*pieces, text[position:]])


def set_texts(table: pa.Table, rows: np.ndarray, texts: list[str]) -> pa.Table:
    """Return the table with `texts` as the texts of the rows `rows`, which are ascending.

    The column `characters` is updated if the table has it.
    """
    return _set_values(table, rows, text=texts, characters=list(map(len, texts)))


def _set_values(table: pa.Table, rows: np.ndarray, **columns: list[Any]) -> pa.Table:
    mask = np.zeros(table.num_rows, dtype=bool)
    mask[rows] = True
    for name in columns.keys() & set(table.column_names) if len(rows) else ():
        column = table.schema.get_field_index(name)
        field = table.schema.field(column)
        values = pa.array(columns[name], field.type)
        table = table.set_column(
            column, field, pc.replace_with_mask(table[name].combine_chunks(), pa.array(mask), values)
        )
    return table
