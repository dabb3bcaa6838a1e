"""Prose in installed Python packages: descriptions in METADATA, documentation, and the topics of `help()`."""

from __future__ import annotations

import ast
import email
import re
from collections.abc import Iterator

from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import Part
from bessemer.corpus.readers.encodings import decode_text
from bessemer.corpus.readers.formats.text import TextReader, document_of

TOPICS = "pydoc_data/topics.py"  # a dictionary with the texts of the language reference, for `help()`


class DescriptionsReader(TextReader):
    """A reader of prose in installed Python packages: METADATA, documentation, and the topics of `help()`.

    It skips .txt files, which are licences, word lists and tables of data.
    """

    suffixes = ("METADATA", ".rst", ".md", TOPICS)
    is_compressible = False
    is_guessed = False
    has_encoding = False

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a file has one of the endings, which are case-sensitive."""
        return path.endswith(cls.suffixes)

    def _documents(self, raw: bytes, part: Part) -> Iterator[Document]:
        if part.path.endswith(TOPICS):
            for name, text in topics(raw.decode()).items():
                yield Document(name, len(text.encode("utf-8", "surrogatepass")), text, metadata={"topic": name})
        elif part.path.endswith("METADATA"):
            yield document_of(raw, lambda: description(decode_text(raw)))
        else:
            yield from super()._documents(raw, part)


def description(text: str) -> str:
    """Return the long description in a package's METADATA file: its body, or a folded Description header."""
    message = email.message_from_string(text.replace("\r\n", "\n"))
    first, *folded = message.get("Description", "").split("\n")
    header = "\n".join([first, *(re.sub(r"^(?: {7}\||\t| {1,8})", "", line) for line in folded)])
    return body if (body := str(message.get_payload())).strip() else header


def topics(code: str) -> dict[str, str]:
    """Return the texts in pydoc_data/topics.py by topic. The code is parsed as a literal and never run.

    Raises ValueError for other code.
    """
    try:
        for statement in ast.parse(code).body:
            if isinstance(statement, ast.Assign) and isinstance(value := ast.literal_eval(statement.value), dict):
                return {str(name): text for name, text in value.items() if isinstance(text, str)}
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(error) from None
    raise ValueError("no dictionary of texts")
