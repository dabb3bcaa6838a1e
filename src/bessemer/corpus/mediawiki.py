"""Articles of MediaWiki XML dumps.

Pages are cut at <page> ... </page> by bytes and parsed one by one: a damaged page costs that page, and no document type
is read, so that no entity can be declared. (mwxml parses a dump as a whole and cannot recover or start in the middle.)
In a multistream dump a page belongs to the range in which the stream with its first byte begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO
from xml.parsers import expat

from bessemer.corpus import wikitext
from bessemer.corpus.document import Record
from bessemer.corpus.extract import NotText
from bessemer.corpus.inflate import CompressedMember, Damaged, find_member, next_member

MAX_PAGE_BYTES = 64 << 20
READ_BYTES = 1 << 20
MAX_DEPTH = 16
"""Elements of a page nest five deep."""

_OPEN, _CLOSE = b"<page>", b"</page>"
_Page = tuple[str, bytes, str]
"""Key, bytes, and what is wrong with it."""


def read(
    file: BinaryIO, start: int, end: int, compression: str, max_characters: int, prefix: str = ""
) -> Iterator[Record]:
    """The pages that begin in [start, end), as articles or with the reason why they are none; wikitext of more than
    `max_characters` is not read, and `prefix` goes before the offsets in keys. OSError when the file cannot be read."""
    for key, page, problem in _pages(file, start, end, compression, prefix):
        if problem:
            yield Record(key, len(page), reason="bad_record", detail=problem)
        else:
            yield _article(key, page, max_characters)


class _DumpBytes:
    """The decompressed bytes of a dump from `start` on: from there, or from the first member that begins there or
    behind."""

    def __init__(self, file: BinaryIO, start: int, end: int, compression: str, prefix: str) -> None:
        self.file, self.start, self.end, self.compression, self.prefix = file, start, end, compression, prefix
        self.members: list[tuple[int, int]] = []
        """Where each member begins in the decompressed bytes, and in the file."""
        self.damaged: int | None = None
        """Where the member begins in the file that could not be decoded."""

    def blocks(self) -> Iterator[bytes]:
        """Raises Damaged, after everything before the damage."""
        if not self.compression:
            self.file.seek(self.start)
            while block := self.file.read(READ_BYTES):
                yield block
            return
        produced, offset = 0, self.start or None
        if offset is not None:
            offset = find_member(self.file, self.compression, self.start, self.end, b"", b"")
            if offset is None:
                return
        while (offset := next_member(self.file, self.compression, offset or 0)) is not None:
            self.members.append((produced, offset))
            member = CompressedMember(self.file, offset, self.compression)
            try:
                for block in member.blocks():
                    produced += len(block)
                    yield block
            except Damaged:
                self.damaged = offset
                raise
            offset = member.end

    def belongs(self, position: int) -> bool:
        """Whether a page at this position of the decompressed bytes belongs to the range."""
        return (self._member(position)[1] if self.compression else self.start + position) < self.end

    def key(self, position: int) -> str:
        """The key of a page at this position."""
        if not self.compression:
            return f"{self.prefix}{self.start + position}"
        begins, offset = self._member(position)
        return f"{offset}+{position - begins}"

    def _member(self, position: int) -> tuple[int, int]:
        while len(self.members) > 1 and self.members[1][0] <= position:
            self.members.pop(0)
        return self.members[0]


def _pages(file: BinaryIO, start: int, end: int, compression: str, prefix: str) -> Iterator[_Page]:
    """The pages of a range; reading resumes at the member after a damaged one."""
    position: int | None = start
    while position is not None and (position < end or position == start):
        dump = _DumpBytes(file, position, end, compression, prefix)
        position = None
        try:
            yield from _cut(dump)
        except Damaged as error:
            at = dump.start if dump.damaged is None else dump.damaged
            yield f"{at}!", b"", str(error)
            if dump.damaged is not None:
                position = find_member(file, compression, at + 1, file.seek(0, 2), b"", b"")


def _cut(dump: _DumpBytes) -> Iterator[_Page]:
    """Pages out of the blocks. Raises Damaged, after the pages before."""
    buffer = bytearray()
    base = 0  # where the buffer begins in the decompressed bytes
    searched = 0  # how far the buffer was searched for the end of the page
    key = ""  # of the page with which the buffer begins; "" between pages
    dropped_bytes = 0  # of a page too long for the buffer
    for block in dump.blocks():
        buffer += block
        while True:
            if not key:
                found = buffer.find(_OPEN)
                skipped = found if found >= 0 else max(len(buffer) - len(_OPEN) + 1, 0)
                del buffer[:skipped]
                base += skipped
                if found < 0:
                    break
                if not dump.belongs(base):
                    return
                key, searched, dropped_bytes = dump.key(base), len(_OPEN), 0
            closed = buffer.find(_CLOSE, searched)
            another = buffer.find(_OPEN, searched, closed if closed >= 0 else len(buffer))
            if another >= 0:  # within a page's text the tag would be escaped
                yield key, bytes(buffer[:another]), "the page has no end"
                length = another
            elif closed >= 0:
                length = closed + len(_CLOSE)
                problem = f"a page of {dropped_bytes + length} bytes" if dropped_bytes else ""
                yield key, b"" if problem else bytes(buffer[:length]), problem
            else:
                searched = max(len(buffer) - len(_CLOSE) + 1, searched)
                if len(buffer) > MAX_PAGE_BYTES:
                    del buffer[:searched]
                    base, dropped_bytes, searched = base + searched, dropped_bytes + searched, 0
                break
            del buffer[:length]
            base, key = base + length, ""
    if key:
        yield key, bytes(buffer[:READ_BYTES]), "the page has no end"


_FIELDS = {
    ("page", "title"): "title",
    ("page", "ns"): "namespace",
    ("page", "id"): "page",
    ("page", "revision", "id"): "revision",
    ("page", "revision", "timestamp"): "date",
    ("page", "revision", "model"): "model",
    ("page", "revision", "text"): "text",
}


class _PageFields:
    """The fields of a page, collected while it is parsed."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.redirect: str | None = None
        self._path: list[str] = []
        self._parts: list[str] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if len(self._path) >= MAX_DEPTH:
            raise ValueError(f"elements nested deeper than {MAX_DEPTH}")
        self._path.append(name)
        self._parts = []
        if self._path == ["page", "redirect"]:
            self.redirect = attributes.get("title", "")

    def data(self, text: str) -> None:
        self._parts.append(text)

    def end(self, name: str) -> None:
        field = _FIELDS.get(tuple(self._path))
        if field is not None:  # of a page with its history the last revision stays
            self.values[field] = "".join(self._parts)
        self._parts = []
        self._path.pop()


