"""Quality rules: the basic rules, and published rule sets by choice; see docs/rules.md.

`judge` applies the basic rules, `apply` all rules of a recipe, `judge_url` the URL rules. To add a rule, add its limit to
recipe/rules.py and a line to rules.toml.
"""

from bessemer.corpus.rules.apply import alphanumeric_share, apply, judge
from bessemer.corpus.rules.lists import judge_url
from bessemer.corpus.rules.table import RULE_REASONS, Finding, RulesVerdict

__all__ = ["RULE_REASONS", "Finding", "RulesVerdict", "alphanumeric_share", "apply", "judge", "judge_url"]
