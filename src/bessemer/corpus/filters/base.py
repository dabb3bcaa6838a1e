"""The base class of filters, and the built-in filters by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from bessemer.corpus.document import Document, Reject
from bessemer.recipe.uses import ExtensionBase

SETS = {  # classes of the rule sets
    "gopher": "Gopher", "gopher_quality": "GopherQuality", "gopher_repetition": "GopherRepetition", "c4": "C4",
    "fineweb": "FineWeb", "code": "Code", "textbook": "Textbook",
}  # fmt: skip
BUILT_IN = {name: f"bessemer.corpus.filters.rules.sets:{title}" for name, title in SETS.items()}


class Filter(ExtensionBase, ABC):
    """Keeps, edits or rejects each document. Fields of a subclass are its settings.

    Attributes:
        reasons: The meaning of each reason for which it rejects, by its word; left out: the first line of the docstring.
        advice: How to keep what it rejects.
        counts_edits: The statistics count the documents and characters that it edits.
    """

    reasons: ClassVar[Mapping[str, str]] = {}
    advice: ClassVar[str] = ""
    counts_edits: ClassVar[bool] = True

    def prepare(self) -> None:
        """Load what the filter needs, once in each process, before the first document."""

    @abstractmethod
    def judge(self, document: Document) -> Reject | str | None:
        """Return why a document is rejected, its edited text, or None to keep it as it is."""

    def reason_of(self, verdict: Reject) -> str:
        """Return the reason under which a document is counted: NAME.REASON, or NAME."""
        return f"{self.name}.{verdict.reason}" if verdict.reason else self.name


class CleaningStep(Filter):
    """A filter of this package: its reasons are those of reasons.toml, and a failure costs the document alone."""

    counts_edits = False

    def reason_of(self, verdict: Reject) -> str:
        """Return the reason as it is."""
        return verdict.reason


def against(value: float, limit: float, digits: int = 2) -> str:
    """Such as "0.796 (limit 0.8)": with more than `digits` after the point where the side of the limit needs them."""
    if not isinstance(value, float):  # a count
        return f"{value} (limit {limit:.12g})"
    shown = (f"{value:.{places}f}" for places in range(digits, 18))
    side = (value > limit) - (value < limit)
    first = next((text for text in shown if (float(text) > limit) - (float(text) < limit) == side), f"{value}")
    return f"{first} (limit {limit:.12g})"
