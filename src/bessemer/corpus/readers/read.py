"""Parts to documents. Whatever is wrong with a document costs that document, which is then counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress

from bessemer.common.errors import FileChanged, first_line
from bessemer.common.extensions import is_own
from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import DAMAGE, Part, Reader, build_reader, naming_faults, stamp
from bessemer.recipe import Corpus, Source
from bessemer.storage import filesystem


def read(
    source: Source, parts: Iterable[Part], corpus: Corpus, passed_over: Counter[str] | None = None
) -> Iterator[tuple[Part, Document]]:
    """Yield the documents of a source's parts, each with its part. Never raises for bad data.

    passed_over: Counts records that hold no document by nature, by type.
    A missing or unreadable file yields one rejected document per part. Raises FileChanged for a file that is not the one that was
    listed, BessemerError when an object store fails, InputError when the library of [corpus.extract] is not installed.
    """
    readers = dict[str, Reader]()
    more = {} if passed_over is None else {"passed_over": passed_over}
    for part in parts:
        if part.format not in readers:
            readers[part.format] = build_reader(source, part.format, corpus, **more)
        for document in _read_unchanged(readers[part.format], part):
            document.source, document.path, document.format = source.name, part.name, part.format
            document.label = document.label or source.label or ""
            yield part, document


def _read_unchanged(reader: Reader, part: Part) -> Iterator[Document]:
    """Yield the documents of a part, as long as the file is the one that was listed."""
    source, size = reader.context.source, part.size
    try:
        require_unchanged(part, source)
        if part.damage:
            yield Document(f"{part.start}!", part.size, reason=part.reason, detail=part.damage)
            return
        with naming_faults(reader, "read", part.name):
            documents = reader.read(part)
            for document in documents if is_own(type(reader)) else _checked(documents):
                size = max(size - document.num_bytes, 0)
                yield document
        with suppress(FileNotFoundError):  # all of it was read before it vanished
            require_unchanged(part, source)
    except DAMAGE as error:
        detail = getattr(error, "strerror", None) or first_line(error)[:300]
        yield Document(f"{part.start}!", size, reason="unreadable", detail=detail)


def _checked(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield what a user's reader yields. Raises TypeError for what is no document, and for a key that comes again."""
    keys = set[str]()
    for document in documents:
        if not isinstance(document, Document):
            raise TypeError(f"yields {type(document).__name__}, not Document")
        if document.key in keys:
            raise TypeError(f"yields two documents with the key {document.key!r}")
        keys.add(document.key)
        yield document


def require_unchanged(part: Part, source: Source) -> None:
    """Raise FileChanged where a file is not the one that was listed; OSError where it is gone."""
    if part.stamp and part.stamp != stamp(*filesystem.version(part.path, source)):
        raise FileChanged(f"corpus.sources.{source.name}: {part.name} changed while it was read")
