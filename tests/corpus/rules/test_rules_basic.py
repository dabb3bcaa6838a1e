import time

import pytest

from bessemer.corpus.rules import alphanumeric_share, judge
from bessemer.recipe import Rules

RULES = Rules()
LINE = "a line of text that says something number {}\n"
GOOD = "".join(LINE.format(number) for number in range(20))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD, None),
        ("", "empty"),
        (" \n\t ", "empty"),
        ("short", "too_short"),
        ("x" * 199, "too_short"),
        ("ab cd " * 200_000, "too_long"),
        ("word " * 300, "long_lines"),
        ("+-*/ {}()\n" * 50, "not_text"),
        ("+–—“” …€\n" * 50, "not_text"),
        ("the same line again\n" * 50, "repetitive"),
    ],
)
def test_judge(text: str, reason: str | None) -> None:
    verdict = judge(text, RULES)
    assert (verdict and verdict[0]) == reason


def test_limits_are_those_of_the_recipe() -> None:
    assert judge("x" * 200, RULES.model_copy(update={"min_characters": 201})) == (
        "too_short",
        "200 characters",
    )
    assert judge("x" * 200, RULES) is None
    assert judge(GOOD, RULES.model_copy(update={"max_characters": len(GOOD) - 1})) is not None
    assert judge(GOOD, RULES.model_copy(update={"max_characters": len(GOOD)})) is None


def test_empty_lines_do_not_hide_long_ones() -> None:
    verdict = judge("word " * 3000 + "\n" * 10_000 + "x", RULES)
    assert verdict is not None
    assert verdict[0] == "long_lines"


def test_alphanumeric_share_agrees_over_scripts() -> None:
    assert alphanumeric_share("ab1 +-") == pytest.approx(3 / 5)
    assert alphanumeric_share("äb1 +-") == pytest.approx(3 / 5)
    assert alphanumeric_share("日本語。\u3000あ") == pytest.approx(4 / 5)


def test_a_word_of_fifty_megabytes_is_decided_within_a_second() -> None:
    rules = RULES.model_copy(update={"max_characters": 100_000_000})
    word = "x" * 50_000_000
    started = time.perf_counter()
    verdict = judge(word, rules)
    assert time.perf_counter() - started < 1
    assert verdict is not None
    assert verdict[0] == "long_lines"
