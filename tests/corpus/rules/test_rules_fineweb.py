from __future__ import annotations

import pytest

from bessemer.corpus.rules import statistics
from bessemer.corpus.rules.fineweb import judge
from bessemer.recipe.rules import FineWeb

ANYTHING = {
    "min_terminal_line_share": 0.0, "max_short_line_share": 1.0, "max_duplicate_character_share": 1.0,
    "max_line_feeds_per_word": 1e9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "key", "value", "reason"),
    [
        ("a.\nb\n \nc。\nd", "min_terminal_line_share", 0.5, "terminal_lines"),
        ("x" * 30 + "\n" + "y" * 31 + "\n\nz", "max_short_line_share", 2 / 3, "short_lines"),
        ("aaa\nbb\naaa\n", "max_duplicate_character_share", 3 / 8, "duplicate_characters"),
        ("one two\nthree four\n", "max_line_feeds_per_word", 0.5, "line_feeds"),
    ],
)
def test_at_both_sides(text: str, key: str, value: float, reason: str) -> None:
    found = statistics(text)
    assert judge(found, FineWeb(**{**ANYTHING, key: value})) is None
    finding = judge(found, FineWeb(**{**ANYTHING, key: value + (1e-9 if key.startswith("min") else -1e-9)}))
    assert finding is not None
    assert finding.reason == f"fineweb.{reason}"


def test_the_length_of_a_short_line() -> None:
    text = statistics("12345\n123456")
    assert judge(text, FineWeb(**{**ANYTHING, "short_line_characters": 5, "max_short_line_share": 0.5})) is None
    assert judge(text, FineWeb(**{**ANYTHING, "short_line_characters": 6, "max_short_line_share": 0.5})) is not None
    assert judge(statistics(" \n"), FineWeb()) is not None
