"""Files of records: JSON lines, other JSON, and tables. Each record is a document."""

from __future__ import annotations

import codecs
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

from bessemer.corpus.document import Document
from bessemer.corpus.readers import delimited
from bessemer.corpus.readers.base import HEAD_BYTES, READ_BYTES, File, Part, Reader
from bessemer.corpus.readers.encodings import decode, detected, foreign_format, is_utf8, not_utf8, unicode_of
from bessemer.corpus.readers.inflate import Damaged, compression_of, unpacked_size, without_compression
from bessemer.corpus.readers.records import MAX_RECORD_BYTES, field_in, named, no_text, record_of
from bessemer.recipe import Source
from bessemer.recipe.corpus import text_keys
from bessemer.storage import filesystem

SAMPLED = 50  # number of records to check at the beginning of a file
TABLE_SUFFIXES = (".csv", ".tsv")
_SEPARATORS = re.compile(r"[\s,\[\]]*")  # includes the brackets of an array, which is read element by element


@dataclass(frozen=True)
class Inspection:
    """The layout of a file of records and the problems with it, as seen at its beginning.

    Attributes:
        layout: "lines" for JSON lines, "values" for an array or consecutive JSON values, "csv" for a table, "" for an
            empty file.
        keys: Keys of `text_key` that the records have.
        missing: Message with the existing fields if the records have none of these keys.
        reason: Reason in reasons.toml why the file cannot be read; "" if it can.
        detail: Description of this problem.
    """

    layout: str = ""
    keys: tuple[str, ...] = ()
    missing: str = ""
    reason: str = ""
    detail: str = ""


