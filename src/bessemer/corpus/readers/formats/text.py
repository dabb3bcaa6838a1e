"""Text files, one document each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from bessemer.common.errors import NotText
from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import Part, Reader
from bessemer.corpus.readers.encodings import decode_text, foreign_format, not_utf8
from bessemer.corpus.readers.records import MAX_RECORD_BYTES


class TextReader(Reader):
    """A reader of whole text files."""

    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".text", ".md", ".markdown", ".rst")
    has_encoding = True

    def read(self, part: Part) -> Iterator[Document]:
        """Yield the file as a document. Files that are too long or binary are rejected."""
        limit = self._max_bytes()
        with self.open(part) as file:
            raw = file.read(limit + 1)
        if len(raw) > limit:
            detail = f"{part.size} (limit {limit}) bytes" if part.size > limit else f"more than {limit} bytes, unpacked"
            yield Document("", part.size, reason="too_long", detail=detail)
        elif foreign := foreign_format(raw):
            yield Document("", part.size, reason="wrong_format", detail=foreign)
        else:
            yield from self._documents(raw, part)

    def _max_bytes(self) -> int:
        # A character has at most 4 bytes, so the rule on length would reject any longer file.
        return max(MAX_RECORD_BYTES, 4 * self.context.corpus.rules.max_characters)

    def _documents(self, raw: bytes, part: Part) -> Iterator[Document]:
        yield document_of(raw, lambda: decode_text(raw, self.context.source.encoding or ""))


def document_of(raw: bytes, extract: Callable[[], str]) -> Document:
    """Return the document of a whole file. Its text is what `extract` returns.

    If `extract` raises an exception, the document is rejected with it as the detail. `raw` is the content of the file.
    """
    try:
        return Document("", len(raw), extract())
    except UnicodeDecodeError as error:
        return not_utf8("", raw, error)
    except Exception as error:  # parsers may fail on arbitrary data in any way, which must affect only this document
        return Document("", len(raw), reason="bad_record", detail=failure(error))


def failure(error: Exception) -> str:
    """Return the reason why a parser failed, for the detail of a rejected document."""
    return str(error) if isinstance(error, NotText) else f"{type(error).__name__}: {error}"[:300]
