"""Files of records: lines of JSON, and what record_files.py reads. A record is a document."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import BinaryIO, ClassVar

from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import HEAD_BYTES, File, Part, Reader
from bessemer.corpus.readers.encodings import decode, not_utf8
from bessemer.corpus.readers.inflate import InflatedFile, beginning, compression_of, unpacked_size, without_compression
from bessemer.corpus.readers.records import MAX_RECORD_BYTES, record_of
from bessemer.recipe import Source
from bessemer.recipe.corpus import text_keys
from bessemer.storage import filesystem

READ_BYTES = 1 << 20


class JsonlReader(Reader):
    """Reads byte ranges of plain lines; a compressed file, or one in another layout, as a whole."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
    has_fields = True
    has_encoding = True

    def split(self, file: File) -> Iterable[Part]:
        """Return byte ranges of plain lines of JSON; one part of a compressed file, or of one in another layout."""
        source = self.context.source
        part, layout, compression = None, "lines", compression_of(file.path)
        if filesystem.is_remote(file.path):
            self.context.keys.update(text_keys(source.text_key))
        # A look into each object of a store would take a request.
        if not (filesystem.is_remote(file.path) and file.path.lower().endswith((".jsonl", ".ndjson"))):
            # Of an error the reader says what is wrong.
            with suppress(OSError), filesystem.open_file(file.path, source) as stream:
                head = beginning(stream, compression, HEAD_BYTES)
                is_whole = len(head) < HEAD_BYTES if compression else len(head) >= file.size
                layout, part = self._look(file, head, is_whole)
        if part is not None:
            return [part]
        if compression and layout == "lines" and self.context.beginning_bytes:
            return [self._stream(file, layout=layout)]
        if compression or layout != "lines":
            return [self.part(file, size=unpacked_size(file.path, file.size), layout=layout)]
        return self._ranges(file)

    def _look(self, file: File, head: bytes, is_whole: bool) -> tuple[str, Part | None]:
        """Return the layout of a file by its beginning, and the part that says why it cannot be read, if so."""
        from bessemer.corpus.readers.record_files import look

        source = self.context.source
        name, encoding = without_compression(file.name), source.encoding or ""
        every = {key: look(head, is_whole, name, key, encoding) for key in text_keys(source.text_key)}
        good = [key for key, one in every.items() if not one.reason and not one.missing]
        self.context.keys.update(good)
        seen = every[good[0]] if good else next(iter(every.values()))
        if seen.missing:
            self.context.missing.append(f"{file.name}: {seen.missing}")
        elif seen.layout:
            self.context.num_with_text += 1
        part = self.part(file, damage=seen.detail, reason=seen.reason) if seen.reason else None
        return seen.layout or "lines", part

    def _ranges(self, file: File) -> Iterator[Part]:
        """Yield byte ranges; a line belongs to the range in which it begins, so none is searched for here."""
        length = self.context.part_bytes
        for start in range(0, max(file.size, 1), length):
            end = min(start + length, file.size)
            yield self.part(file, start, end, end - start, layout="lines")

    def read(self, part: Part) -> Iterator[Document]:
        """Yield the records."""
        compression = compression_of(part.path)
        with filesystem.open_file(part.path, self.context.source) as file:
            if compression:
                yield from self._unpacked(file, compression, part)
            else:
                yield from self._records(file, part)

    def _records(self, file: BinaryIO, part: Part) -> Iterator[Document]:
        from bessemer.corpus.readers import record_files

        if part.layout == "lines":
            yield from _lines(file, part.start, part.end, self.context.source)
        else:
            yield from record_files.read(file, part.layout, self.context.source)

    def _unpacked(self, file: BinaryIO, compression: str, part: Part) -> Iterator[Document]:
        """Yield the records of a compressed file: lines of JSON as it is unpacked, other layouts from a temporary file. What was
        unpacked before damage is read; the line in which it lies is a damaged record too."""
        content = InflatedFile(file, compression)
        if part.layout == "lines":
            with io.BufferedReader(content, READ_BYTES) as lines:
                yield from self._records(lines, part)  # type: ignore[arg-type]
        else:
            with tempfile.TemporaryFile() as plain:
                shutil.copyfileobj(content, plain, READ_BYTES)
                plain.seek(0)
                yield from self._records(plain, part)  # type: ignore[arg-type]
        if content.damage:
            detail = f"{content.damage}, after {content.num_bytes} bytes" + " of text" * (part.layout == "lines")
            yield Document(f"{content.num_bytes}!", 0, reason="bad_record", detail=detail)


def _lines(file: BinaryIO, start: int, end: int | None, source: Source) -> Iterator[Document]:
    """Yield the lines that begin in [start, end) (None: all), decoded one by one, so that a bad byte costs one line.

    Their byte offsets are their keys. Raises OSError when the file cannot be read.
    """
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
    """Go to the next line without holding this one; returns the bytes skipped."""
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
