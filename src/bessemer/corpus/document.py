"""The `Document` that flows through the corpus stage, its identity, and the columns of the published files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

# Columns of documents/part-*.parquet, all strings, sorted by (source, identity). An unknown label, language or URL is "".
# `path` is the file in the corpus, and `place` the document's position in it: "" for a whole file, else a byte offset,
# a row group and row, or a record's name.
COLUMNS = ("identity", "text", "source", "path", "place", "url", "language", "metadata", "label")
# Columns of rejected/part-*.parquet, all strings, sorted by (source, identity). corpus.keep_rejected decides whether
# `excerpt` and `text` are filled or "".
REJECTED_COLUMNS = ("identity", "source", "path", "place", "url", "language", "reason", "detail", "excerpt", "text")
EXCERPT_CHARACTERS = 300  # characters of a rejected document that the report shows


class Reject(NamedTuple):
    """The reason why a filter rejects a document.

    Attributes:
        reason: One word for the reason; "" for a filter that has only one.
        detail: The measured value, or the text that caused the rejection.
    """

    reason: str = ""
    detail: str = ""


@dataclass(slots=True)
class Document:
    """A document that a reader yields. It has text, or the reason why there is none.

    Attributes:
        key: Position in the file: "" for a whole file, else a record number, a byte offset or a name.
        num_bytes: Number of input bytes that hold this document.
        text: The text, which filters may edit.
        reason: Reason of the rejection; None for a document that is kept.
        detail: The measured value, or the text that caused the rejection.
        metadata: Other facts about the document, such as its URL, by name.
        label: Class label that the source gives the document; "" for none.
        source: Name of the source.
        path: Name of its file in the corpus.
        format: Format of its file.
        language: ISO 639 code; "" if the language was not identified.
        counts: (table, key, amount) to add to the statistics; see `count`.
    """

    key: str
    num_bytes: int
    text: str = ""
    reason: str | None = None
    detail: str = ""
    metadata: dict[str, object] = field(default_factory=dict)
    label: str = ""
    source: str = ""
    path: str = ""
    format: str = ""
    language: str = ""
    counts: list[tuple[str, str, int]] = field(default_factory=list)

    def reject(self, reason: str, detail: str = "") -> None:
        """Reject the document for a reason. Later filters do not see it."""
        self.reason, self.detail = reason, detail

    def count(self, table: str, key: str, amount: int = 1) -> None:
        """Add `amount` to the count `key` in a table of the statistics, for example `count("personal_data", "email", 2)`."""
        self.counts.append((table, key, amount))


def identity(source: str, path: str, key: str) -> str:
    """Return the 128-bit hexadecimal identity of the document with this `key` in the file `path` of a source.

    It does not depend on the run, the reading order, the machine or the content.
    """
    name = "\0".join((source, path, key)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=16).hexdigest()


def printable(text: str) -> str:
    """Replace unpaired surrogates by backslash escapes, so that UTF-8 can encode the text."""
    return text.encode("utf-8", "backslashreplace").decode()
