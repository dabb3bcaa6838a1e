"""Row groups of Parquet files; whatever is wrong with a row costs that one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bessemer.common.errors import first_line
from bessemer.corpus.document import Document
from bessemer.corpus.readers.encodings import decode, foreign_format, not_utf8
from bessemer.corpus.readers.records import MAX_RECORD_BYTES, no_text, record_of, set_label
from bessemer.recipe import Source
from bessemer.recipe.corpus import text_keys
from bessemer.run_tasks.task import require

BATCH_BYTES = 16 << 20  # of a row group, read at a time
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")  # of Arrow


def parquet_layout(place: Any, head: bytes, source: Source) -> tuple[list[int], str, str, list[str]]:
    """The bytes of each row group of a Parquet file (a path or a seekable stream); where it cannot be read, a reason and a
    detail; and the keys of text_key that it has. `head`: its first bytes. OSError when the file cannot be read."""
    label_key = source.label_key
    if not head.startswith(b"PAR1"):
        return [], "wrong_format", foreign_format(head) or f"not a Parquet file: it begins with {head[:16]!r}", []
    try:
        with pq.ParquetFile(place) as parquet:
            schema, footer = parquet.schema_arrow, parquet.metadata
            groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    except pa.ArrowException as error:
        return [], "unreadable", f"a damaged Parquet file: {first_line(error)}"[:300], []
    types = {field.name: field.type for field in (*_leaves(schema), *schema)}
    names = [field.name for field in _leaves(schema)]
    known = [key for key in text_keys(source.text_key) if key in types]
    if not known:
        return [], "no_text_key", no_text("column", text_keys(source.text_key)[0], names), known
    kind = types[known[0]]
    if not (source.joins_fields or _is_text(kind) or (source.format == "chat" and _holds_messages(kind))):
        fix = 'set text_key to a column of strings, or format = "chat" for conversations'
        return [], "no_text_key", f"column {known[0]!r} holds {kind}"[:200] + f", not text; {fix}", known
    if label_key and label_key not in types:
        said = f"no column {label_key!r}; there are: {', '.join(names)}; set label_key to one of them"
        return [], "no_label", said[:300], known
    return [group.total_byte_size for group in groups], "", "", known


def _leaves(fields: Iterable[Any]) -> Iterator[Any]:
    """Columns, those within structs by their dotted names."""
    for field in fields:
        if pa.types.is_struct(field.type):
            yield from _leaves(field.flatten())
        else:
            yield field


def _holds_messages(kind: Any) -> bool:
    """Whether a column has conversations: lists of messages."""
    inner = getattr(kind, "value_type", None)
    return isinstance(inner, pa.StructType) and not {"role", "from"}.isdisjoint(inner.names)


def _column(table: Any, key: str) -> Any:
    """A column of a table, which may lie within structs; strings as bytes, one of which may not be UTF-8."""
    first, _, rest = key.partition(".")
    column = table[key] if key in table.column_names else pc.struct_field(table[first], rest.split("."))
    kind = _plain(column.type)
    return column.cast(kind).cast(pa.large_binary()) if _is_text(kind) else column.cast(kind)


def _plain(kind: Any) -> Any:
    """The type of the values of a dictionary or an extension."""
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: Any) -> bool:
    return str(_plain(kind)) in TEXT_TYPES


def row_group(place: Any, number: int, size: int, source: Source) -> Iterator[Document]:
    """The rows of one row group of a Parquet file (a path or a seekable stream); `size` is what it takes. Rows behind damage are
    unreadable records. OSError when the file cannot be read.

    Rows are read a few at a time: Arrow cannot build a nested column of over 2 GiB at once.
    """
    is_text = source.format != "chat" and not source.joins_fields
    names = [*text_keys(source.text_key), *([source.label_key] if source.label_key else [])]
    num_rows, row = None, 0
    try:
        with pq.ParquetFile(place) as parquet:
            group = parquet.metadata.row_group(number)
            num_rows = group.num_rows
            at_a_time = min(max(BATCH_BYTES * num_rows // max(group.total_byte_size, 1), 1), max(num_rows, 1))
            for batch in parquet.iter_batches(
                at_a_time, row_groups=[number], columns=None if source.format == "chat" else names
            ):
                for record in (_text_records if is_text else _object_records)(batch, number, row, source):
                    yield record
                    row += 1
    except (pa.ArrowException, OSError) as error:  # OSError: Arrow's too for bytes that cannot be decompressed
        if num_rows is None:
            raise OSError(f"damaged row group {number}: {error}"[:300]) from error
        detail = f"damaged row group {number} of {num_rows} rows: {error}"[:300]
        for lost in range(row, num_rows):
            num_bytes = size * (lost + 1) // num_rows - size * lost // num_rows
            yield Document(f"{number}:{lost}", num_bytes, reason="unreadable", detail=detail)
        row = num_rows
    require(row == num_rows, f"row group {number} has {num_rows} rows, but {row} were read")


def _text_records(batch: Any, number: int, first: int, source: Source) -> Iterator[Document]:
    """The rows of a batch as text. Raises pa.ArrowException for values that are damaged."""
    table = pa.Table.from_batches([batch])
    (text_key,) = text_keys(source.text_key)
    texts = _column(table, text_key)
    in_json = [one.name for one in batch.schema if getattr(one.type, "extension_name", "") == "arrow.json"]
    labels = _column(table, source.label_key).to_pylist() if source.label_key else []
    for at, cell in enumerate(value for chunk in texts.chunks for value in chunk):
        key, raw = f"{number}:{first + at}", cell.as_py()
        if raw is None or len(raw) > MAX_RECORD_BYTES:
            problem = f"column {text_key!r} is null" if raw is None else f"a text of {len(raw)} bytes"
            yield Document(key, len(raw or b""), reason="bad_record", detail=problem)
            continue
        try:
            text = decode(raw, source.encoding or "")
        except UnicodeDecodeError as error:
            yield not_utf8(key, raw, error)
            continue
        if text_key in in_json and text[:1] == '"':
            with suppress(ValueError):
                text = json.loads(text)
        record = Document(key, len(raw), text, metadata={"row_group": number, "row": first + at})
        if source.label_key:
            label = labels[at].decode("utf-8", "replace") if isinstance(labels[at], bytes) else labels[at]
            set_label(record, f"column {source.label_key!r}", label)
        yield record


def _object_records(batch: Any, number: int, first: int, source: Source) -> Iterator[Document]:
    """The rows of a batch as objects."""
    for at in range(batch.num_rows):
        key, place = f"{number}:{first + at}", dict[str, object](row_group=number, row=first + at)
        try:
            value = _without_nulls(batch.slice(at, 1).to_pylist()[0])
        except UnicodeDecodeError as error:
            yield not_utf8(key, error.object, error)
            continue
        shown = json.dumps(value, ensure_ascii=False, default=str)
        yield record_of(value, key, len(shown), shown, place, source)


def _without_nulls(value: Any) -> Any:
    """A value without the fields that a struct has only because other rows have them."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value
