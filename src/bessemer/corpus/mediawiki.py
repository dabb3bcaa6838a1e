"""Articles of MediaWiki XML dumps, as plain text.

Pages are cut at <page> ... </page> by bytes and parsed one by one: a damaged page costs that page, and no document type
is read, so that no entity can be declared. (mwxml parses a dump as a whole and cannot recover.)
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO
from xml.etree import ElementTree

from bessemer.corpus.document import Record
from bessemer.corpus.encodings import unicode_of
from bessemer.corpus.extract import NotText
from bessemer.corpus.inflate import CompressedMember, Damaged, beginning, find_member, next_member
from bessemer.corpus.wikitext import FILE_PREFIXES, plain_text

MAX_PAGE_BYTES = 64 << 20
READ_BYTES = 1 << 20

HEAD_BYTES = 64 << 10  # of a dump: its name, and those of its namespaces
# of pictures and categories
_NAMESPACE = re.compile(rb'<namespace key="(?:6|14)"[^>]{0,200}>([^<]{1,200})</namespace>')
_REDIRECT = re.compile(r"\s*#(?:redirect|[^\W\d_]{4,30}\s*:?\s*\[\[[^\]\n]{1,300}\]\]\s*$)", re.IGNORECASE)
_OPEN, _CLOSE = b"<page>", b"</page>"
# elements of a page, and the names of their contents in `metadata`
_FIELDS = {
    "title": "title",
    "ns": "namespace",
    "id": "page",
    "revision/id": "revision",
    "revision/timestamp": "date",
    "revision/model": "model",
    "revision/text": "text",
}


def read(file: BinaryIO, end: int | None, compression: str, max_characters: int) -> Iterator[Record]:
    """The pages that begin before byte `end` of the unpacked dump (None: all), as articles or with the reason why they are none;
    wikitext of more than `max_characters` is not read. Reading resumes at the member after a damaged one. OSError when the
    file cannot be read."""
    head = beginning(file, compression, HEAD_BYTES)
    prefixes = FILE_PREFIXES | {
        html.unescape(name.decode(errors="replace")).casefold() for name in _NAMESPACE.findall(head)
    }
    if problem := _no_dump(head):
        yield Record("0!", 0, reason="wrong_format", detail=problem)
        return
    position: int | None = 0
    while position is not None:
        dump = _DumpBytes(file, position, end, compression)
        try:
            yield from _pages(dump, max_characters, prefixes)
            return
        except Damaged as error:
            at = position if dump.damaged is None else dump.damaged
            yield Record(f"{at}!", 0, reason="bad_record", detail=str(error))
            position = None
            if dump.damaged is not None:
                position = find_member(file, compression, at + 1)


def _no_dump(head: bytes) -> str:
    """Why a file is no dump in UTF-8, by its first bytes; "" where it may be one, or cannot be decompressed."""
    if not head:
        return ""
    if unicode_of(head)[0] not in ("", "utf-8"):
        return f"the dump is {unicode_of(head)[0].upper()}; write it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE > NEW.xml"
    if b"<mediawiki" not in head and _OPEN not in head:
        return "not a MediaWiki dump: neither <mediawiki> nor <page> is near its beginning; exclude the file"
    return ""


@dataclass
class _DumpBytes:
    """The decompressed bytes of a dump from `start`, where a member begins."""

    file: BinaryIO
    start: int
    end: int | None
    compression: str
    # where each member begins in the decompressed bytes, and in the file
    members: list[tuple[int, int]] = field(default_factory=list)
    damaged: int | None = None  # where the member begins in the file that could not be decoded

    def blocks(self) -> Iterator[bytes]:
        """Raises Damaged, after everything before the damage."""
        if not self.compression:
            self.members.append((0, 0))
            self.file.seek(0)
            yield from iter(lambda: self.file.read(READ_BYTES), b"")
            return
        produced, offset = 0, next_member(self.file, self.compression, self.start)
        while offset is not None:
            self.members.append((produced, offset))
            member = CompressedMember(self.file, offset, self.compression)
            try:
                for block in member.blocks():
                    produced += len(block)
                    yield block
            except Damaged:
                self.damaged = offset
                raise
            offset = next_member(self.file, self.compression, member.end)

    def key(self, position: int) -> str | None:
        """The key of a page at this position of the decompressed bytes; None for one that begins beyond the range."""
        while len(self.members) > 1 and self.members[1][0] <= position:
            self.members.pop(0)
        before, offset = self.members[0]
        if self.end is not None and position >= self.end:
            return None
        return f"{offset}+{position - before}" if self.compression else str(position)


def _pages(dump: _DumpBytes, max_characters: int, prefixes: Collection[str]) -> Iterator[Record]:
    """Cut pages out of the blocks. Raises Damaged, after the pages before."""
    buffer = bytearray()
    base = 0  # where the buffer begins in the decompressed bytes
    searched = 0  # how far the buffer was searched for the end of the page
    key: str | None = None  # of the page with which the buffer begins; None between pages
    dropped_bytes = 0  # of a page too long for the buffer
    for block in dump.blocks():
        buffer += block
        while True:
            if key is None:
                found = buffer.find(_OPEN)
                skipped = found if found >= 0 else max(len(buffer) - len(_OPEN) + 1, 0)
                del buffer[:skipped]
                base += skipped
                if found < 0:
                    break
                if (key := dump.key(base)) is None:
                    return
                searched, dropped_bytes = len(_OPEN), 0
            closed = buffer.find(_CLOSE, searched)
            another = buffer.find(_OPEN, searched, closed if closed >= 0 else len(buffer))
            if another >= 0:  # within a page's text the tag would be escaped
                length = another
                yield Record(key, length, reason="bad_record", detail="the page has no end")
            elif closed >= 0:
                length = closed + len(_CLOSE)
                if dropped_bytes:
                    yield Record(key, 0, reason="bad_record", detail=f"a page of {dropped_bytes + length} bytes")
                else:
                    yield _article(key, bytes(buffer[:length]), max_characters, prefixes)
            else:
                searched = max(len(buffer) - len(_CLOSE) + 1, searched)
                if len(buffer) > MAX_PAGE_BYTES:
                    del buffer[:searched]
                    base, dropped_bytes, searched = base + searched, dropped_bytes + searched, 0
                break
            del buffer[:length]
            base, key = base + length, None
    if key is not None:
        yield Record(key, min(len(buffer), READ_BYTES), reason="bad_record", detail="the page has no end")


def _article(key: str, page: bytes, max_characters: int, prefixes: Collection[str]) -> Record:
    """A page as an article, or with the reason why it is none."""
    record = Record(key, len(page), metadata={"byte": key})
    try:
        root = ElementTree.fromstring(page.decode())
    except UnicodeDecodeError as error:
        record.reject("not_utf8", f"byte 0x{page[error.start]:02x} at {error.start}")
        return record
    except ElementTree.ParseError as error:
        record.reject("bad_record", f"not a page: {error}"[:300])
        return record
    # Of a page with its history the last revision stays.
    elements = {name: found[-1] for path, name in _FIELDS.items() if (found := root.findall(path))}
    values = {name: element.text or "" for name, element in elements.items()}
    text = values.pop("text", "")
    namespace, model = values.pop("namespace", "0").strip(), values.pop("model", "wikitext").strip()
    record.metadata.update({name: value[:2000] for name, value in values.items()})
    redirect, title = root.find("redirect"), values.get("title", "")[:200]
    if "text" in elements and len(elements["text"]):
        record.reject("bad_record", "not a page: elements within its text")
    elif namespace != "0":
        record.reject("not_article", f"namespace {namespace[:20]}: {title}")
    elif redirect is not None or _REDIRECT.match(text):
        target = "" if redirect is None else redirect.get("title", "")
        record.reject("redirect", f"{title} -> {target[:200]}")
    elif model != "wikitext":
        record.reject("not_article", f"a page of kind {model[:40]}")
    elif len(text) > max_characters:
        record.reject("too_long", f"{len(text)} characters of wikitext")
    else:
        try:
            record.text = plain_text(text, title, prefixes)
        except NotText as error:
            record.reject("bad_record", str(error))
    return record
