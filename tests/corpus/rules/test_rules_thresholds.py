"""Each rule with a limit, below and above it, on texts whose values were counted manually."""

from __future__ import annotations

import pytest

from bessemer.corpus.document import Reject
from bessemer.corpus.filters.rules.apply import RULES, check
from bessemer.recipe.rules import Code, Fineweb, GopherQuality, GopherRepetition, Textbook
from bessemer.text.statistics import Statistics

SETS = {
    "code": Code, "textbook": Textbook, "gopher_quality": GopherQuality, "gopher_repetition": GopherRepetition,
    "fineweb": Fineweb,
}  # fmt: skip


def checked(name: str, text: str, **keys: object) -> Reject | None:
    """Apply a rule set whose other limits allow anything."""
    anything = {
        key: 0 if key.startswith("min") else 1.0 if "share" in key else 10**9
        for key in {rule.limit for rule in RULES[name]}
        if key.startswith(("min", "max"))
    }
    return check(name, Statistics(text), SETS[name](**anything | keys))


@pytest.mark.parametrize(
    ("name", "text", "key", "value", "reason"),
    [
        ("code", "a\nb\nc", "max_lines", 3, "lines"),
        ("code", "ab\nabcd\n", "max_line_length", 4, "line_length"),
        ("code", "ab\nabcd", "max_mean_line_length", 3.0, "mean_line_length"),
        ("code", "ab1+ -", "min_alphanumeric_share", 0.5, "alphanumeric"),
        ("code", "ab11+-", "min_alphabetic_share", 2 / 6, "alphabetic"),
        ("textbook", "x" * 200, "min_characters", 200, "characters"),
        ("textbook", "a\nb\ncd", "max_line_feeds_per_character", 2 / 6, "line_feeds"),
        ("textbook", "The the a A b", "min_distinct_word_share", 3 / 5, "distinct_words"),
        ("textbook", "Cookie! Click here. All rights reserved. click here", "max_boilerplate_phrases", 3, "boilerplate"),
        ("gopher_quality", "one two ( three ) four .", "min_words", 4, "few_words"),  # punctuation is not a word
        ("gopher_quality", "one two ( three ) four .", "max_words", 4, "many_words"),
        ("gopher_quality", "a bb ccc , dddd", "min_mean_word_length", 2.5, "short_words"),
        ("gopher_quality", "a bb ccc , dddd", "max_mean_word_length", 2.5, "long_words"),
        ("gopher_quality", "# a # b c d e f", "max_hashes_per_word", 0.25, "hashes"),
        ("gopher_quality", "a... b … c d e f", "max_ellipses_per_word", 0.25, "ellipses"),  # eight words, two of them ellipses
        ("gopher_quality", "- a\n • b\nc\n\nd - e", "max_bullet_line_share", 0.4, "bullet_lines"),  # the blank line counts
        ("gopher_quality", "a...\nb … \nc\nd. . .", "max_ellipsis_line_share", 0.5, "ellipsis_lines"),
        ("gopher_quality", "a b3 4 , x", "min_alphabetic_word_share", 0.6, "alphabetic_words"),
        ("gopher_quality", "the the The be have-with", "min_stop_words", 4, "stop_words"),
        ("gopher_repetition", "aa\n\nbb\n\naa\n\ncc", "max_duplicate_paragraph_share", 1 / 4, "paragraphs"),
        ("gopher_repetition", "aa\n\nbb\n\naa\n\ncc", "max_duplicate_paragraph_character_share", 2 / 14, "paragraph_characters"),
        ("gopher_repetition", "aa\nbb\n\naa\naa", "max_duplicate_line_share", 2 / 4, "lines"),
        ("gopher_repetition", "aa\nbb\n\naa\naa", "max_duplicate_line_character_share", 4 / 12, "line_characters"),
        ("gopher_repetition", "x y x y zz", "max_top_2gram_share", 6 / 10, "top_2gram"),  # "x y" twice
        ("gopher_repetition", "x y z x y z zz", "max_top_3gram_share", 10 / 14, "top_3gram"),
        ("gopher_repetition", "a b c d a b c d zz", "max_top_4gram_share", 14 / 18, "top_4gram"),
        *[
            (
                "gopher_repetition",
                " ".join(letters := "abcdefghij"[:n]) + " | " + " ".join(letters),
                f"max_duplicate_{n}gram_share",
                n / (4 * n + 1),
                f"duplicate_{n}grams",
            )
            for n in range(5, 11)
        ],
        ("fineweb", "a.\nb\n \nc。\nd", "min_terminal_line_share", 0.5, "terminal_lines"),
        ("fineweb", "x" * 30 + "\n" + "y" * 31 + "\n\nz", "max_short_line_share", 2 / 3, "short_lines"),
        ("fineweb", "aaa\nbb\naaa\n", "max_duplicate_character_share", 3 / 8, "duplicate_characters"),
        ("fineweb", "one two\nthree four\n", "max_line_feeds_per_word", 0.5, "line_feeds"),
    ],
)  # fmt: skip
def test_each_rule_below_and_above_its_limit(name: str, text: str, key: str, value: float, reason: str) -> None:
    assert checked(name, text, **{key: value}) is None
    beyond = (1 if isinstance(value, int) else 1e-9) * (1 if key.startswith("min") else -1)
    finding = checked(name, text, **{key: value + beyond})
    assert finding is not None
    assert finding.reason == f"{name}.{reason}"
    assert finding.detail


def test_other_stop_words() -> None:
    german = "das ist der Hund und die Katze ist da"
    assert checked("gopher_quality", german, min_stop_words=2) is not None
    german_words = ("der", "die", "und", "nicht")
    assert checked("gopher_quality", german, min_stop_words=3, stop_words=german_words) is None


def test_an_empty_text_fails_only_rules_that_need_words_or_lines() -> None:
    broken = {name: check(name, Statistics(""), keys()) for name, keys in SETS.items()}
    assert {name for name, finding in broken.items() if finding is None} == {"gopher_repetition"}
    assert broken["fineweb"] == ("fineweb.terminal_lines", "no line that is not blank")


def test_marks_may_be_left_out_of_the_share_of_words_with_a_letter() -> None:
    found = Statistics("Well, well; the house (of straw) and that - be with us, to have. " * 8)
    assert len(found.word_spans[0]) == 8 * (13 + 7) and found.words.proper == found.words.alphabetic == 8 * 13
    finding = check("gopher_quality", found, GopherQuality())
    assert finding is not None and finding.reason == "gopher_quality.alphabetic_words"
    assert check("gopher_quality", found, GopherQuality(marks_are_words=False)) is None


def test_the_length_of_a_short_line() -> None:
    assert checked("fineweb", "12345\n123456", short_line_characters=5, max_short_line_share=0.5) is None
    assert checked("fineweb", "12345\n123456", short_line_characters=6, max_short_line_share=0.5) is not None
