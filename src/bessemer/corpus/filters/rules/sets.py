"""Published rule sets as filters, created from the limits in recipe/rules.py."""

from __future__ import annotations

import sys
from functools import cached_property
from math import inf
from types import new_class
from typing import Any, ClassVar

from bessemer.corpus.document import Document, Reject
from bessemer.corpus.filters.base import CleaningStep
from bessemer.corpus.filters.rules.apply import apply
from bessemer.recipe import Rules
from bessemer.recipe.rules import LIMITS

NO_BASIC_RULES: dict[str, Any] = {
    "min_characters": 0, "max_characters": sys.maxsize, "max_mean_line_length": inf, "min_alphanumeric_share": 0.0,
    "min_unique_line_share": 0.0,
}  # fmt: skip


class RuleSet(CleaningStep):
    """A filter that applies the rule sets `sets` to running text, in a fixed order. Conversations pass unchanged."""

    counts_edits = True
    sets: ClassVar[tuple[str, ...]]

    @cached_property
    def _rules(self) -> Rules:
        limits: dict[str, Any] = NO_BASIC_RULES | dict.fromkeys(self.sets, self)
        rules: Rules = Rules.model_construct(**limits)
        return rules

    def judge(self, document: Document) -> Reject | str | None:
        """Return the rejection by the first rule that the text breaks, or else the edited text."""
        return None if document.format == "chat" else apply(document.text, self._rules)


def _filter(title: str, *sets: str) -> type[RuleSet]:
    """Create a filter class named `title` that applies the rule sets `sets`. Its settings are the limits of all of them."""
    bases = (RuleSet, *(LIMITS[name] for name in sets))
    facts = {"name": sets[0] if len(sets) == 1 else title.lower(), "sets": sets, "__module__": __name__}
    return new_class(
        title, bases, exec_body=lambda body: body.update(facts, __doc__=f"The rules {' and '.join(sets)}.")
    )


Gopher = _filter("Gopher", "gopher_quality", "gopher_repetition")
GopherQuality = _filter("GopherQuality", "gopher_quality")
GopherRepetition = _filter("GopherRepetition", "gopher_repetition")
C4 = _filter("C4", "c4")
FineWeb = _filter("FineWeb", "fineweb")
Code = _filter("Code", "code")
Textbook = _filter("Textbook", "textbook")
