from __future__ import annotations

import pytest

from bessemer.corpus.rules import statistics
from bessemer.corpus.rules.nemo import judge
from bessemer.recipe.rules import Nemo

ANYTHING = {name: 1.0 if name.startswith("max") else 0.0 for name in Nemo.model_fields}


@pytest.mark.parametrize(
    ("text", "key", "value", "reason"),
    [
        ("ab c!é-", "max_non_alphanumeric_share", 3 / 7, "non_alphanumeric"),
        ("a1b2٣c", "max_digit_share", 0.5, "digits"),
        ("see https://x.org/a now", "max_url_share", 15 / 23, "urls"),
        ("a b\tc\nd", "max_white_space_share", 3 / 7, "white_space"),
        ("f(x)[1]", "max_bracket_share", 4 / 7, "brackets"),
        ("Our Privacy Policy\n\nb\n\nc\n\nuse cookies", "max_boilerplate_share", 0.5, "boilerplate"),
        ("a.\nb\nc!\nd", "max_unmarked_line_share", 0.5, "unmarked_lines"),
        ("a\nb\na\nc", "min_distinct_line_share", 0.75, "lines"),
        ("aa\nb\naa\nc", "min_distinct_line_character_share", 4 / 6, "line_characters"),
        ("a\n\nb\n\na\n\nc", "min_distinct_paragraph_share", 0.75, "paragraphs"),
        ("aa\n\nb\n\naa\n\nc", "min_distinct_paragraph_character_share", 4 / 6, "paragraph_characters"),
    ],
)
def test_at_both_sides(text: str, key: str, value: float, reason: str) -> None:
    found = statistics(text)
    assert judge(found, Nemo(**{**ANYTHING, key: value})) is None
    finding = judge(found, Nemo(**{**ANYTHING, key: value + (1e-9 if key.startswith("min") else -1e-9)}))
    assert finding is not None
    assert finding.reason == f"nemo.{reason}"


def test_lorem_ipsum_counts_as_all() -> None:
    finding = judge(statistics("a\n\nb\n\nc\n\nd lorem ipsum e"), Nemo(**{**ANYTHING, "max_boilerplate_share": 0.9}))
    assert finding is not None
    assert finding.reason == "nemo.boilerplate"
