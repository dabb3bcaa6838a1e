"""Records of JSONL and Parquet files; whatever is wrong with one costs that one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from bessemer.corpus.document import Record
from bessemer.corpus.first_bytes import foreign_format

MAX_RECORD_BYTES = 64 << 20
"""A longer record is rejected unread: no model reads one that long, and it must fit in memory."""

MAX_FIELD_CHARACTERS = 200
MAX_FIELDS = 16
"""Other fields of a JSONL record that go into `metadata`: so many, each no longer than this."""


TEXT_KEYS = ("text", "content", "body", "raw_content", "document", "article", "passage", "story", "abstract", "message")
"""Names under which data sets often keep their text, the likeliest first."""


def not_utf8(key: str, raw: bytes, error: UnicodeDecodeError) -> Record:
    detail = f"byte 0x{raw[error.start]:02x} at {error.start}"
    return Record(key, len(raw), raw[:4000].decode("utf-8", "replace"), reason="not_utf8", detail=detail)


def jsonl(file: BinaryIO, start: int, end: int, offset: int, text_key: str, label_key: str = "") -> Iterator[Record]:
    """Lines that begin in [start, end), decoded one by one, so that a bad byte costs one line; `offset` is added
    to the byte offsets that are their keys. OSError when the file cannot be read."""
    position = start
    if position:  # the line that crosses into the range belongs to the range before
        file.seek(position - 1)
        position += _skip_line(file) - 1
    while position < end:
        key = str(offset + position)
        line = file.readline(MAX_RECORD_BYTES + 1)
        if not line:
            return
        position += len(line)
        if len(line) > MAX_RECORD_BYTES and not line.endswith(b"\n"):
            skipped = _skip_line(file)
            position += skipped
            detail = f"a line of {len(line) + skipped} bytes"
            yield Record(key, len(line) + skipped, reason="bad_record", detail=detail)
        elif line.strip():
            yield _json_line(line, key, text_key, label_key)


def _skip_line(file: BinaryIO) -> int:
    """Go to the next line without holding this one; the bytes skipped."""
    skipped = 0
    while part := file.readline(1 << 20):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _json_line(line: bytes, key: str, text_key: str, label_key: str) -> Record:
    try:
        shown = line.decode("utf-8-sig" if key == "0" else "utf-8")
    except UnicodeDecodeError as error:
        return not_utf8(key, line, error)
    try:
        value = json.loads(shown)
    except (ValueError, RecursionError) as error:  # RecursionError: JSON nested thousands deep
        return Record(key, len(line), shown[:4000], "bad_record", f"not JSON: {error}"[:300])
    return record_of(value, key, len(line), shown, {"byte": int(key)}, text_key, label_key)


def record_of(
    value: object, key: str, size: int, shown: str, place: dict[str, object], text_key: str, label_key: str
) -> Record:
    """A JSON value as a record: the text under `text_key`, the small fields as metadata beside `place`; or with the
    reason why it is none. `size` is in bytes, `shown` its source text."""
    if not isinstance(value, dict):
        return Record(key, size, shown[:4000], "bad_record", f"not an object but {type(value).__name__}")
    if text_key not in value:
        return Record(key, size, shown[:4000], "no_text_key", no_text("field", text_key, value))
    text = value.pop(text_key)
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        return Record(key, size, shown[:4000], "bad_record", f"field {text_key!r} is {kind}, not a string"[:300])
    record = Record(key, size, text, metadata={**place, **_small(value, place)})
    if label_key:
        _set_label(record, f"field {label_key!r}", value.get(label_key))
    return record


def no_text(kind: str, text_key: str, fields: Mapping[str, object]) -> str:
    """That a field or column (`kind`) is missing, which there are (names and values), and which to name instead."""
    names = ", ".join(list(fields)[:20]) or "none"
    texts = [name for name, value in fields.items() if isinstance(value, str)]
    likely = next((name for name in TEXT_KEYS if name in texts), None)
    likely = likely or max(texts, key=lambda name: len(str(fields[name])), default=None)
    fix = f'; set text_key = "{likely}"' if likely else ""
    return f"no {kind} {text_key!r}; there are: {names}"[: 280 - len(fix)] + fix


def _set_label(record: Record, where: str, value: object) -> None:
    """Give a record its class: a string, a whole number or a truth value; with anything else it is rejected."""
    plain = isinstance(value, str | int)
    label = str(value).strip() if plain else ""
    if label and len(label) <= MAX_FIELD_CHARACTERS and label.isprintable():
        record.label = label
        return
    kind = "missing" if value is None else type(value).__name__ if not plain else "empty" if not label else "too long"
    record.reason, record.detail = "bad_record", f"{where}: no label ({kind})"


def _small(fields: dict[str, object], place: dict[str, object]) -> dict[str, object]:
    """The fields worth carrying along: short strings and plain numbers, under names that `place` does not have."""
    kept: dict[str, object] = {}
    for name, value in fields.items():
        small = isinstance(value, str) and len(value) <= MAX_FIELD_CHARACTERS
        small = small or (isinstance(value, float) and math.isfinite(value))
        small = small or (isinstance(value, int) and abs(value) < 1 << 63)
        if small and name not in place and len(name) <= MAX_FIELD_CHARACTERS and len(kept) < MAX_FIELDS:
            kept[name] = value
    return kept


def _values(column: Any) -> list[object]:
    """The values of a Parquet column; a string that is not UTF-8 costs that value, not the column."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return list(column.to_pylist())
    raw = column.cast(pa.large_binary()).to_pylist()
    return [None if value is None else value.decode("utf-8", "replace") for value in raw]


