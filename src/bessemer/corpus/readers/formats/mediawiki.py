"""Wiki dumps in MediaWiki's XML, one document per article. lxml parses pages, mwparserfromhell wikitext.

Each page is parsed separately, so that a damaged page affects no other. Entities are never expanded.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from bessemer.common.errors import NotText
from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import HEAD_BYTES, READ_BYTES, File, Part, Reader
from bessemer.corpus.readers.inflate import beginning, compression_of, without_compression
from bessemer.corpus.readers.records import MAX_RECORD_BYTES
from bessemer.storage import filesystem

if TYPE_CHECKING:
    from lxml.etree import _Element

# File names of Wikipedia's dumps and of parts of a dump
DUMP = re.compile(
    r"-pages-(articles|meta)[^/]{0,80}\.xml[^/]{0,40}$|\.xml-p\d{1,12}p\d{1,12}(-[a-z]{1,20})?$", re.IGNORECASE
)
_REDIRECT = re.compile(r"\s*#(?:redirect|[^\W\d_]{4,30}\s*:?\s*\[\[[^\]\n]{1,300}\]\]\s*$)", re.IGNORECASE)
_ROOT, _PAGE, _PAGE_END = b"<mediawiki", b"<page>", b"</page>"
_REVISION = "revision[last()]"
_NAMESPACE = re.compile(rb'<namespace key="(?:6|14)"[^>]*>([^<]+)<')  # namespaces of files and categories


class MediawikiReader(Reader):
    """A reader of MediaWiki dumps from beginning to end."""

    suffixes = (".xml",)
    may_hang = True
    is_stream = True

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a file is XML or a part of a dump, by its name."""
        return super().matches(path) or bool(DUMP.search(without_compression(path)))

    @classmethod
    def recognises(cls, file: File) -> bool:
        """Return whether a file is a dump, by its name or its beginning. Other XML is not read."""
        if DUMP.search(without_compression(file.path)):
            return True
        if super().recognises(file) and not filesystem.is_remote(file.path):
            with suppress(OSError), open(file.path, "rb") as stream:
                return _ROOT in beginning(stream, compression_of(file.path), HEAD_BYTES)
        return False

    def read(self, part: Part) -> Iterator[Document]:
        """Yield a document for each article of the dump, and a rejected one for each other page."""
        # Markup and boxes take about half of an article's source, rarely three quarters.
        limit = 4 * self.context.corpus.rules.max_characters
        with self.open(part) as file:
            yield from read_dump(file, part.end, limit)


def read_dump(file: BinaryIO, end: int | None, max_characters: int) -> Iterator[Document]:
    """Yield the articles, and rejected pages, that end before byte `end` of the dump, or all if `end` is None.

    Wikitext of more than `max_characters` is not parsed. Raises OSError if the file cannot be read.
    """
    from lxml import etree

    from bessemer.corpus.extract.wikitext import FILE_PREFIXES

    parser, prefixes, number, num_bytes, line = etree.XMLParser(resolve_entities=False), set(FILE_PREFIXES), 0, 0, 1
    for piece in _pieces(file):
        num_bytes += len(piece)
        if end is not None and num_bytes >= end:
            return
        head, *pages = piece.split(_PAGE)
        prefixes |= {html.unescape(name.decode(errors="replace")).casefold() for name in _NAMESPACE.findall(head)}
        size, line = len(head), line + head.count(b"\n")
        for raw in pages:
            number, key, size = number + 1, f"page {number + 1}", size + len(_PAGE) + len(raw)
            try:
                yield _article(key, etree.fromstring(_PAGE + raw, parser), size, max_characters, prefixes)
            except etree.XMLSyntaxError as error:
                reason = "not_utf8" if error.code == etree.ErrorTypes.ERR_INVALID_ENCODING else "bad_record"
                position = f"line {line + (error.lineno or 1) - 1}"
                yield Document(key, size, reason=reason, detail=f"{position}: {error.msg}"[:300])
            size, line = 0, line + raw.count(b"\n")
    if num_bytes and not number:
        yield Document("0!", 0, reason="wrong_format", detail="no <page> of a MediaWiki dump in UTF-8; exclude it")


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes up to the end of each page, then the rest. A piece has at most about MAX_RECORD_BYTES."""
    buffer, searched = bytearray(), 0
    while block := file.read1(READ_BYTES):  # type: ignore[attr-defined]  # read1 returns the data before the damage
        buffer += block
        while (end := buffer.find(_PAGE_END, searched)) >= 0 or len(buffer) > MAX_RECORD_BYTES:
            end = end + len(_PAGE_END) if end >= 0 else len(buffer)
            yield bytes(buffer[:end])
            del buffer[:end]
            searched = 0
        searched = max(len(buffer) - len(_PAGE_END), 0)
    yield bytes(buffer)


def _article(key: str, page: _Element, size: int, max_characters: int, prefixes: Collection[str]) -> Document:
    """Convert the last revision of a wiki page to a document.

    It is rejected if it is a redirect, is outside the article namespace, has more than `max_characters` of wikitext or
    cannot be parsed. `size` is the page's size in bytes, and `prefixes` are link prefixes of files and categories.
    """
    from bessemer.corpus.extract.wikitext import plain_text

    def text_of(path: str) -> str:
        return (page.findtext(path) or "").strip()

    title, text = text_of("title"), text_of(f"{_REVISION}/text")
    metadata = {"title": title, "page": text_of("id")}
    metadata |= {"revision": text_of(f"{_REVISION}/id"), "date": text_of(f"{_REVISION}/timestamp")}
    record = Document(key, size, metadata={name: value[:2000] for name, value in metadata.items() if value})
    namespace, model = text_of("ns") or "0", text_of(f"{_REVISION}/model") or "wikitext"
    title, redirect = title[:200], page.find("redirect")
    if (body := page.find(f"{_REVISION}/text")) is not None and len(body):
        record.reject("bad_record", "elements or entities within the text of the page")
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
