"""The `Filter` base class and the names of the built-in filters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from bessemer.corpus.document import Document, Reject
from bessemer.recipe.uses import ExtensionBase

SETS = {  # name of a rule set -> its class in rules/sets.py
    "gopher": "Gopher", "gopher_quality": "GopherQuality", "gopher_repetition": "GopherRepetition", "c4": "C4",
    "fineweb": "FineWeb", "code": "Code", "textbook": "Textbook",
}  # fmt: skip
BUILT_IN = {name: f"bessemer.corpus.filters.rules.sets:{title}" for name, title in SETS.items()}


class Filter(ExtensionBase, ABC):
    """A filter that keeps, edits or rejects each document. The fields of a subclass are its settings.

    Attributes:
        reasons: A dict from each reason for rejection to its meaning. By default the first line of the docstring
            describes all rejections.
        advice: Advice to users on how to keep the documents that it rejects.
        counts_edits: True if the statistics count the documents and characters that it edits.
    """

    reasons: ClassVar[Mapping[str, str]] = {}
    advice: ClassVar[str] = ""
    counts_edits: ClassVar[bool] = True

    def prepare(self) -> None:
        """Load what the filter needs. Called once in each process, before the first document."""

    @abstractmethod
    def judge(self, document: Document) -> Reject | str | None:
        """Judge a document.

        Returns:
            A `Reject` to reject it, a string to replace its text, or None to keep it unchanged.
        """

    def reason_of(self, verdict: Reject) -> str:
        """Return the reason under which the statistics count a rejection.

        It is NAME.REASON, or NAME for a filter with only one reason, where NAME is the filter's name.
        """
        return f"{self.name}.{verdict.reason}" if verdict.reason else self.name


class CleaningStep(Filter):
    """A built-in filter. Its reasons for rejection are in reasons.toml.

    An exception in a built-in filter rejects only the current document, while one in a user's filter stops the build.
    """

    counts_edits = False

    def reason_of(self, verdict: Reject) -> str:
        """Return the reason of a rejection as it is, without the filter's name as a prefix."""
        return verdict.reason


def against(value: float, limit: float, digits: int = 2) -> str:
    """Format a value and its limit, for example "0.796 (limit 0.8)".

    The value has at least `digits` decimals, and more if it would otherwise round to the other side of the limit.
    """
    if not isinstance(value, float):
        return f"{value} (limit {limit:.12g})"
    shown = (f"{value:.{places}f}" for places in range(digits, 18))
    side = (value > limit) - (value < limit)
    first = next((text for text in shown if (float(text) > limit) - (float(text) < limit) == side), f"{value}")
    return f"{first} (limit {limit:.12g})"
