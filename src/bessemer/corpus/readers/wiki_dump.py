"""Articles of MediaWiki XML dumps, as plain text: pages by lxml's iterparse, wikitext by mwparserfromhell.

A damaged page costs that page: the parser starts again at the next line with <page>. Entities are never expanded.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator
from typing import BinaryIO

from lxml import etree

from bessemer.common.errors import NotText
from bessemer.corpus.document import Document
from bessemer.corpus.extract.wikitext import FILE_PREFIXES, plain_text
from bessemer.corpus.readers.base import HEAD_BYTES
from bessemer.corpus.readers.inflate import InflatedFile, beginning

LINE_BYTES = 1 << 20
_REDIRECT = re.compile(r"\s*#(?:redirect|[^\W\d_]{4,30}\s*:?\s*\[\[[^\]\n]{1,300}\]\]\s*$)", re.IGNORECASE)
ROOT, _PAGE = b"<mediawiki", b"<page>"
_FILES_AND_CATEGORIES = ("6", "14")  # keys of namespaces


def read_dump(file: BinaryIO, end: int | None, compression: str, max_characters: int) -> Iterator[Document]:
    """Yield the pages that end before byte `end` of the decompressed dump (None: all): articles, and rejected pages.

    Wikitext of more than `max_characters` is not parsed. Damage to the compressed data ends the dump, after everything before
    it. Raises OSError when the file cannot be read.
    """
    head = beginning(file, compression, HEAD_BYTES)
    if head and ROOT not in head and _PAGE not in head:
        detail = "not a MediaWiki dump in UTF-8: neither <mediawiki> nor <page> is near its beginning; exclude the file"
        yield Document("0!", 0, reason="wrong_format", detail=detail)
        return
    file.seek(0)
    content = InflatedFile(file, compression) if compression else None
    dump = _DumpLines(io.BufferedReader(content, LINE_BYTES) if content else file, is_behind_root=ROOT not in head)
    prefixes, number, before = set(FILE_PREFIXES), 0, 0  # `before`: bytes up to the last page
    while not dump.is_at_end:
        depth = 0  # pages that are open: one at most, where each has an end
        try:
            tags = ("{*}page", "{*}namespace")
            for event, element in etree.iterparse(dump, ("start", "end"), tag=tags, resolve_entities=False):
                if etree.QName(element).localname == "namespace":
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
            is_between_pages = dump.is_at_end or error.code == etree.ErrorTypes.ERR_DOCUMENT_END
            if (depth or not is_between_pages) and not (content and content.damage):
                number, size, before = number + 1, dump.num_bytes - before, dump.num_bytes
                reason = "not_utf8" if error.code == etree.ErrorTypes.ERR_INVALID_ENCODING else "bad_record"
                yield Document(f"page {number}", size, reason=reason, detail=f"line {dump.number}: {error.msg}"[:300])
            dump.is_behind_root = True
    if content and content.damage:
        detail = f"{content.damage}, after {content.num_bytes} bytes of XML, {number} pages"
        yield Document(f"page {number + 1}", 0, reason="bad_record", detail=detail)


class _DumpLines:
    """The lines of a dump. The parser gets one at a time, and so is never ahead of a damaged one."""

    def __init__(self, file: BinaryIO, is_behind_root: bool) -> None:
        self.file, self.is_behind_root = file, is_behind_root
        self.number = self.num_bytes = 0
        self.is_at_end = False

    def read(self, size: int) -> bytes:
        """Return the next line; behind a damaged page a root and the next line with a page."""
        while line := self.file.readline(LINE_BYTES):
            self.number += line.endswith(b"\n")
            self.num_bytes += len(line)
            if not self.is_behind_root:
                return line
            if _PAGE in line:
                self.is_behind_root = False
                return ROOT + b">" + line[line.index(_PAGE) :]
        self.is_at_end = True
        return b""


def _article(key: str, page: etree._Element, size: int, max_characters: int, prefixes: Collection[str]) -> Document:
    """Return a page as an article, or with the reason why it is none. Of a page with its history the last revision stays."""
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


def _children(element: etree._Element) -> dict[str, etree._Element]:
    return {etree.QName(child).localname: child for child in element if isinstance(child.tag, str)}


def _text(elements: dict[str, etree._Element], name: str) -> str:
    return (elements[name].text or "").strip() if name in elements else ""
