"""The record that flows through the corpus stage: its identity, its columns, and why it can be rejected."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from bessemer.corpus.rules.findings import RULE_REASONS

COLUMNS = ("identity", "text", "source", "path", "metadata", "label")
"""Columns of documents/part-*.parquet, all strings; sorted by (source, identity). A document without a label has ""."""

REJECTED_COLUMNS = ("identity", "source", "path", "reason", "excerpt", "detail")
"""Columns of rejected/part-*.parquet, all strings; sorted by (source, identity)."""

REASONS = {
    "unreadable": "the file could not be opened or read",
    "not_utf8": "the bytes are not UTF-8",
    "bad_record": "the record is damaged or has no text",
    "empty": "no text is left after extraction",
    "too_short": "fewer characters than corpus.rules.min_characters",
    "too_long": "more characters than corpus.rules.max_characters",
    "long_lines": "mean line longer than corpus.rules.max_mean_line_length",
    "not_text": "too few letters and digits, or no text a person wrote",
    "repetitive": "too few distinct lines",
    **RULE_REASONS,
    "exact_duplicate": "the same text stands in the corpus already",
    "near_duplicate": "nearly the same text stands in the corpus already",
}
"""Every reason for which a document can be rejected, in the order in which they are looked for. A document
has one."""

EXCERPT_CHARACTERS = 300
"""Characters of a rejected document that are kept for the report."""


@dataclass(slots=True)
class Record:
    """What a reader found in one place of a file: text, or the reason why there is none."""

    key: str
    """The place within the file: "" for a whole file, else a record number, a byte offset or a name."""
    num_bytes: int
    """Bytes of the input that this record took."""
    text: str = ""
    reason: str | None = None
    detail: str = ""
    metadata: dict[str, object] = field(default_factory=dict)
    label: str = ""
    """The class a person gave it; "" for none."""


def identity(source: str, path: str, key: str) -> str:
    """128 bits in hexadecimal, from where the document stands: independent of run, order, machine and
    content."""
    place = "\0".join((source, path, key)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(place, digest_size=16).hexdigest()


def excerpt(text: str) -> str:
    """The beginning of a text, as it is shown for a rejected document."""
    return text[:EXCERPT_CHARACTERS]
