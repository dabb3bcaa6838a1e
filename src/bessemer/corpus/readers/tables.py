"""Records of JSONL and Parquet files; whatever is wrong with one costs that one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bessemer.common.errors import first_line
from bessemer.corpus.conversation import conversation, pair
from bessemer.corpus.document import Document
from bessemer.corpus.readers.encodings import decode, detected, foreign_format
from bessemer.recipe import Source
from bessemer.recipe.corpus import FIELD, text_keys
from bessemer.run_tasks.task import require

# a longer record is rejected unread: no model reads one that long, and it must fit in memory
MAX_RECORD_BYTES = 64 << 20
GUESSED_BYTES = 1 << 16  # the beginning of a file that its encoding is guessed from
MAX_FIELD_CHARACTERS = 200
MAX_FIELDS = 16  # other fields of a JSONL record that go into `metadata`: so many, each no longer than this


BATCH_BYTES = 16 << 20  # of a row group, read at a time
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")  # of Arrow
MAX_DEPTH = 4  # of nested objects whose fields are named in messages


def not_utf8(key: str, raw: bytes, error: UnicodeDecodeError) -> Document:
    """A record whose bytes could not be decoded, with the encoding that they look like."""
    detail = f"byte 0x{raw[error.start]:02x} at {error.start}"
    head = raw[:4000].decode("utf-8", "replace")
    if error.encoding != "utf-8":
        detail = f"not {error.encoding}: {detail}"
    elif (nul := raw[:GUESSED_BYTES].find(0)) >= 0:
        return Document(key, len(raw), head, reason="binary", detail=f"a NUL at byte {nul}, and {detail}")
    elif (likely := detected(raw[:GUESSED_BYTES])) not in (None, "utf-8"):
        detail += f"; probably {likely}"
    return Document(key, len(raw), head, reason="not_utf8", detail=detail)


def jsonl(file: BinaryIO, start: int, end: int | None, source: Source) -> Iterator[Document]:
    """Lines that begin in [start, end) (None: all), decoded one by one, so that a bad byte costs one line; their byte offsets
    are their keys. OSError when the file cannot be read."""
    position = start
    if position:  # the line that crosses into the range belongs to the range before
        file.seek(position - 1)
        position += _skip_line(file) - 1
    while end is None or position < end:
        key = str(position)
        line = file.readline(MAX_RECORD_BYTES + 1)
        if not line:
            return
        size = len(line)
        if size > MAX_RECORD_BYTES and not line.endswith(b"\n"):
            size += _skip_line(file)
            yield Document(key, size, reason="bad_record", detail=f"a line of {size} bytes")
        elif line.strip():
            yield _json_line(line, key, source)
        position += size


def _skip_line(file: BinaryIO) -> int:
    """Go to the next line without holding this one; the bytes skipped."""
    skipped = 0
    while part := file.readline(1 << 20):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _json_line(line: bytes, key: str, source: Source) -> Document:
    try:
        shown = decode(line, source.encoding or "")
        shown = shown.removeprefix("\ufeff") if key == "0" else shown
    except UnicodeDecodeError as error:
        return not_utf8(key, line, error)
    try:
        value = json.loads(shown.rstrip().removesuffix(","))  # as the elements of an array are written, one a line
    except (ValueError, RecursionError) as error:  # RecursionError: JSON nested thousands deep
        return Document(key, len(line), shown[:4000], "bad_record", f"not JSON: {error}"[:300])
    return record_of(value, key, len(line), shown, {"byte": int(key)}, source)


def record_of(value: object, key: str, size: int, shown: str, place: dict[str, object], source: Source) -> Document:
    """A JSON value as a record: the text, the small fields as metadata beside `place`; or with the reason why it is
    none. `size` is in bytes, `shown` its source text."""
    if not isinstance(value, dict):
        return Document(key, size, shown[:4000], "bad_record", f"not an object but {type(value).__name__}")
    keys = text_keys(source.text_key)
    found = [field_in(value, one) for one in keys]
    holder, name = next((field for field in found if field[0] is not None), (None, ""))
    if holder is None:
        return Document(key, size, shown[:4000], "no_text_key", no_text("field", keys[0], named(value)))
    text = _joined([fields and fields[of] for fields, of in found], source) if source.joins_fields else holder.pop(name)
    if source.format == "chat":
        try:
            if isinstance(text, str) and source.pair_keys is None:  # JSON within the JSON, or in a column of strings
                text = json.loads(text)
            if source.pair_keys is not None:
                asked = (field_in(value, of) for of in source.pair_keys[:-1])
                text = pair([None if there is None else there[inner] for there, inner in asked], text)
            rest = {name: one for name, one in {**value, **holder}.items() if name not in (source.pair_keys or ())}
            text = conversation(text, rest)
        except (ValueError, TypeError, RecursionError) as error:  # TypeError: a date of Parquet
            said = f"field {', '.join(source.pair_keys or keys)!r}: {error}"
            return Document(key, size, shown[:4000], "bad_record", said[:300])
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        return Document(
            key, size, shown[:4000], "bad_record", f"field {source.text_key!r} is {kind}, not a string"[:300]
        )
    record = Document(key, size, text, metadata={**place, **_small(value, place)})
    if source.label_key:
        labelled, name = field_in(value, source.label_key)
        _set_label(record, f"field {source.label_key!r}", labelled[name] if labelled else None)
    return record


def _joined(values: list[object], source: Source) -> object:
    """The text of several fields: those of a list, without empty ones, with an empty line between them, or a template filled in;
    or a value that is no text."""
    if isinstance(source.text_key, str):
        strange = [value for value in values if not isinstance(value, str | int | float)]
        return strange[0] if strange else FIELD.sub(lambda _: str(values.pop(0)), source.text_key)
    strange = [value for value in values if not isinstance(value, str | None)]
    return strange[0] if strange else "\n\n".join(value for value in values if isinstance(value, str) and value.strip())


def field_in(value: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    """The object that holds a field, and the field's name there: a dot in `key` leads into an object, unless a field
    bears the whole name. None where there is no such field."""
    if key in value:
        return value, key
    first, dot, rest = key.partition(".")
    inner = value.get(first)
    return field_in(inner, rest) if dot and isinstance(inner, dict) else (None, key)


def named(fields: Mapping[str, object], depth: int = MAX_DEPTH) -> Iterator[str]:
    """The names under which a recipe can ask for fields, those of nested objects in the place of the objects."""
    for name, value in fields.items():
        if depth > 1 and isinstance(value, dict) and value:
            yield from (f"{name}.{inner}" for inner in named(value, depth - 1))
        else:
            yield name


def no_text(kind: str, text_key: str, names: Iterable[str]) -> str:
    """That a field or column (`kind`) is missing, which there are, and what to do."""
    fix = '; set text_key to the one of the text (of conversations with format = "chat"), or exclude the file'
    return f"no {kind} {text_key!r}; there are: {', '.join([*names][:20]) or 'none'}"[: 280 - len(fix)] + fix


def _set_label(record: Document, where: str, value: object) -> None:
    """Give a record its class: a string, a whole number or a truth value; with anything else it is rejected."""
    plain = isinstance(value, str | int)
    label = str(value).strip() if plain else ""
    if label and len(label) <= MAX_FIELD_CHARACTERS and label.isprintable():
        record.label = label
        return
    kind = "missing" if value is None else type(value).__name__ if not plain else "empty" if not label else "too long"
    record.reason, record.detail = "no_label", f"{where}: no label ({kind})"[:300]


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
            _set_label(record, f"column {source.label_key!r}", label)
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
