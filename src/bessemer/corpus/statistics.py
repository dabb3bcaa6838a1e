"""The funnel: what came in, what stayed, and why the rest did not; the counts must add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bessemer.corpus.document import REASONS
from bessemer.errors import BessemerError

EXAMPLES = 3
"""Examples kept for each reason: the first ones by identity, so that they are the same in every build."""


@dataclass
class Rejected:
    """The documents of a source rejected for one reason."""

    documents: int = 0
    bytes: int = 0
    """Bytes of the input."""
    examples: list[dict[str, str]] = field(default_factory=list)
    """Each {path, excerpt, detail}."""


@dataclass
class Funnel:
    """The documents of one source on their way in."""

    source: str
    format: str
    files: int
    documents_in: int = 0
    bytes_in: int = 0
    """Bytes of the input that the documents took: file sizes, JSONL lines, Parquet cells."""
    documents_kept: int = 0
    bytes_kept: int = 0
    """Bytes of clean text in UTF-8."""
    rejected: dict[str, Rejected] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)
    """Kept documents by the power of two (rounded down) of their length in characters."""

    def reject(self, reason: str, num_bytes: int, path: str, excerpt: str, detail: str) -> None:
        """Count one rejected document."""
        entry = self.rejected.setdefault(reason, Rejected())
        entry.documents += 1
        entry.bytes += num_bytes
        if len(entry.examples) < EXAMPLES:
            entry.examples.append({"path": path, "excerpt": excerpt, "detail": detail})

    def check(self) -> None:
        """Documents in = kept + rejected for each reason, or a BessemerError: a document went missing."""
        rejected = sum(entry.documents for entry in self.rejected.values())
        if self.documents_in != self.documents_kept + rejected:
            raise BessemerError(
                f"corpus: the counts of source {self.source} do not add up: {self.documents_in} documents "
                f"in, {self.documents_kept} kept, {rejected} rejected; nothing was written; please report it"
            )

    def top_reasons(self) -> str:
        """The commonest reasons with their counts and an example's detail, for an error message."""
        common = sorted(self.rejected.items(), key=lambda item: (-item[1].documents, item[0]))[:3]
        shown = []
        for reason, entry in common:
            detail = entry.examples[0]["detail"]
            shown.append(f"{reason} {entry.documents}" + (f" ({detail})" if detail else ""))
        return ", ".join(shown)

    def to_json(self) -> dict[str, Any]:
        """For statistics.json; reasons in the order of REASONS."""
        return {
            "source": self.source,
            "format": self.format,
            "files": self.files,
            "documents_in": self.documents_in,
            "bytes_in": self.bytes_in,
            "documents_kept": self.documents_kept,
            "bytes_kept": self.bytes_kept,
            "rejected": {
                reason: {
                    "documents": self.rejected[reason].documents,
                    "bytes": self.rejected[reason].bytes,
                    "examples": self.rejected[reason].examples,
                }
                for reason in REASONS
                if reason in self.rejected
            },
            "length_histogram": [
                {"from_characters": 1 << power, "documents": self.lengths[power]} for power in sorted(self.lengths)
            ],
        }


def totals(funnels: Iterable[Funnel]) -> dict[str, Any]:
    """The sums over all sources."""
    every = list(funnels)
    return {
        "files": sum(funnel.files for funnel in every),
        "documents_in": sum(funnel.documents_in for funnel in every),
        "bytes_in": sum(funnel.bytes_in for funnel in every),
        "documents_kept": sum(funnel.documents_kept for funnel in every),
        "bytes_kept": sum(funnel.bytes_kept for funnel in every),
        "rejected": reasons(every),
    }


def reasons(funnels: Iterable[Funnel]) -> dict[str, int]:
    """Rejected documents by reason, over all sources."""
    counts: Counter[str] = Counter()
    for funnel in funnels:
        counts.update({reason: entry.documents for reason, entry in funnel.rejected.items()})
    return {reason: counts[reason] for reason in REASONS if reason in counts}
