"""The document that flows through the corpus stage: its identity, its columns, and why it can be rejected."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

# Columns of documents/part-*.parquet, all strings; sorted by (source, identity). A document without a label has "", one
# whose language was not looked for as well. `path` is the file in the corpus; `place` where the document stands in it:
# "" for a whole file, else its key (a byte offset, a row group and row, a record's name); `url` "" where none is known.
COLUMNS = ("identity", "text", "source", "path", "place", "url", "language", "metadata", "label")
# Columns of rejected/part-*.parquet, all strings; sorted by (source, identity). `excerpt` and `text` are "" where
# corpus.keep_rejected leaves them out.
REJECTED_COLUMNS = ("identity", "source", "path", "place", "url", "language", "reason", "detail", "excerpt", "text")
EXCERPT_CHARACTERS = 300  # characters of a rejected document that are kept for the report


class Reject(NamedTuple):
    """Why a filter rejects a document.

    Attributes:
        reason: A word for the reason, of a filter that has several.
        detail: The measured value, or what was found.
    """

    reason: str = ""
    detail: str = ""


@dataclass(slots=True)
class Document:
    """A document: what a reader yields for one place of a file. It has text, or the reason why there is none."""

    key: str  # the place within the file: "" for a whole file, else a record number, a byte offset or a name
    num_bytes: int  # bytes of the input that this record took
    text: str = ""
    reason: str | None = None
    detail: str = ""
    metadata: dict[str, object] = field(default_factory=dict)
    label: str = ""  # the class a person gave it; "" for none
    source: str = ""
    path: str = ""  # of its file, as the corpus names it
    format: str = ""  # of the file that it was read from
    language: str = ""  # ISO 639 code, where a step looked for it
    counts: list[tuple[str, str, int]] = field(default_factory=list)  # table, key and amount, for the statistics

    def reject(self, reason: str, detail: str = "") -> None:
        """Give it the one reason for which it is not kept; the steps after this one do not see it."""
        self.reason, self.detail = reason, detail

    def count(self, table: str, key: str, amount: int = 1) -> None:
        """Add to a number of the statistics, for example count("personal_data", "email", 2)."""
        self.counts.append((table, key, amount))


def identity(source: str, path: str, key: str) -> str:
    """128 bits in hexadecimal, from where the document stands: independent of run, order, machine and
    content."""
    place = "\0".join((source, path, key)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(place, digest_size=16).hexdigest()


def printable(text: str) -> str:
    """Text that UTF-8 can hold: halves of surrogate pairs become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