def _article(key: str, page: bytes, max_characters: int) -> Record:
    record = Record(key, len(page), metadata={"byte": key})
    try:
        shown = page.decode()
        fields = _PageFields()
        parser: Any = expat.ParserCreate("utf-8")
        parser.buffer_text = True
        parser.StartElementHandler, parser.EndElementHandler = fields.start, fields.end
        parser.CharacterDataHandler = fields.data
        parser.Parse(shown, True)
    except UnicodeDecodeError as error:
        record.reason, record.detail = "not_utf8", f"byte 0x{page[error.start]:02x} at {error.start}"
        return record
    except (expat.ExpatError, ValueError) as error:
        record.reason, record.detail = "bad_record", f"not a page: {error}"[:300]
        return record
    values = fields.values
    text = values.pop("text", "")
    namespace, model = values.pop("namespace", "0").strip(), values.pop("model", "wikitext").strip()
    record.metadata.update({name: value[:2000] for name, value in values.items()})
    if namespace != "0":
        record.reason, record.detail = "not_article", f"namespace {namespace[:20]}: {values.get('title', '')[:200]}"
    elif fields.redirect is not None or text[:20].lstrip().upper().startswith("#REDIRECT"):
        record.reason, record.detail = "redirect", f"{values.get('title', '')[:200]} -> {(fields.redirect or '')[:200]}"
    elif model != "wikitext":
        record.reason, record.detail = "not_article", f"a page of kind {model[:40]}"
    elif len(text) > max_characters:
        record.reason, record.detail = "too_long", f"{len(text)} characters of wikitext"
    else:
        try:
            record.text = wikitext.plain_text(text)
        except NotText as error:
            record.reason, record.detail = "bad_record", str(error)
    return record
