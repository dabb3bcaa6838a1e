"""The prose in installed Python packages: descriptions in METADATA, documentation, and the topics of `help()`."""

from __future__ import annotations

from collections.abc import Iterator

from bessemer.corpus.document import Document
from bessemer.corpus.extract import packages
from bessemer.corpus.readers.base import Part
from bessemer.corpus.readers.encodings import decode_text
from bessemer.corpus.readers.formats.text import TextReader, document_of

TOPICS = "pydoc_data/topics.py"  # the language reference that Python carries for `help()`: a dictionary of texts


class DescriptionsReader(TextReader):
    """Reads prose of packages; not their .txt files, which are licences, word lists and tables of data."""

    suffixes = ("METADATA", ".rst", ".md", TOPICS)
    is_compressible = False
    is_guessed = False
    has_encoding = False
    is_one_document = False

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a file has one of the endings, in the same case."""
        return path.endswith(cls.suffixes)

    def _documents(self, raw: bytes, part: Part) -> Iterator[Document]:
        if part.path.endswith(TOPICS):
            yield from _topics(raw)
        elif part.path.endswith("METADATA"):
            yield document_of(raw, lambda: packages.description(decode_text(raw)))
        else:
            yield from super()._documents(raw, part)


def _topics(raw: bytes) -> Iterator[Document]:
    """Yield the texts of a pydoc_data/topics.py, each a document under its name."""
    topics: dict[str, str] = {}
    failed = document_of(raw, lambda: topics.update(packages.topics(raw.decode())) or "")
    if failed.reason is not None:
        yield failed
    for name, text in topics.items():
        yield Document(name, len(text.encode("utf-8", "surrogatepass")), text, metadata={"topic": name})
