"""HTML files, of which each becomes one document with its main content."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bessemer.corpus.document import Document
from bessemer.corpus.extract import webpage
from bessemer.corpus.readers.base import Part
from bessemer.corpus.readers.formats.text import TextReader, document_of


class HtmlReader(TextReader):
    """A reader of whole HTML files."""

    suffixes = (".html", ".htm", ".xhtml")
    is_web = True
    may_hang = True

    def _max_bytes(self) -> int:
        return self.context.corpus.extract.max_html_bytes

    def _documents(self, raw: bytes, part: Part) -> Iterator[Document]:
        settings, metadata = self.context.corpus.extract, dict[str, Any]()
        encoding, share = self.context.source.encoding, settings.max_undecodable_share
        page = document_of(
            raw, lambda: webpage.page_text(webpage.decode_html(raw, encoding, share), settings, metadata)
        )
        page.metadata |= metadata
        yield page
