"""Units to records, by format. Whatever is wrong with a record costs that record, which is then counted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from bessemer.corpus import extract
from bessemer.corpus.document import Record
from bessemer.corpus.files import TOPICS
from bessemer.corpus.units import MAX_RECORD_BYTES, Piece, Unit
from bessemer.recipe import Rules

MAX_FIELD_CHARACTERS = 200
MAX_FIELDS = 16
"""Other fields of a JSONL record that go into `metadata`: so many, each no longer than this."""

MAX_HTML_BYTES = 8 << 20
"""A longer page is rejected unread (too_long): it would take the parser more than about a second. Common
Crawl cuts pages at 5 MiB."""


def read(unit: Unit, rules: Rules) -> Iterator[tuple[Piece, Record]]:
    """The records of a unit with the piece each comes from. Never raises for what is in the data."""
    for piece in unit.pieces:
        try:
            for record in _read_piece(unit, piece, rules):
                record.label = record.label or unit.label
                yield piece, record
        except OSError as error:
            detail = error.strerror or str(error)
            yield piece, Record(f"{piece.start}!", 0, reason="unreadable", detail=detail)


def _read_piece(unit: Unit, piece: Piece, rules: Rules) -> Iterator[Record]:
    if piece.damage:
        reason = "unreadable" if unit.format == "parquet" else "bad_record"
        yield Record(f"{piece.start}!", piece.size, reason=reason, detail=piece.damage)
    elif unit.format == "jsonl":
        yield from _jsonl(piece, unit.text_key, unit.label_key)
    elif unit.format == "parquet":
        yield from _parquet(piece, unit.text_key, unit.label_key)
    else:
        # A character takes at most 4 bytes: with more than this no file could pass the rule on its length.
        limit = max(MAX_RECORD_BYTES, 4 * rules.max_characters)
        if unit.format == "html":
            limit = MAX_HTML_BYTES
        with open(piece.path, "rb") as file:
            raw = file.read(limit + 1)
        if len(raw) > limit:
            yield Record("", piece.size, reason="too_long", detail=f"{piece.size} bytes")
        elif unit.format == "html":
            yield _text(raw, extract.decode_html, extract.main_content)
        elif unit.format == "descriptions" and piece.name.endswith(TOPICS):
            yield from _topics(raw)
        elif unit.format == "descriptions" and piece.name.endswith("METADATA"):
            yield _text(raw, bytes.decode, extract.description)
        else:
            yield _text(raw, bytes.decode, str)


def _text(raw: bytes, decode: Callable[[bytes], str], extracted: Callable[[str], str]) -> Record:
    """A whole file as one record."""
    try:
        return Record("", len(raw), extracted(decode(raw)))
    except UnicodeDecodeError as error:
        return _not_utf8("", raw, error)
    except extract.NotText as error:
        return Record("", len(raw), reason="bad_record", detail=str(error))
    except Exception as error:  # a parser of foreign code on foreign data: any failure is this document's
        return Record("", len(raw), reason="bad_record", detail=f"{type(error).__name__}: {error}"[:300])


def _not_utf8(key: str, raw: bytes, error: UnicodeDecodeError) -> Record:
    detail = f"byte 0x{raw[error.start]:02x} at {error.start}"
    return Record(key, len(raw), raw[:4000].decode("utf-8", "replace"), reason="not_utf8", detail=detail)


def _topics(raw: bytes) -> Iterator[Record]:
    try:
        found = extract.topics(raw.decode())
    except UnicodeDecodeError as error:
        yield _not_utf8("", raw, error)
    except extract.NotText as error:
        yield Record("", len(raw), reason="bad_record", detail=str(error))
    else:
        for name, text in found.items():
            yield Record(name, len(text.encode("utf-8", "surrogatepass")), text, metadata={"topic": name})


def _jsonl(piece: Piece, text_key: str, label_key: str) -> Iterator[Record]:
    """Lines that begin within the range; decoded one by one, so that a bad byte costs one line."""
    with open(piece.path, "rb") as file:
        position = piece.start
        if position:  # the line that crosses into the range belongs to the range before
            file.seek(position - 1)
            position += _skip_line(file) - 1
        while position < piece.end:
            key = str(piece.offset + position)
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
        return _not_utf8(key, line, error)
    try:
        value = json.loads(shown)
    except (ValueError, RecursionError) as error:  # RecursionError: JSON nested thousands deep
        return Record(key, len(line), shown[:4000], "bad_record", f"not JSON: {error}"[:300])
    if not isinstance(value, dict):
        return Record(key, len(line), shown[:4000], "bad_record", f"not an object but {type(value).__name__}")
    text = value.pop(text_key, None)
    if not isinstance(text, str):
        detail = f"no field {text_key!r}; there are: {', '.join(list(value)[:20])}"
        if text is not None:
            detail = f"field {text_key!r} is {type(text).__name__}, not a string"
        return Record(key, len(line), shown[:4000], "bad_record", detail[:300])
    record = Record(key, len(line), text, metadata={"byte": int(key), **_small(value)})
    if label_key:
        _set_label(record, f"field {label_key!r}", value.get(label_key))
    return record


def _set_label(record: Record, where: str, value: object) -> None:
    """Give a record its class: a string, a whole number or a truth value; with anything else it is rejected."""
    plain = isinstance(value, str | int)
    label = str(value).strip() if plain else ""
    if label and len(label) <= MAX_FIELD_CHARACTERS and label.isprintable():
        record.label = label
        return
    kind = "missing" if value is None else type(value).__name__ if not plain else "empty" if not label else "too long"
    record.reason, record.detail = "bad_record", f"{where}: no label ({kind})"


def _small(fields: dict[str, object]) -> dict[str, object]:
    """The fields worth carrying along: short strings and plain numbers."""
    kept: dict[str, object] = {}
    for name, value in fields.items():
        small = isinstance(value, str) and len(value) <= MAX_FIELD_CHARACTERS
        small = small or (isinstance(value, float) and math.isfinite(value))
        small = small or (isinstance(value, int) and abs(value) < 1 << 63)
        if small and name != "byte" and len(name) <= MAX_FIELD_CHARACTERS and len(kept) < MAX_FIELDS:
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


def _parquet(piece: Piece, text_key: str, label_key: str) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(piece.path) as parquet:
            table = parquet.read_row_group(piece.start, columns=[text_key, *([label_key] if label_key else [])])
        column, labels = table.column(text_key), _values(table.column(label_key)) if label_key else []
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        # As bytes: a string column with one bad byte would otherwise fail as a whole.
        column = column.cast(pa.large_binary())
    except pa.ArrowException as error:
        yield Record(f"{piece.start}!", piece.size, reason="unreadable", detail=f"damaged row group: {error}"[:300])
        return
    for row, cell in enumerate(value for chunk in column.chunks for value in chunk):
        key, raw = f"{piece.start}:{row}", cell.as_py()
        if raw is None:
            yield Record(key, 0, reason="bad_record", detail=f"column {text_key!r} is null")
        elif len(raw) > MAX_RECORD_BYTES:
            yield Record(key, len(raw), reason="bad_record", detail=f"a text of {len(raw)} bytes")
        else:
            try:
                record = Record(key, len(raw), raw.decode(), metadata={"row_group": piece.start, "row": row})
            except UnicodeDecodeError as error:
                record = _not_utf8(key, raw, error)
            else:
                if label_key:
                    _set_label(record, f"column {label_key!r}", labels[row])
            yield record
