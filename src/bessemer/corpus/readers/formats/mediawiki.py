"""Dumps of wikis in MediaWiki's XML: an article is a document. Pages by lxml's iterparse, wikitext by mwparserfromhell.

A damaged page costs that page: the parser starts again at the next line with <page>. Entities are never expanded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from bessemer.common.errors import NotText
from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import HEAD_BYTES, File, Part, Reader
from bessemer.corpus.readers.inflate import beginning, compression_of, without_compression
from bessemer.storage import filesystem

if TYPE_CHECKING:
    from lxml.etree import _Element

LINE_BYTES = 1 << 20
# How Wikipedia names its dumps, and parts of a dump, after the pages they hold.
DUMP = re.compile(
    r"-pages-(articles|meta)[^/]{0,80}\.xml[^/]{0,40}$|\.xml-p\d{1,12}p\d{1,12}(-[a-z]{1,20})?$", re.IGNORECASE
)
_REDIRECT = re.compile(r"\s*#(?:redirect|[^\W\d_]{4,30}\s*:?\s*\[\[[^\]\n]{1,300}\]\]\s*$)", re.IGNORECASE)
_ROOT, _PAGE = b"<mediawiki", b"<page>"
_FILES_AND_CATEGORIES = ("6", "14")  # keys of namespaces


class MediawikiReader(Reader):
    """Reads a dump from its beginning to its end."""

    suffixes = (".xml",)
    may_hang = True

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a file is XML or a part of a dump, by its name."""
        return super().matches(path) or bool(DUMP.search(without_compression(path)))

    @classmethod
    def recognises(cls, file: File) -> bool:
        """Return whether a file is named as a dump, or begins as one; other XML is not read."""
        if DUMP.search(without_compression(file.path)):
            return True
        if super().recognises(file) and not filesystem.is_remote(file.path):
            with suppress(OSError), open(file.path, "rb") as stream:
                return _ROOT in beginning(stream, compression_of(file.path), HEAD_BYTES)
        return False

    def split(self, file: File) -> Iterable[Part]:
        """Return one part, the dump; where a sample is read its beginning."""
        return [self._stream(file)]

    def read(self, part: Part) -> Iterator[Document]:
        """Yield the articles."""
        # Marks and boxes take half of an article, seldom three quarters.
        limit = 4 * self.context.corpus.rules.max_characters
        with self.open(part) as file:
            yield from read_dump(file, part.end, limit)


def read_dump(file: BinaryIO, end: int | None, max_characters: int) -> Iterator[Document]:
    """Yield the pages that end before byte `end` of the dump (None: all): articles, and rejected pages.

    Wikitext of more than `max_characters` is not parsed. Raises OSError when the file cannot be read.
    """
    from lxml import etree

    from bessemer.corpus.extract.wikitext import FILE_PREFIXES

    dump, prefixes, number, before = _DumpLines(file), set(FILE_PREFIXES), 0, 0  # `before`: bytes up to the last page
    while not dump.is_at_end:
        depth = 0  # pages that are open: one at most, where each has an end
        try:
            tags = ("{*}page", "{*}namespace")
            for event, element in etree.iterparse(dump, ("start", "end"), tag=tags, resolve_entities=False):
                if _name(element) == "namespace":
                    if element.get("key") in _FILES_AND_CATEGORIES and element.text:
                        prefixes.add(element.text.casefold())
                    continue
                depth += 1 if event == "start" else -1
                if event == "end":
                    if end is not None and dump.num_bytes >= end:
                        return
                    number, size, before = number + 1, dump.num_bytes - before, dump.num_bytes
                    yield _article(f"page {number}", element, size, max_characters, prefixes)
                    element.clear()
                    while element.getprevious() is not None:  # memory stays constant
                        del element.getparent()[0]
        except etree.XMLSyntaxError as error:
            if depth or not (dump.is_at_end or error.code == etree.ErrorTypes.ERR_DOCUMENT_END):
                number, size, before = number + 1, dump.num_bytes - before, dump.num_bytes
                reason = "not_utf8" if error.code == etree.ErrorTypes.ERR_INVALID_ENCODING else "bad_record"
                yield Document(f"page {number}", size, reason=reason, detail=f"line {dump.number}: {error.msg}"[:300])
            dump.is_within = False
    if dump.num_bytes and not dump.has_begun:
        detail = "not a MediaWiki dump in UTF-8: it has neither <mediawiki> nor <page>; exclude the file"
        yield Document("0!", 0, reason="wrong_format", detail=detail)


class _DumpLines:
    """The lines of a dump. The parser gets one at a time, and so is never ahead of a damaged one."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.number = self.num_bytes = 0
        self.has_begun = self.is_within = self.is_at_end = False

    def read(self, size: int) -> bytes:
        """Return the next line; at the beginning and behind a damaged page the next one with a root or a page."""
        while line := self.file.readline(LINE_BYTES):
            self.number += line.endswith(b"\n")
            self.num_bytes += len(line)
            if self.is_within:
                return line
            if _ROOT in line or _PAGE in line:
                self.has_begun = self.is_within = True
                return line if _ROOT in line else _ROOT + b">" + line[line.index(_PAGE) :]
        self.is_at_end = True
        return b""


def _article(key: str, page: _Element, size: int, max_characters: int, prefixes: Collection[str]) -> Document:
    """Return a page as an article, or with the reason why it is none. Of a page with its history the last revision stays."""
    from bessemer.corpus.extract.wikitext import plain_text

    fields = _children(page)
    revision = _children(fields["revision"]) if "revision" in fields else {}
    title, text = _text(fields, "title"), _text(revision, "text")
    metadata = {"title": title, "page": _text(fields, "id")}
    metadata |= {"revision": _text(revision, "id"), "date": _text(revision, "timestamp")}
    record = Document(key, size, metadata={name: value[:2000] for name, value in metadata.items() if value})
    namespace, model = _text(fields, "ns") or "0", _text(revision, "model") or "wikitext"
    title, redirect = title[:200], fields.get("redirect")
    if "page" in fields:
        record.reject("bad_record", "the page has no end")
    elif "text" in revision and len(revision["text"]):
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


def _name(element: _Element) -> str:
    """Return the name of an element without its namespace."""
    return str(element.tag).rpartition("}")[2]


def _children(element: _Element) -> dict[str, _Element]:
    return {_name(child): child for child in element if isinstance(child.tag, str)}


def _text(elements: dict[str, _Element], name: str) -> str:
    return (elements[name].text or "").strip() if name in elements else ""
