"""Parquet files: a row is a document, and a row group a part. A problem with a row affects only that row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO, ClassVar

from bessemer.common.errors import first_line
from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import HEAD_BYTES, File, Part, Reader
from bessemer.corpus.readers.encodings import decode, foreign_format, not_utf8
from bessemer.corpus.readers.records import no_text, record_of
from bessemer.recipe.corpus import text_keys
from bessemer.run_tasks.task import require
from bessemer.storage import filesystem

BATCH_BYTES = 16 << 20  # size of the rows to read at a time
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")  # Arrow types of text


class ParquetReader(Reader):
    """A reader of row groups of Parquet files."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")
    is_compressible = False  # the format has its own compression
    has_fields = True
    has_encoding = True

    def split(self, file: File) -> Iterable[Part]:
        """Return one part per row group, or one part with the reason why the file cannot be read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        with self.open(file) as stream:
            head = stream.read(HEAD_BYTES)
            if not head.startswith(b"PAR1"):
                detail = foreign_format(head) or f"not a Parquet file: it begins with {head[:16]!r}"
                return [self.part(file, damage=detail, reason="wrong_format")]
            try:
                with pq.ParquetFile(_place(file, stream)) as parquet:
                    schema, footer = parquet.schema_arrow, parquet.metadata
                    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
            except pa.ArrowException as error:
                detail = f"a damaged Parquet file: {first_line(error)}"[:300]
                return [self.part(file, damage=detail, reason="unreadable")]
        reason, detail = self._judge(schema)
        if reason:
            return [self.part(file, damage=detail, reason=reason)]
        return [self.part(file, number, number + 1, group.total_byte_size) for number, group in enumerate(groups)]

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
        """Yield the rows of a row group. Rows after damaged data become rejected documents.

        Rows are read in small batches, because Arrow cannot build a nested column of over 2 GiB at once.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        source, number = self.context.source, part.start
        names = [*text_keys(source.text_key), *([source.label_key] if source.label_key else [])]
        columns = None if source.format == "chat" else names
        num_rows, row = None, 0
        try:
            with self.open(part) as file, pq.ParquetFile(_place(part, file)) as parquet:
                group = parquet.metadata.row_group(number)
                num_rows = group.num_rows
                at_a_time = min(max(BATCH_BYTES * num_rows // max(group.total_byte_size, 1), 1), max(num_rows, 1))
                for batch in parquet.iter_batches(at_a_time, row_groups=[number], columns=columns):
                    for record in self._records(batch, number, row):
                        yield record
                        row += 1
        except (pa.ArrowException, OSError) as error:  # Arrow raises OSError for bytes that cannot be decompressed
            if num_rows is None:
                raise OSError(f"damaged row group {number}: {error}"[:300]) from error
            detail = f"damaged row group {number} of {num_rows} rows: {error}"[:300]
            for lost in range(row, num_rows):
                num_bytes = part.size * (lost + 1) // num_rows - part.size * lost // num_rows
                yield Document(f"{number}:{lost}", num_bytes, reason="unreadable", detail=detail)
            row = num_rows
        require(row == num_rows, f"row group {number} has {num_rows} rows, but {row} were read")

    def _records(self, batch: Any, number: int, first: int) -> Iterator[Document]:
        """Yield the rows of a batch as documents. Raises pa.ArrowException for damaged values."""
        import pyarrow as pa

        source = self.context.source
        text_key = None if source.format == "chat" or source.joins_fields else text_keys(source.text_key)[0]
        in_json = [one.name for one in batch.schema if getattr(one.type, "extension_name", "") == "arrow.json"]
        if text_key is not None:  # other columns do not become metadata
            names = dict.fromkeys((text_key, source.label_key or text_key))
            batch = pa.RecordBatch.from_pydict({name: _column(batch, name) for name in names})
        for at in range(batch.num_rows):
            key, place = f"{number}:{first + at}", dict[str, object](row_group=number, row=first + at)
            try:
                row = batch.slice(at, 1).to_pylist()[0]
                value = _without_nulls(row) if text_key is None else _decoded(row, source.encoding or "")
            except UnicodeDecodeError as error:
                yield not_utf8(key, error.object, error)
                continue
            if text_key is None:
                shown = json.dumps(value, ensure_ascii=False, default=str)
                yield record_of(value, key, len(shown), shown, place, source)
                continue
            if text_key in in_json and (value[text_key] or "")[:1] == '"':
                with suppress(ValueError):
                    value[text_key] = json.loads(value[text_key])
            record = record_of(value, key, len(row[text_key] or b""), "", place, source)
            record.metadata = {**place}
            yield record


def _place(file: File | Part, stream: BinaryIO) -> Any:
    """Return the argument for Arrow to read a file: a local path, which Arrow maps, or the stream of a remote file."""
    if not filesystem.is_remote(file.path):
        return file.path
    stream.seek(0)
    return stream


def _leaves(fields: Iterable[Any]) -> Iterator[Any]:
    """Yield the columns of a schema. Fields of structs have dotted names."""
    for field in fields:
        inner = field.flatten()  # returns the field itself if it is not a struct
        yield from _leaves(inner) if inner[0].name != field.name else inner


def _column(batch: Any, key: str) -> Any:
    """Return a column, which may be a field of a struct. Strings become bytes, because some may not be valid UTF-8."""
    import pyarrow as pa
    import pyarrow.compute as pc

    first, _, rest = key.partition(".")
    column = batch[key] if key in batch.schema.names else pc.struct_field(batch[first], rest.split("."))
    column = column.cast(_plain(column.type))
    return column.cast(pa.large_binary()) if _is_text(column.type) else column


def _plain(kind: Any) -> Any:
    """Return the value type of a dictionary or extension type."""
    kind = getattr(kind, "storage_type", kind)
    return kind.value_type if str(kind).startswith("dictionary") else kind


def _is_text(kind: Any) -> bool:
    return str(_plain(kind)) in TEXT_TYPES


def _decoded(row: dict[str, Any], encoding: str) -> dict[str, Any]:
    return {name: decode(value, encoding) if isinstance(value, bytes) else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """Remove null fields from structs, which have them only because other rows have these fields."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value