def parquet_layout(place: Any, head: bytes, text_key: str, label_key: str) -> tuple[list[int], str, str]:
    """The bytes of each row group of a Parquet file (a path or a seekable stream); and, where it cannot be read, a reason
    and a detail. `head`: its first bytes. OSError when the file cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not head.startswith(b"PAR1"):
        return [], "wrong_format", foreign_format(head) or f"not a Parquet file: it begins with {head[:16]!r}"
    try:
        with pq.ParquetFile(place) as parquet:
            schema, footer = parquet.schema_arrow, parquet.metadata
            groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    except pa.ArrowException as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return [], "unreadable", f"a damaged Parquet file: {first}"[:300]
    strings = {field.name: "" for field in schema if _is_text(field.type)}
    if text_key not in schema.names:
        fields = {name: strings.get(name) for name in schema.names}
        sizes = {name: _column_bytes(groups, name) for name in strings}
        largest = max(sizes, key=lambda name: sizes[name], default="")
        return [], "no_text_key", no_text("column", text_key, {**fields, **({largest: "*"} if largest else {})})
    if text_key not in strings:
        fix = f"set text_key to a column of strings ({', '.join(strings) or 'there is none'})"
        return [], "no_text_key", f"column {text_key!r} holds {schema.field(text_key).type}, not text; {fix}"[:300]
    if label_key and label_key not in schema.names:
        names = ", ".join(schema.names)
        return [], "no_text_key", f"no column {label_key!r}; there are: {names}; set label_key to one of them"[:300]
    return [group.total_byte_size for group in groups], "", ""


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)


def _column_bytes(groups: list[Any], name: str) -> int:
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == name)


def row_group(place: Any, number: int, size: int, text_key: str, label_key: str = "") -> Iterator[Record]:
    """The rows of one row group of a Parquet file (a path or a seekable stream); `size` is what it takes, for the
    count when all of it is damaged. OSError when the file cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(place) as parquet:
            table = parquet.read_row_group(number, columns=[text_key, *([label_key] if label_key else [])])
        column, labels = table.column(text_key), _values(table.column(label_key)) if label_key else []
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        # As bytes: a string column with one bad byte would otherwise fail as a whole.
        column = column.cast(pa.large_binary())
    except pa.ArrowException as error:
        yield Record(f"{number}!", size, reason="unreadable", detail=f"damaged row group: {error}"[:300])
        return
    for row, cell in enumerate(value for chunk in column.chunks for value in chunk):
        key, raw = f"{number}:{row}", cell.as_py()
        if raw is None:
            yield Record(key, 0, reason="bad_record", detail=f"column {text_key!r} is null")
        elif len(raw) > MAX_RECORD_BYTES:
            yield Record(key, len(raw), reason="bad_record", detail=f"a text of {len(raw)} bytes")
        else:
            try:
                record = Record(key, len(raw), raw.decode(), metadata={"row_group": number, "row": row})
            except UnicodeDecodeError as error:
                record = not_utf8(key, raw, error)
            else:
                if label_key:
                    _set_label(record, f"column {label_key!r}", labels[row])
            yield record
