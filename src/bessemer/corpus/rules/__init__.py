"""Quality rules: the basic rules, and published rule sets by choice; see docs/rules.md.

`judge` applies the basic rules, `apply` all rules of a recipe, `judge_url` the URL rules; `statistics` are the counts
that rules read. To add a rule, add its limit to recipe/rules.py and an entry to `table.RULES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bessemer.corpus.rules.apply import alphanumeric_share, apply, judge
from bessemer.corpus.rules.lists import judge_url
from bessemer.corpus.rules.table import RULE_REASONS, Finding, RulesVerdict

if TYPE_CHECKING:
    from bessemer.corpus.text.statistics import Statistics

__all__ = ["RULE_REASONS", "Finding", "RulesVerdict", "alphanumeric_share", "apply", "judge", "judge_url", "statistics"]


def statistics(text: str) -> Statistics:
    """The counts over a text; needs Numba. A lone surrogate counts as a character."""
    from bessemer.corpus.text.statistics import Statistics

    return Statistics(text)
