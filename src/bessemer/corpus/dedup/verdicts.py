"""What deduplication found out: a verdict on each document, and the counts that go into the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bessemer.recipe import Dedup

if TYPE_CHECKING:
    import numpy as np

KEPT, EXACT, NEAR = 0, 1, 2

HISTOGRAM_BINS = 40
"""Bins of the Jaccard histogram: 0.025 each, so that the usual thresholds lie between two."""


@dataclass(frozen=True)
class DedupStatistics:
    """Counts over all documents that were compared; those of earlier corpora are counted apart."""

    documents: int = 0
    earlier_documents: int = 0
    removed: dict[str, int] = field(default_factory=dict)
    """Documents removed, by method (exact, near)."""
    removed_characters: dict[str, int] = field(default_factory=dict)
    """Characters in them."""
    removed_against: int = 0
    """Of these, documents that stand in an earlier corpus."""
    clusters: dict[int, int] = field(default_factory=dict)
    """How many groups of so many documents (the one that stays included) share one text, exactly or nearly."""
    jaccard: list[int] = field(default_factory=lambda: [0] * HISTOGRAM_BINS)
    """Near duplicates by their similarity to what stays: bin i holds 0.025 i to 0.025 (i + 1)."""
    jaccard_is: str = "estimated"
    """estimated (from signatures) or verified (from the texts' shingles)."""
    min_jaccard: float = 0.0
    """From which Jaccard on documents were linked; a removed one may be linked to what stays through others."""

    def to_json(self) -> dict[str, Any]:
        """For statistics.json."""
        return {
            "documents": self.documents,
            "earlier_documents": self.earlier_documents,
            "removed": self.removed,
            "removed_characters": self.removed_characters,
            "removed_against_earlier": self.removed_against,
            "clusters": [{"documents": size, "clusters": self.clusters[size]} for size in sorted(self.clusters)],
            "jaccard": [
                {"from": round(number / HISTOGRAM_BINS, 3), "documents": count}
                for number, count in enumerate(self.jaccard)
            ],
            "jaccard_is": self.jaccard_is,
            "min_jaccard": self.min_jaccard,
        }


@dataclass(frozen=True)
class Verdicts:
    """What became of each document that passed the rules; rows are sorted by identity."""

    identities: np.ndarray
    """16-byte strings (dtype S16): first those of this corpus, sorted; behind them, sorted, those of earlier ones."""
    verdict: np.ndarray
    """KEPT, EXACT or NEAR."""
    keeper: np.ndarray
    """Row of the document that stays instead; its own row for one that is kept."""
    similarity: np.ndarray
    """Jaccard to the keeper (near duplicates; else 1), estimated, or the true one where it was verified."""
    num_documents: int
    """Rows of this corpus; keepers from this row on stand in an earlier one."""
    earlier: dict[int, str] = field(default_factory=dict)
    """Where the keepers of earlier corpora stand, by row: the corpus, then the path."""
    statistics: DedupStatistics = field(default_factory=DedupStatistics)

    def rows(self, identities: Sequence[str]) -> np.ndarray:
        """Rows of documents of this corpus by their identity in hexadecimal."""
        import numpy as np

        rows: np.ndarray = np.searchsorted(self.identities[: self.num_documents], packed(identities))
        return rows


def packed(identities: Sequence[str]) -> np.ndarray:
    """Hexadecimal identities as 16-byte strings, whose order is the same."""
    import numpy as np

    return np.frombuffer(bytes.fromhex("".join(identities)), dtype="S16")


def identity_of(name: bytes) -> str:
    """The identity in hexadecimal of a 16-byte string, of which NumPy drops the zeros at the end."""
    return name.ljust(16, b"\0").hex()


def statistics(
    verdict: np.ndarray,
    keeper: np.ndarray,
    similarity: np.ndarray,
    characters: np.ndarray,
    num_documents: int,
    settings: Dedup,
) -> DedupStatistics:
    """Count; the first four by row, earlier corpora's documents included."""
    import numpy as np

    removed = np.flatnonzero(verdict != KEPT)
    near = np.flatnonzero(verdict == NEAR)
    of_each = {"exact": verdict == EXACT, "near": verdict == NEAR}
    bins = np.minimum((similarity[near] * HISTOGRAM_BINS + 1e-6).astype(np.int64), HISTOGRAM_BINS - 1)
    _, others = np.unique(keeper[removed], return_counts=True)
    return DedupStatistics(
        documents=num_documents,
        earlier_documents=len(verdict) - num_documents,
        removed={name: int(chosen.sum()) for name, chosen in of_each.items()},
        removed_characters={name: int(characters[chosen].sum(dtype=np.int64)) for name, chosen in of_each.items()},
        removed_against=int((keeper[removed] >= num_documents).sum()),
        clusters=dict(Counter((others + 1).tolist())),
        jaccard=np.bincount(bins, minlength=HISTOGRAM_BINS).tolist(),
        jaccard_is="verified" if settings.verify else "estimated",
        min_jaccard=settings.min_jaccard,
    )
