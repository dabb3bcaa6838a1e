"""Parquet files: a row is a document, a row group a part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import HEAD_BYTES, File, Part, Reader
from bessemer.storage import filesystem


class ParquetReader(Reader):
    """Reads row groups."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")
    is_compressible = False  # it compresses by itself
    has_fields = True
    has_encoding = True

    def split(self, file: File) -> Iterable[Part]:
        """Return a part for each row group, or one that says why the file cannot be read."""
        from bessemer.corpus.readers.row_groups import parquet_layout

        try:
            with filesystem.open_file(file.path, self.context.source) as stream:
                head = stream.read(HEAD_BYTES)
                stream.seek(0)
                place = stream if filesystem.is_remote(file.path) else file.path
                sizes, reason, detail, keys = parquet_layout(place, head, self.context.source)
        except OSError as error:
            sizes, reason, detail, keys = [], "unreadable", error.strerror or str(error), []
        self.context.keys.update(keys)
        self.context.num_with_text += bool(sizes)
        if reason:
            return [self.part(file, damage=detail, reason=reason)]
        return [self.part(file, number, number + 1, size) for number, size in enumerate(sizes)]

    def read(self, part: Part) -> Iterator[Document]:
        """Yield the rows."""
        from bessemer.corpus.readers.row_groups import row_group

        with self.open(part) as file:
            place = file if filesystem.is_remote(part.path) else part.path  # which Arrow maps
            yield from row_group(place, part.start, part.size, self.context.source)
