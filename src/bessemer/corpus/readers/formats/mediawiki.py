"""Dumps of wikis in MediaWiki's XML: an article is a document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import File, Part, Reader
from bessemer.corpus.readers.inflate import beginning, compression_of, without_compression
from bessemer.storage import filesystem

# How Wikipedia names its dumps, and parts of a dump, after the pages they hold.
DUMP = re.compile(r"-pages-(articles|meta)[^/]{0,80}\.xml[^/]{0,40}$", re.IGNORECASE)
DUMP_PART = re.compile(r"\.xml-p\d{1,12}p\d{1,12}(-[a-z]{1,20})?$", re.IGNORECASE)


class MediawikiReader(Reader):
    """Reads a dump from its beginning to its end."""

    suffixes = (".xml",)
    may_hang = True

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a file is XML or a part of a dump, by its name."""
        return super().matches(path) or bool(DUMP_PART.search(without_compression(path)))

    @classmethod
    def recognises(cls, file: File) -> bool:
        """Return whether a file is named as a dump, or begins as one; other XML is not read."""
        plain = without_compression(file.path)
        if DUMP.search(plain) or DUMP_PART.search(plain):
            return True
        if super().recognises(file) and not filesystem.is_remote(file.path):
            with suppress(OSError), open(file.path, "rb") as stream:
                return b"<mediawiki" in beginning(stream, compression_of(file.path))
        return False

    def split(self, file: File) -> Iterable[Part]:
        """Return one part, the dump; where a sample is read its beginning."""
        return [self._stream(file)]

    def read(self, part: Part) -> Iterator[Document]:
        """Yield the articles."""
        from bessemer.corpus.readers.wiki_dump import read_dump

        limit = (
            4 * self.context.corpus.rules.max_characters
        )  # marks and boxes take half of an article, seldom three quarters
        with filesystem.open_file(part.path, self.context.source) as file:
            yield from read_dump(file, part.end, compression_of(part.path), limit)
