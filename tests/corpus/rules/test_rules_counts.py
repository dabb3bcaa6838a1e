"""Compiled counts compared with the same counts in plain Python, on random text in many scripts."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.text.characters import points, spacy
from bessemer.text.statistics import Statistics

WORDS = st.sampled_from(
    [
        "the", "be", "to", "of", "and", "that", "have", "with", "a", "-", ".", "...", "…", "#", "don't", "«слово»",
        "日本語。", "שלום", "مرحبا!", "naïve", "😀", "12", "½", "²", "A.B.", "x{y}", "'q'",
    ]
)  # fmt: skip
SPACES = st.sampled_from([" ", " ", " ", "\n", "\n\n", "\n\n\n", "  ", "\t", "\r\n", "\u2028", "\x85", "\u3000"])
TEXTS = st.one_of(
    st.text(max_size=120),
    st.lists(st.tuples(WORDS, SPACES), max_size=60).map(lambda pairs: "".join(a + b for a, b in pairs)),
    st.lists(
        st.tuples(st.sampled_from(["a b", "c. d!", "", "- e", "f..."]), st.sampled_from(["\n", "\n\n"])), max_size=30
    ).map(lambda pairs: "".join(a + b for a, b in pairs)),
)
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
TERMINAL = {chr(point) for point in points(spacy()["ranges"]["terminal"])}
SYMBOLS = TERMINAL | {chr(point) for point in points(spacy()["ranges"]["other_symbols"])}


def duplicates(elements: list[str]) -> tuple[int, int]:
    seen: set[str] = set()
    again = [element for element in elements if element in seen or seen.add(element)]  # type: ignore[func-returns-value]
    return len(again), sum(map(len, again))


def words_of(found: Statistics) -> list[str]:
    return [found.text[start:end] for start, end in zip(*found.word_spans, strict=True)]


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_character_counts_equal_plain_python(text: str) -> None:
    found = Statistics(text).characters
    assert found.total == len(text)
    assert found.alphabetic == sum(map(str.isalpha, text))
    assert found.alphanumeric == sum(map(str.isalnum, text))
    assert found.white_space == sum(map(str.isspace, text))
    assert found.decimal == sum(map(str.isdecimal, text))
    assert found.upper == sum(map(str.isupper, text))
    assert found.line_feeds == text.count("\n")
    assert found.hashes == text.count("#")
    assert found.ellipses == text.count("...") + text.count("…")


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_line_counts_equal_plain_python(text: str) -> None:
    lines = [line for line in text.split("\n") if line.strip()]
    statistics = Statistics(text)
    found = statistics.lines
    assert found.total == len(lines)
    assert found.terminal == sum(line[-1] in TERMINAL for line in lines)
    assert statistics.num_short_lines(5) == sum(len(line) <= 5 for line in lines)
    assert found.longest == max(map(len, lines), default=0)
    assert found.characters == sum(map(len, lines))
    assert (found.duplicates, found.duplicate_characters) == duplicates(lines)


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_counts_of_bullets_and_repeated_lines_and_paragraphs(text: str) -> None:
    found = Statistics(text)
    lines = text.splitlines()
    bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
    assert found.line_marks == (
        len(lines),
        bullets,
        sum(line.rstrip().endswith(("...", "…")) for line in lines),
    )
    blocks = re.split("\n+", text)
    repeated = found.repeated_lines
    assert repeated.total == len(blocks)
    assert (repeated.duplicates, repeated.duplicate_characters) == duplicates(blocks)
    paragraphs = re.split("\n{2,}", text.strip())
    repeated = found.repeated_paragraphs
    assert repeated.total == len(paragraphs)
    assert (repeated.duplicates, repeated.duplicate_characters) == duplicates(paragraphs)


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_word_counts_equal_plain_python(text: str) -> None:
    found = Statistics(text)
    words = words_of(found)
    proper = [word for word in words if any(character not in SYMBOLS for character in word)]
    assert (found.words.proper, found.words.proper_characters) == (len(proper), sum(map(len, proper)))
    assert found.words.alphabetic == sum(any(map(str.isalpha, word)) for word in words)
    assert found.num_stop_words(STOP_WORDS) == len(set(STOP_WORDS) & set(words))


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(2, 6))
def test_ngram_counts_equal_plain_python(text: str, n: int) -> None:
    found = Statistics(text)
    words = words_of(found)
    grams = Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
    top = grams.most_common(1)
    assert found.top_ngram_characters(n) == (len(top[0][0]) * top[0][1] if top else 0)
    seen: set[str] = set()
    repeated, i = 0, 0
    while i < len(words) - n + 1:
        gram = "".join(words[i : i + n])
        if gram in seen:
            repeated += len(gram)
            i += n
        else:
            seen.add(gram)
            i += 1
    assert found.repeated_ngram_characters(n) == repeated


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", 0),
        ("no mark at all", 1),
        ("One. Two! Three?", 3),
        ("One... and two.", 1),  # ... is a word and not a mark
        ("Wait?! Yes.", 2),
        ('He said "no." Then he left.', 2),
        ("one line\nanother. And more", 3),
        ("Mr. Smith went. He came.", 2),
        ("これは。それは。", 1),  # not a space: one run, and only its end is stripped
        ("One.  )", 2),  # two blanks are a token and begin a sentence
    ],
)
def test_sentences_equal_those_of_spacys_sentencizer(text: str, sentences: int) -> None:
    assert Statistics(text).sentences == sentences


def test_a_lone_surrogate_is_a_character() -> None:
    assert Statistics("a\ud800b").characters.total == 3
