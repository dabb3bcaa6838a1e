"""Each of Gopher's rules at both sides of its threshold, on texts whose values are counted by hand."""

from __future__ import annotations

import pytest

from bessemer.corpus.rules import statistics
from bessemer.corpus.rules.gopher import quality, repetition
from bessemer.recipe.rules import GopherQuality, GopherRepetition

ANYTHING = {
    "min_words": 0, "max_words": 10**9, "min_mean_word_length": 0.0, "max_mean_word_length": 1e9,
    "max_hashes_per_word": 1e9, "max_ellipses_per_word": 1e9, "max_bullet_line_share": 1.0, "max_ellipsis_line_share": 1.0,
    "min_alphabetic_word_share": 0.0, "min_stop_words": 0,
}  # fmt: skip
NO_REPETITION = dict.fromkeys(GopherRepetition.model_fields, 1.0)


@pytest.mark.parametrize(
    ("text", "key", "value", "reason"),
    [
        ("one two ( three ) four .", "min_words", 4, "few_words"),  # punctuation is no word
        ("one two ( three ) four .", "max_words", 4, "many_words"),
        ("a bb ccc , dddd", "min_mean_word_length", 2.5, "short_words"),
        ("a bb ccc , dddd", "max_mean_word_length", 2.5, "long_words"),
        ("# a # b c d e f", "max_hashes_per_word", 0.25, "hashes"),
        ("a... b … c d e f", "max_ellipses_per_word", 0.25, "ellipses"),  # eight words, two of them ellipses
        ("- a\n • b\nc\n\nd - e", "max_bullet_line_share", 0.4, "bullet_lines"),  # the blank line counts
        ("a...\nb … \nc\nd. . .", "max_ellipsis_line_share", 0.5, "ellipsis_lines"),
        ("a b3 4 , x", "min_alphabetic_word_share", 0.6, "alphabetic_words"),
        ("the the The be have-with", "min_stop_words", 4, "stop_words"),
    ],
)
def test_quality(text: str, key: str, value: float, reason: str) -> None:
    found = statistics(text)
    assert quality(found, GopherQuality(**{**ANYTHING, key: value})) is None
    beyond = (1 if isinstance(value, int) else 1e-9) * (1 if key.startswith("min") else -1)
    finding = quality(found, GopherQuality(**{**ANYTHING, key: value + beyond}))
    assert finding is not None
    assert finding.reason == f"gopher_quality.{reason}"
    assert finding.detail


@pytest.mark.parametrize(
    ("text", "key", "value", "reason"),
    [
        ("aa\n\nbb\n\naa\n\ncc", "max_duplicate_paragraph_share", 1 / 4, "paragraphs"),
        ("aa\n\nbb\n\naa\n\ncc", "max_duplicate_paragraph_character_share", 2 / 14, "paragraph_characters"),
        ("aa\nbb\n\naa\naa", "max_duplicate_line_share", 2 / 4, "lines"),
        ("aa\nbb\n\naa\naa", "max_duplicate_line_character_share", 4 / 12, "line_characters"),
        ("x y x y zz", "max_top_2gram_share", 6 / 10, "top_2gram"),  # "x y" twice
        ("x y z x y z zz", "max_top_3gram_share", 10 / 14, "top_3gram"),
        ("a b c d a b c d zz", "max_top_4gram_share", 14 / 18, "top_4gram"),
        *[
            (
                " ".join(letters := "abcdefghij"[:n]) + " | " + " ".join(letters),
                f"max_duplicate_{n}gram_share",
                n / (4 * n + 1),
                f"duplicate_{n}grams",
            )
            for n in range(5, 11)
        ],
    ],
)
def test_repetition(text: str, key: str, value: float, reason: str) -> None:
    found = statistics(text)
    assert repetition(found, GopherRepetition(**{**NO_REPETITION, key: value})) is None
    finding = repetition(found, GopherRepetition(**{**NO_REPETITION, key: value - 1e-9}))
    assert finding is not None
    assert finding.reason == f"gopher_repetition.{reason}"


def test_other_stop_words() -> None:
    german = statistics("das ist der Hund und die Katze ist da")
    assert quality(german, GopherQuality(**{**ANYTHING, "min_stop_words": 2})) is not None
    wanted = GopherQuality(**{**ANYTHING, "min_stop_words": 3, "stop_words": ("der", "die", "und", "nicht")})
    assert quality(german, wanted) is None


def test_an_empty_text_breaks_nothing() -> None:
    assert quality(statistics(""), GopherQuality()) is not None
    assert repetition(statistics(""), GopherRepetition()) is None


def test_marks_may_be_left_out_of_the_share_of_words_with_a_letter() -> None:
    found = statistics("Well, well; the house (of straw) and that - be with us, to have. " * 8)
    assert found.words.total == 8 * (13 + 7) and found.words.proper == found.words.alphabetic == 8 * 13
    finding = quality(found, GopherQuality())
    assert finding is not None and finding.reason == "gopher_quality.alphabetic_words"
    assert quality(found, GopherQuality(marks_are_words=False)) is None
