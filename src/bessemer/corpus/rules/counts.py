"""What the rule sets look at: counts over the characters, lines, words and n-grams of one text.

Each group is counted in one compiled pass when the first rule asks for it, so that a set that is off costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.corpus.rules import ngrams, spans, words
from bessemer.corpus.rules.characters import table

Array = npt.NDArray[Any]

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
"""Gopher's (Rae et al. 2021, appendix A); compared as they stand, in lower case."""
SHORT_LINE = 30


@dataclass(frozen=True)
class Characters:
    """Characters of each kind; kinds overlap."""

    total: int
    alphabetic: int
    alphanumeric: int
    white_space: int
    decimal: int
    """Digits 0 to 9 of any script."""
    brackets: int
    """{ } ⟨ ⟩ [ ] ( )"""
    common: int
    """a-z, A-Z, 0-9, line feed, ? ! , and full stop."""
    line_feeds: int
    hashes: int
    ellipses: int
    """... and …"""
    blanks: int
    """Tab, line feed, carriage return, backspace and space."""
    upper: int


@dataclass(frozen=True)
class Lines:
    """The lines of a text that are not blank, cut at line feeds."""

    total: int
    terminal: int
    """End in terminal punctuation of any script."""
    short: int
    """Have at most SHORT_LINE characters, or as many as asked for."""
    marked: int
    """End in . ? ! \" or ' once trimmed."""
    longest: int
    characters: int
    duplicates: int
    """Stood before in the same text."""
    duplicate_characters: int
    distinct_characters: int


@dataclass(frozen=True)
class Repeats:
    """Elements, those that stood before, and the characters of the latter."""

    total: int
    duplicates: int
    duplicate_characters: int
    distinct_characters: int


@dataclass(frozen=True)
class Words:
    """Words as `words.split` finds them."""

    total: int
    proper: int
    """Those that are not punctuation alone."""
    proper_characters: int
    alphabetic: int
    """Those with a letter."""
    stop_words: int
    """Different stop words that occur."""
    longest: int
    distinct: int


def code_points(text: str) -> Array:
    """The characters of a text as numbers. A lone half of a surrogate pair stays what it is."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


class Statistics:
    """The counts over one text; each group is made when it is first asked for."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.codes = code_points(text)
        self._repeated: dict[int, int] = {}

    @cached_property
    def characters(self) -> Characters:
        return Characters(len(self.codes), *map(int, spans.count_characters(self.codes, table())))

    @cached_property
    def line_spans(self) -> tuple[Array, Array]:
        """Lines that are not blank."""
        return spans.drop_blank(self.codes, table(), *spans.find_lines(self.codes, table(), False))

    @cached_property
    def lines(self) -> Lines:
        return self.lines_up_to(SHORT_LINE)

    def lines_up_to(self, short: int) -> Lines:
        """The lines, with those counted as short that have at most so many characters."""
        starts, ends = self.line_spans
        terminal, num_short, marked, longest, total = map(
            int, spans.line_ends(self.codes, table(), starts, ends, short)
        )
        duplicates, duplicate, distinct = spans.count_duplicates(self.codes, starts, ends)
        return Lines(len(starts), terminal, num_short, marked, longest, total, duplicates, duplicate, distinct)

    @cached_property
    def bullets_and_ellipses(self) -> tuple[int, int, int]:
        """Lines (as str.splitlines cuts), those that begin with • or -, and those that end with ... or …"""
        starts, ends = spans.find_lines(self.codes, table(), True)
        return (len(starts), *spans.bullets_and_ellipses(self.codes, table(), starts, ends))

    @cached_property
    def repeated_lines(self) -> Repeats:
        """Lines, with runs of line feeds as one separator."""
        return self._repeats(*spans.find_blocks(self.codes, 1, 0, len(self.codes)))

    @cached_property
    def repeated_paragraphs(self) -> Repeats:
        """Paragraphs of the trimmed text: two line feeds or more separate them."""
        first, last = spans.trim(self.codes, table(), 0, len(self.codes))
        return self._repeats(*spans.find_blocks(self.codes, 2, first, last))

    def _repeats(self, starts: Array, ends: Array) -> Repeats:
        return Repeats(len(starts), *spans.count_duplicates(self.codes, starts, ends))

    @cached_property
    def word_spans(self) -> tuple[Array, Array]:
        """First character of each word, and the one after its last."""
        return words.split(self.codes)

    @cached_property
    def words(self) -> Words:
        return self.words_with(STOP_WORDS)

    def words_with(self, stop_words: tuple[str, ...]) -> Words:
        """The words, with these stop words looked for."""
        wanted = np.array([words.hash_span(code_points(word), 0, len(word)) for word in stop_words], np.uint64)
        counts = ngrams.count_words(self.codes, table(), *self.word_spans, wanted)
        total, proper, characters, alphabetic, stops, longest, distinct = map(int, counts)
        return Words(total, proper, characters, alphabetic, stops.bit_count(), longest, distinct)

    def top_ngram_characters(self, n: int) -> int:
        """Characters that the most frequent run of n words takes in all, with single spaces between the words."""
        length, count = ngrams.top_ngram(self._word_hashes, *self.word_spans, n)
        return int(length) * int(count)

    @cached_property
    def _word_hashes(self) -> Array:
        return ngrams.word_hashes(self.codes, *self.word_spans)

    @cached_property
    def _places(self) -> tuple[Array, Array, Array]:
        return ngrams.place_words(self.codes, *self.word_spans)

    def repeated_ngram_characters(self, n: int) -> int:
        """Characters in runs of n words that stood before, counted from the left without overlap."""
        return int(ngrams.repeated_characters(*self._places, n))

    @cached_property
    def sentences(self) -> int:
        """Sentences, each line on its own."""
        return int(ngrams.count_sentences(self.codes, table(), *self.word_spans))
