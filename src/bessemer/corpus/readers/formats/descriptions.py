"""The prose in installed Python packages: descriptions in METADATA, documentation, and the topics of `help()`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from bessemer.common.errors import NotText
from bessemer.corpus.document import Document
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
            yield document_of(raw, lambda: description(decode_text(raw)))
        else:
            yield from super()._documents(raw, part)


def _topics(raw: bytes) -> Iterator[Document]:
    """Yield the texts of a pydoc_data/topics.py, each a document under its name."""
    found: dict[str, str] = {}
    failed = document_of(raw, lambda: found.update(topics(raw.decode())) or "")
    if failed.reason is not None:
        yield failed
    for name, text in found.items():
        yield Document(name, len(text.encode("utf-8", "surrogatepass")), text, metadata={"topic": name})


def description(text: str) -> str:
    """Return the long description of a package METADATA file: the body, or a folded Description header."""
    text = text.replace("\r\n", "\n")
    header, _, body = text.partition("\n\n")
    if body.strip():
        return body
    found = re.search(r"^Description:(.*)((?:\n[ \t].*)*)", header, re.MULTILINE)
    if not found:
        return ""
    folded = [re.sub(r"^(?: {7}\||\t| {1,8})", "", line) for line in found[2].split("\n")[1:]]
    return "\n".join([found[1].strip(), *folded])


def topics(code: str) -> dict[str, str]:
    """Return the texts in pydoc_data/topics.py. The file is parsed as a literal, never run. Raises NotText for another."""
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.Assign) and isinstance(value := ast.literal_eval(statement.value), dict):
            return {str(name): text for name, text in value.items() if isinstance(text, str)}
    raise NotText("no dictionary of texts")
