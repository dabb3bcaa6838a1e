"""Whether a clean text is kept, and the one reason when it is not: basic rules, and published sets by choice.

`judge` is the basic rules alone; `apply` is all that a recipe switches on; `judge_url` looks at where a document comes
from; `statistics` is what the sets look at. What each set does: docs/rules.md. To add a rule, add its limit to
recipe/rules.py and an entry to `table.RULES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bessemer.corpus.rules.apply import alphanumeric_share, apply, judge
from bessemer.corpus.rules.lists import judge_url
from bessemer.corpus.rules.table import RULE_REASONS, Finding, Judgement

if TYPE_CHECKING:
    from bessemer.corpus.text.statistics import Statistics

__all__ = ["RULE_REASONS", "Finding", "Judgement", "alphanumeric_share", "apply", "judge", "judge_url", "statistics"]


def statistics(text: str) -> Statistics:
    """The counts over a text; needs Numba. A lone surrogate counts as a character."""
    from bessemer.corpus.text.statistics import Statistics

    return Statistics(text)
