"""XML dumps of MediaWiki (Wikipedia and its sisters) to articles.

The dump is cut at <page> ... </page> by its bytes and each page is parsed on its own: a damaged page costs that
page, no tree of the dump is built, and no document type is ever read, so no entity can be declared. A dump in
several streams (multistream, or packed in parallel) is entered at any of them: a page belongs to the range in
which the stream begins that holds the page's first byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO
from xml.parsers import expat

from bessemer.corpus import wikitext
from bessemer.corpus.document import Record
from bessemer.corpus.extract import NotText
from bessemer.corpus.inflate import Damaged, Member, find_member, next_member

MAX_PAGE_BYTES = 64 << 20
READ_BYTES = 1 << 20
MAX_DEPTH = 16
"""Elements of a page nest five deep."""

_OPEN, _CLOSE = b"<page>", b"</page>"


def read(
    file: BinaryIO, start: int, end: int, compression: str, max_characters: int, prefix: str = ""
) -> Iterator[Record]:
    """The pages that begin in [start, end), as articles or with the reason why they are none; wikitext of more than
    `max_characters` is not read, and `prefix` goes before the offsets in keys. OSError when the file cannot be read."""
    source = _Compressed(file, start, end, compression) if compression else _Plain(file, start, end, prefix)
    for key, page, problem in _pages(source):
        if problem:
            yield Record(key, len(page), reason="bad_record", detail=problem)
        else:
            yield _article(key, page, max_characters)


class _Plain:
    """Bytes of a plain dump."""

    def __init__(self, file: BinaryIO, start: int, end: int, prefix: str) -> None:
        self.file, self.start, self.end, self.prefix = file, start, end, prefix

    def blocks(self) -> Iterator[bytes]:
        self.file.seek(self.start)
        while block := self.file.read(READ_BYTES):
            yield block

    def belongs(self, offset: int) -> bool:
        """Whether a page at this offset of the blocks is ours."""
        return self.start + offset < self.end

    def key(self, offset: int) -> str:
        return f"{self.prefix}{self.start + offset}"


class _Compressed:
    """Bytes of the members that begin in a range, and of those after them until the last page ends."""

    def __init__(self, file: BinaryIO, start: int, end: int, compression: str) -> None:
        self.file, self.start, self.end, self.compression = file, start, end, compression
        self.members: list[tuple[int, int]] = []
        """Where in the blocks each member begins, and where it lies in the file."""

    def blocks(self) -> Iterator[bytes]:
        size = self.file.seek(0, 2)
        produced, offset = 0, 0 if self.start == 0 else find_member(
            self.file, self.compression, self.start, self.end, b"", b""
        )  # fmt: skip
        while offset is not None:
            offset = next_member(self.file, self.compression, offset)
            if offset is None:
                return
            self.members.append((produced, offset))
            member = Member(self.file, offset, self.compression)
            try:
                for block in member.blocks():
                    produced += len(block)
                    yield block
                offset = member.end
            except Damaged as error:
                damaged = offset
                offset = find_member(self.file, self.compression, damaged + 1, size, b"", b"")
                raise _Gap(damaged, str(error), offset) from None

    def belongs(self, offset: int) -> bool:
        return self._member(offset)[1] < self.end

    def key(self, offset: int) -> str:
        produced, at = self._member(offset)
        return f"{at}+{offset - produced}"

    def _member(self, offset: int) -> tuple[int, int]:
        while len(self.members) > 1 and self.members[1][0] <= offset:
            self.members.pop(0)
        return self.members[0]


class _Gap(Exception):
    """A damaged member: where it lies, what is wrong, and where the next good one begins."""

    def __init__(self, offset: int, problem: str, following: int | None) -> None:
        super().__init__(problem)
        self.offset, self.problem, self.following = offset, problem, following


def _pages(source: _Plain | _Compressed) -> Iterator[tuple[str, bytes, str]]:
    """Each page with its key; or a problem."""
    while True:
        try:
            yield from _cut(source)
            return
        except _Gap as gap:
            yield f"{gap.offset}!", b"", gap.problem
            if gap.following is None or gap.following >= source.end or not isinstance(source, _Compressed):
                return
            source = _Compressed(source.file, gap.following, source.end, source.compression)
        except Damaged as error:  # between two members
            yield f"{source.start}!", b"", str(error)
            return


def _cut(source: _Plain | _Compressed) -> Iterator[tuple[str, bytes, str]]:
    """Pages out of the blocks. Raises _Gap and Damaged, after the pages before."""
    held = bytearray()
    base = 0  # where `held` begins in the blocks
    searched = 0  # how far `held` was searched for the end of the page
    key = ""  # of the page with which `held` begins; "" between pages
    forgotten = 0  # bytes of a page too long to be held
    for block in source.blocks():
        held += block
        while True:
            if not key:
                found = held.find(_OPEN)
                dropped = found if found >= 0 else max(len(held) - len(_OPEN) + 1, 0)
                del held[:dropped]
                base += dropped
                if found < 0:
                    break
                if not source.belongs(base):
                    return
                key, searched, forgotten = source.key(base), len(_OPEN), 0
            closed = held.find(_CLOSE, searched)
            another = held.find(_OPEN, searched, closed if closed >= 0 else len(held))
            if another >= 0:  # the mark is escaped within a page's text
                yield key, bytes(held[:another]), "the page has no end"
                length = another
            elif closed >= 0:
                length = closed + len(_CLOSE)
                problem = f"a page of {forgotten + length} bytes" if forgotten else ""
                yield key, b"" if forgotten else bytes(held[:length]), problem
            else:
                searched = max(len(held) - len(_CLOSE) + 1, searched)
                if len(held) > MAX_PAGE_BYTES:
                    del held[:searched]
                    base, forgotten, searched = base + searched, forgotten + searched, 0
                break
            del held[:length]
            base, key = base + length, ""
    if key:
        yield key, bytes(held[:READ_BYTES]), "the page has no end"


_FIELDS = {
    ("page", "title"): "title",
    ("page", "ns"): "namespace",
    ("page", "id"): "page",
    ("page", "revision", "id"): "revision",
    ("page", "revision", "timestamp"): "date",
    ("page", "revision", "model"): "model",
    ("page", "revision", "text"): "text",
}


class _Fields:
    """The fields of a page, gathered while it is parsed."""

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
        fields = _Fields()
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
