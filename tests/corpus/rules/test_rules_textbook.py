from __future__ import annotations

import pytest

from bessemer.corpus.rules import statistics
from bessemer.corpus.rules.textbook import judge
from bessemer.recipe.rules import Textbook

ANYTHING = {
    "min_characters": 0, "max_line_feeds_per_character": 1.0, "min_distinct_word_share": 0.0, "max_boilerplate_phrases": 99,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "key", "value", "reason"),
    [
        ("x" * 200, "min_characters", 200, "characters"),
        ("a\nb\ncd", "max_line_feeds_per_character", 2 / 6, "line_feeds"),
        ("The the a A b", "min_distinct_word_share", 3 / 5, "distinct_words"),
        ("Cookie! Click here. All rights reserved. click here", "max_boilerplate_phrases", 3, "boilerplate"),
    ],
)
def test_at_both_sides(text: str, key: str, value: float, reason: str) -> None:
    found = statistics(text)
    assert judge(found, Textbook(**{**ANYTHING, key: value})) is None
    beyond = (1 if isinstance(value, int) else 1e-9) * (1 if key.startswith("min") else -1)
    finding = judge(found, Textbook(**{**ANYTHING, key: value + beyond}))
    assert finding is not None
    assert finding.reason == f"textbook.{reason}"