class JsonlReader(Reader):
    """A reader of records. It splits plain JSON lines into byte ranges; compressed files and other layouts are one part."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".json", *TABLE_SUFFIXES)
    has_fields = True
    has_encoding = True

    def split(self, file: File) -> Iterable[Part]:
        """Return byte ranges of plain JSON lines; one part for a compressed file or another layout."""
        context, compression, inspected = self.context, compression_of(file.path), Inspection("lines")
        if filesystem.is_remote(file.path):
            context.keys.update(text_keys(context.source.text_key))
        # Checking each object of a store would take a request.
        if not (filesystem.is_remote(file.path) and file.path.lower().endswith((".jsonl", ".ndjson"))):
            # The reader reports an error later.
            with suppress(OSError):
                inspected = inspect_head(self.head(file), without_compression(file.name), context.source)
                context.keys.update(inspected.keys)
                context.missing += [f"{file.name}: {inspected.missing}"] * bool(inspected.missing)
        if inspected.reason:
            return [self.part(file, damage=inspected.detail, reason=inspected.reason)]
        layout = inspected.layout or "lines"
        if layout == "lines" and not compression:
            return self._ranges(file)
        if layout == "lines" and context.beginning_bytes:
            return [self._stream(file, layout=layout)]
        return [self.part(file, size=unpacked_size(file.path, file.size), layout=layout)]

    def _ranges(self, file: File) -> Iterator[Part]:
        """Yield byte ranges. A line belongs to the range in which it begins, so ranges need not end at line ends."""
        length = self.context.part_bytes
        for start in range(0, max(file.size, 1), length):
            end = min(start + length, file.size)
            yield self.part(file, start, end, end - start, layout="lines")

    def read(self, part: Part) -> Iterator[Document]:
        """Yield a document for each record of a part."""
        with self.open(part) as file:
            if part.layout == "lines":
                yield from _lines(file, part.start, part.end, self.context.source)
            else:
                yield from self._values(file, part)

    def _values(self, file: BinaryIO, part: Part) -> Iterator[Document]:
        """Yield a document for each record of a table, or of JSON with other records than lines.

        The key of a document is the number of its record in brackets, from 1. A byte that cannot be decoded affects
        only the record that contains it.
        """
        source, head = self.context.source, self.head(part)
        encoding, undecodable = _encoding(head), ""
        if encoding == "utf-8-sig" and not self._is_utf8(part):
            encoding = source.encoding or encoding
            likely = "" if source.encoding else detected(head)
            undecodable = f"a byte that is not {encoding}" + (f"; probably {likely}" if likely else "")
        records: Iterator[tuple[str, object, str]]
        if part.layout == "csv":
            records = delimited.rows(io.TextIOWrapper(file, encoding, "replace", newline=""))
        else:
            records = _json_values(_blocks(file, encoding))
        for number, (shown, value, problem) in enumerate(records, start=1):
            key, size = f"[{number}]", len(shown.encode("utf-8", "surrogatepass"))
            if problem:
                yield Document(key, size, shown[:4000], "bad_record", problem[:300])
            elif undecodable and "\ufffd" in shown:
                yield Document(key, size, shown[:4000], "not_utf8", undecodable)
            else:
                yield record_of(value, key, size, shown, {"item": number}, source)

    def _is_utf8(self, part: Part) -> bool:
        try:
            with suppress(Damaged), self.open(part) as file:
                text = io.TextIOWrapper(file, "utf-8")
                while text.read(HEAD_BYTES):
                    pass
        except UnicodeDecodeError:
            return False
        return True


def inspect_head(head: bytes, name: str, source: Source) -> Inspection:
    """Check the decompressed beginning `head` of a file of records for its layout and for problems.

    `name` is the file's name without the ending of a compression. `source` names the text fields.
    """
    keys = text_keys(source.text_key)
    text = head.decode(_encoding(head, source.encoding), "replace").lstrip()
    if not text:
        return Inspection()
    if foreign := foreign_format(head):
        return Inspection(reason="wrong_format", detail=foreign)
    if (nul := text.find("\0")) >= 0:
        return Inspection(reason="wrong_format", detail=f"binary data, not JSON: a NUL at character {nul}")
    if name.lower().endswith(TABLE_SUFFIXES):
        columns = delimited.header(io.StringIO(text, newline=""))[0]
        if fields := tuple(key for key in keys if columns.count(key) == 1):
            return Inspection("csv", fields)
        detail = f"a table with {no_text('column', keys[0], columns)}"
        if (count := columns.count(keys[0])) > 1:
            detail = f"a table with {count} columns named {keys[0]!r}; rename all but one"
        return Inspection(reason="no_text_key", detail=detail)
    if text[0] not in "{[" and "\n{" not in text:
        return Inspection(reason="wrong_format", detail=f"not JSON: it begins with {text[:40]!r}")
    is_wide = unicode_of(head) not in ("", "utf-8-sig")
    records = list[dict[str, Any]]()
    with suppress(ValueError):  # the last record of the beginning may be incomplete
        values = itertools.islice(_json_values([text]), SAMPLED)
        records += (value for _, value, _ in values if isinstance(value, dict))
    fields = tuple(key for key in keys if any(field_in(record, key)[0] is not None for record in records))
    return Inspection(
        "values" if text[0] == "[" or is_wide or _is_pretty(text) else "lines",
        fields if records else keys,
        "" if fields or not records else no_text("field", keys[0], named(records[0])),
    )


def _encoding(head: bytes, other: str | None = None) -> str:
    """Return the encoding of a file from its first bytes: by byte order mark, else UTF-8, or `other` if they are not UTF-8.

    The decoder removes a byte order mark.
    """
    return unicode_of(head) or (other if other and not is_utf8(head) else "utf-8-sig")


def _is_pretty(text: str) -> bool:
    """Return whether the first JSON object of a text spans several lines."""
    try:
        return text.partition("\n")[0].strip() == "{" or "\n" in text[: json.JSONDecoder().raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return False


def _lines(file: BinaryIO, start: int, end: int | None, source: Source) -> Iterator[Document]:
    """Yield a document per JSON line that begins in the byte range [start, end); an `end` of None is the end of the file.

    The key of a document is the byte offset of its line. Lines are decoded separately, so that a bad byte affects only
    one. Raises OSError if the file cannot be read.
    """
    position, number = start, 0
    if position:  # a line that begins before the range belongs to the previous range
        file.seek(position - 1)
        position += _skip_line(file) - 1
    while end is None or position < end:
        line = file.readline(MAX_RECORD_BYTES + 1)
        if not line:
            return
        size, number = len(line), number + 1
        if size > MAX_RECORD_BYTES and not line.endswith(b"\n"):
            size += _skip_line(file)
            yield Document(str(position), size, reason="bad_record", detail=f"a line of {size} bytes")
        elif line.strip():
            document = _json_line(line, str(position), source)
            if document.reason and not start:  # the number of a line is known only in the first range
                document.detail = f"line {number}: {document.detail}"
            yield document
        position += size


def _skip_line(file: BinaryIO) -> int:
    """Skip the rest of a line without holding it in memory. Returns the number of bytes skipped."""
    skipped = 0
    while part := file.readline(READ_BYTES):
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
        value = json.loads(shown.rstrip().removesuffix(","))  # arrays may have one element and a comma per line
    except (ValueError, RecursionError) as error:  # JSON with thousands of levels raises RecursionError
        return Document(key, len(line), shown[:4000], "bad_record", f"not JSON: {getattr(error, 'msg', error)}"[:300])
    return record_of(value, key, len(line), shown, {"byte": int(key)}, source)


def _blocks(file: BinaryIO, encoding: str) -> Iterator[str]:
    """Yield the text of a file. Bytes that cannot be decoded are replaced by U+FFFD."""
    # read1 returns the data before damage
    return codecs.iterdecode(iter(lambda: file.read1(READ_BYTES), b""), encoding, "replace")  # type: ignore[attr-defined]


def _json_values(blocks: Iterable[str]) -> Iterator[tuple[str, object, str]]:
    """Yield (JSON text, value, "") for each element of an array and each other JSON value in a text that arrives in blocks.

    The empty string takes the place of the problem in `delimited.rows`. Only one value and one block are held in
    memory. Raises ValueError for text that is not JSON, and for a value of more than MAX_RECORD_BYTES characters.
    """
    decoder, text, position, number, num_open = json.JSONDecoder(), "", 0, 0, 0
    for block in itertools.chain(blocks, [""]):
        text, position = text[position:] + block, 0
        while separators := _SEPARATORS.match(text, position):
            num_open += separators[0].count("[") - separators[0].count("]")
            if (position := separators.end()) == len(text):
                break
            try:
                value, end = decoder.raw_decode(text, position)
            except (ValueError, RecursionError) as error:  # JSON with thousands of levels raises RecursionError
                if block and len(text) - position <= MAX_RECORD_BYTES:
                    break  # the value may continue in the next block
                raise ValueError(f"not JSON after record {number}: {getattr(error, 'msg', error)}") from None
            if block and end == len(text):
                break  # a number may continue in the next block
            position, number = end, number + 1
            yield json.dumps(value, ensure_ascii=False), value, ""
    if num_open:
        raise ValueError(f"the array is cut short after record {number}")
