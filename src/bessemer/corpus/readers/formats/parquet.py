"""Parquet files: a row is a document, and a row group a part. A problem with a row affects only that row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from bessemer.common.errors import first_line
from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import File, Part, Reader
from bessemer.corpus.readers.encodings import decode, foreign_format, not_utf8
from bessemer.corpus.readers.records import no_text, record_of
from bessemer.recipe.corpus import text_keys
from bessemer.storage import filesystem

BATCH_BYTES = 16 << 20  # size of the rows to read at a time
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")  # Arrow types of text


class ParquetReader(Reader):
    """A reader of Parquet files: a row is a document, and a row group a part."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")
    is_compressible = False  # the format has its own compression
    has_fields = True
    has_encoding = True

    def split(self, file: File) -> Iterable[Part]:
        """Return one part per row group, or one part with the reason why the file cannot be read."""
        head = self.head(file)
        if not head.startswith(b"PAR1"):
            detail = foreign_format(head) or f"not a Parquet file: it begins with {head[:16]!r}"
            return [self.part(file, damage=detail, reason="wrong_format")]
        with self._open_table(file) as table:
            reason, detail = self._judge(table.schema_arrow)
            groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
        if reason:
            return [self.part(file, damage=detail, reason=reason)]
        return [self.part(file, number, number + 1, group.total_byte_size) for number, group in enumerate(groups)]

    @contextmanager
    def _open_table(self, part: Part | File) -> Iterator[Any]:
        """Open a Parquet file. Raises OSError for damaged data."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            # Arrow maps a local file into memory.
            with self.open(part) as stream:
                source = stream if filesystem.is_remote(part.path) else part.path
                with pq.ParquetFile(source) as table:
                    yield table
        except pa.ArrowException as error:
            raise OSError(f"damaged Parquet data: {first_line(error)}") from error

    def _judge(self, schema: Any) -> tuple[str, str]:
        """Return the reason and detail why a file with this schema cannot be read; two empty strings if it can."""
        source, keys, leaves = self.context.source, text_keys(self.context.source.text_key), [*_leaves(schema)]
        types = {field.name: field.type for field in (*leaves, *schema)}
        names = [field.name for field in leaves]
        known = [key for key in keys if key in types]
        self.context.keys.update(known)
        if not known:
            return "no_text_key", no_text("column", keys[0], names)
        kind = types[known[0]]
        if not (source.joins_fields or source.format == "chat" or _is_text(kind)):
            fix = 'set text_key to a column of strings, or format = "chat" for conversations'
            return "no_text_key", f"column {known[0]!r} holds {kind}"[:200] + f", not text; {fix}"
        if source.label_key and source.label_key not in types:
            detail = f"no column {source.label_key!r}; there are: {', '.join(names)}; set label_key to one of them"
            return "no_label", detail[:300]
        return "", ""

    def read(self, part: Part) -> Iterator[Document]:
        """Yield the rows of a row group. Raises OSError for damaged data, which loses the rest of the row group.

        Rows are read in small batches, because Arrow cannot build a nested column of over 2 GiB at once.
        """
        number, row, names = part.start, 0, self._names()
        columns = None if self.context.source.format == "chat" else names
        with self._open_table(part) as table:
            group = table.metadata.row_group(number)
            at_a_time = min(
                max(BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1), 1), max(group.num_rows, 1)
            )
            for batch in table.iter_batches(at_a_time, row_groups=[number], columns=columns):
                batch = _text_as_bytes(batch, names)
                for at in range(batch.num_rows):
                    yield self._record(batch.slice(at, 1), number, row)
                    row += 1

    def _names(self) -> list[str]:
        """Return the names of the columns that the source reads as text or as the label."""
        source = self.context.source
        return [*text_keys(source.text_key), *filter(None, [source.label_key])]

    def _record(self, rows: Any, number: int, row: int) -> Document:
        """Convert a table of one row to a document. `number` is its row group, and `row` its row in the group.

        Raises pa.ArrowException for damaged values.
        """
        source, key = self.context.source, f"{number}:{row}"
        try:
            (fields,) = rows.to_pylist()
            for name in self._names():
                if isinstance(raw := fields.get(name), bytes):
                    fields[name] = decode(raw, source.encoding or "")
        except UnicodeDecodeError as error:
            return not_utf8(key, error.object, error)
        value = {name: _without_nulls(field) for name, field in fields.items()}
        is_text_only = not source.joins_fields and source.format != "chat"
        shown = "" if is_text_only else json.dumps(value, ensure_ascii=False, default=str)
        record = record_of(value, key, len(shown), shown, {"row_group": number, "row": row}, source)
        if is_text_only:
            record.num_bytes = len(record.text.encode())
        return record


def _leaves(fields: Iterable[Any]) -> Iterator[Any]:
    """Yield the Arrow fields that have no fields themselves, with dotted names within structs."""
    for field in fields:
        inner = field.flatten()  # returns the field itself if it is not a struct
        yield from _leaves(inner) if inner[0].name != field.name else inner


def _text_as_bytes(batch: Any, names: Iterable[str]) -> Any:
    """Convert the text columns among `names` to bytes, because some of their strings may not be valid UTF-8."""
    import pyarrow as pa

    for at, field in enumerate(batch.schema):
        if field.name in names and _is_text(field.type):
            batch = batch.set_column(at, field.name, batch[at].cast(_value_type(field.type)).cast(pa.large_binary()))
    return batch


def _value_type(kind: Any) -> Any:
    return kind.value_type if str(kind).startswith("dictionary") else kind


def _is_text(kind: Any) -> bool:
    return str(_value_type(kind)) in TEXT_TYPES


def _without_nulls(value: Any) -> Any:
    """Remove null fields from structs, which have them only because other rows have these fields."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value
