"""Counts over the characters, lines, words and n-grams of a text, each computed in a compiled pass on first use."""

from __future__ import annotations

import unicodedata
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from bessemer.text import characters as kinds
from bessemer.text import lines as passes
from bessemer.text.characters import classes, table
from bessemer.text.hashing import BASE, MULTIPLIER, ONE, SHIFT, Array, compiled, find_slot, hash_span, hash_table
from bessemer.text.normalise import code_points
from bessemer.text.words import split

INVERSE = np.uint64(pow(int(BASE), -1, 1 << 64))


class Characters(NamedTuple):
    """Numbers of characters by kind; a character may be of several kinds.

    Attributes:
        alphabetic: Letters (str.isalpha).
        alphanumeric: Letters and digits (str.isalnum).
        white_space: White space (str.isspace), line feeds included.
        decimal: Digits 0 to 9 of any script.
        line_feeds: Line feeds.
        hashes: Number signs, #.
        ellipses: Occurrences of ... and of the character …
        upper: Upper-case letters.
        punctuation: Characters of Unicode category P.
        total: All characters.
    """

    alphabetic: int
    alphanumeric: int
    white_space: int
    decimal: int  # 0 to 9 of any script
    line_feeds: int
    hashes: int  # #
    ellipses: int  # ... and …
    upper: int
    punctuation: int
    total: int

    @property
    def beside_line_feeds(self) -> int:
        return self.total - self.line_feeds


class Lines(NamedTuple):
    """Counts over the non-blank lines of a text, split at line feeds.

    Attributes:
        total: Number of lines.
        longest: Characters in the longest line.
        characters: Characters in all lines.
        terminal: Number of lines that end in terminal punctuation of any script.
        duplicates: Number of lines that equal an earlier one.
        duplicate_characters: Characters in these duplicates.
    """

    total: int
    longest: int
    characters: int
    terminal: int  # lines that end in terminal punctuation of any script
    duplicates: int
    duplicate_characters: int


class Repeats(NamedTuple):
    """Number of lines or paragraphs, number of those that equal an earlier one, and the characters in these duplicates."""

    total: int
    duplicates: int
    duplicate_characters: int


class LineMarks(NamedTuple):
    """Counts of lines (str.splitlines), of those that begin with • or -, and of those that end with ... or …"""

    lines: int
    bullets: int
    ellipses: int


class Words(NamedTuple):
    """Counts over the words of `words.split`.

    Attributes:
        proper: Number of words that are not only punctuation or symbols.
        proper_characters: Characters in these words.
        alphabetic: Number of words with a letter.
    """

    proper: int  # words with more than punctuation
    proper_characters: int
    alphabetic: int  # words with a letter


class Statistics:
    """Counts over one text, each group of counts computed when it is first read; a lone surrogate counts as a character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.codes = code_points(text)
        self._encoded: dict[int, tuple[int, int]] = {}

    @cached_property
    def characters(self) -> Characters:
        class_of_code, bits = classes()
        counts = (_flags_of_classes() @ passes.count_classes(self.codes, class_of_code, len(bits))).tolist()
        counts[Characters._fields.index("ellipses")] += self.text.count("...")
        return Characters._make([*counts, len(self.codes)])

    @property
    def alphanumeric_share(self) -> float:
        """Letters and digits of any script divided by the characters other than white space."""
        return self.characters.alphanumeric / max(self.characters.total - self.characters.white_space, 1)

    @cached_property
    def line_spans(self) -> tuple[Array, Array]:
        """Starts and ends of the non-blank lines, as indices of characters."""
        return passes.drop_blank(self.codes, table(), *passes.find_lines(self.codes, table(), False))

    @cached_property
    def lines(self) -> Lines:
        starts, ends = self.line_spans
        sizes = ends - starts
        terminal = np.count_nonzero(table()[self.codes[ends - 1]] & kinds.TERMINAL)
        counts = int(sizes.max(initial=0)), int(sizes.sum()), int(terminal)
        return Lines(len(sizes), *counts, *passes.count_duplicates(self.codes, starts, ends))

    def num_short_lines(self, max_characters: int) -> int:
        """Return the number of non-blank lines with at most `max_characters` characters."""
        starts, ends = self.line_spans
        return int(np.count_nonzero(ends - starts <= max_characters))

    @cached_property
    def line_marks(self) -> LineMarks:
        spans = passes.find_lines(self.codes, table(), True)
        return LineMarks(len(spans[0]), *passes.bullets_and_ellipses(self.codes, table(), *spans))

    @property
    def num_lines(self) -> int:
        """Number of lines, including blank ones."""
        return self.characters.line_feeds + 1

    @property
    def mean_line(self) -> float:
        """Mean length of a line in characters, including blank lines."""
        return (self.characters.total + 1) / self.num_lines - 1

    @cached_property
    def repeated_lines(self) -> Repeats:
        """Counts over the lines, where a run of line feeds is one separator."""
        return self._repeats(*passes.find_blocks(self.codes, 1, 0, len(self.codes)))

    @cached_property
    def repeated_paragraphs(self) -> Repeats:
        """Counts over the paragraphs of the text without white space at its ends. Two or more line feeds separate paragraphs."""
        return self._repeats(*passes.find_blocks(self.codes, 2, *passes.trim(self.codes, table(), 0, len(self.codes))))

    def _repeats(self, starts: Array, ends: Array) -> Repeats:
        return Repeats(len(starts), *passes.count_duplicates(self.codes, starts, ends))

    @property
    def distinct_word_share(self) -> float:
        """Number of distinct words divided by the number of words, after lower-casing and splitting at white space."""
        words = self.text.lower().split()
        return len(set(words)) / max(len(words), 1)

    def longest_encoded_run(self, min_base64: int) -> int:
        """Return the length in characters of the longest run of encoded data (`lines.encoded_runs`)."""
        return self._encoded_runs(min_base64)[0]

    def encoded_characters(self, min_base64: int) -> int:
        """Return the number of characters in all runs of encoded data (`lines.encoded_runs`)."""
        return self._encoded_runs(min_base64)[1]

    def _encoded_runs(self, min_base64: int) -> tuple[int, int]:
        if min_base64 not in self._encoded:
            self._encoded[min_base64] = passes.encoded_runs(self.codes, table(), min_base64)
        return self._encoded[min_base64]

    @cached_property
    def word_spans(self) -> tuple[Array, Array]:
        """Starts and ends of the words: index of the first character of each, and of the one after its last."""
        return split(self.codes)

    @property
    def num_words(self) -> int:
        return len(self.word_spans[0])

    @cached_property
    def words(self) -> Words:
        return Words(*_count_words(self.codes, table(), *self.word_spans))

    @cached_property
    def _word_hashes(self) -> Array:
        return _hash_words(self.codes, *self.word_spans)

    def num_stop_words(self, stop_words: tuple[str, ...]) -> int:
        """Return how many of `stop_words` occur in the text at least once; case matters."""
        words = [code_points(unicodedata.normalize("NFC", word)) for word in stop_words]
        wanted = np.array([hash_span(word, 0, len(word)) for word in words], np.uint64)
        return int((self._word_hashes == wanted[:, None]).any(axis=1).sum())

    def top_ngram_characters(self, n: int) -> int:
        """Return the number of characters in all occurrences of the most frequent word n-gram, with spaces between words."""
        return int(_top_ngram_characters(self._word_hashes, *self.word_spans, n))

    @cached_property
    def _prefix_sums(self) -> tuple[Array, Array, Array]:
        return _sum_prefixes(self.codes, *self.word_spans)

    def repeated_ngram_characters(self, n: int) -> int:
        """Return the number of characters in word n-grams that occurred before, counted from the left without overlap."""
        return int(_repeated_characters(*self._prefix_sums, n))

    @cached_property
    def sentences(self) -> int:
        """Number of sentences; each line is split separately."""
        return int(_count_sentences(self.codes, table(), *self.word_spans))


@cache
def _flags_of_classes() -> Array:
    """Return a matrix that is 1 where a field of Characters (row) counts a class of `characters.classes` (column), else 0."""
    flags = (
        kinds.ALPHABETIC, kinds.ALPHANUMERIC, kinds.SPACE, kinds.DECIMAL, kinds.LINE_FEED,
        kinds.HASH, kinds.ELLIPSIS, kinds.UPPER, kinds.PUNCTUATION,
    )  # fmt: skip
    matrix: Array = ((np.array(flags, np.uint32)[:, None] & classes()[1]) != 0).astype(np.int64)
    return matrix


@compiled
def _count_words(codes: Array, bits: Array, starts: Array, ends: Array) -> tuple[int, int, int]:
    """Return the fields of Words, in order, from the spans of the words."""
    num_proper, characters, alphabetic = 0, 0, 0
    for i in range(len(starts)):
        proper, letter = False, False
        for at in range(starts[i], ends[i]):
            kind = bits[codes[at]]
            proper = proper or not kind & kinds.SYMBOL
            letter = letter or kind & kinds.ALPHABETIC != 0
            if proper and letter:
                break
        num_proper += proper
        characters += ends[i] - starts[i] if proper else 0
        alphabetic += letter
    return num_proper, characters, alphabetic


@compiled
def _hash_words(codes: Array, starts: Array, ends: Array) -> Array:
    hashes = np.empty(len(starts), np.uint64)
    for i in range(len(starts)):
        hashes[i] = hash_span(codes, starts[i], ends[i])
    return hashes


@compiled
def _top_ngram_characters(words: Array, starts: Array, ends: Array, n: int) -> int:
    """Return the occurrences of the most frequent n-gram (the first one in a tie) times its length in characters.

    `words` are the hashes of the words, and `starts` and `ends` their spans.
    """
    total = len(starts) - n + 1
    if total < 1:
        return 0
    slots = hash_table(total)
    seen = np.zeros(len(slots), np.int64)  # occurrences << 32 | first position
    best, best_first = 0, 0
    for i in range(total):
        key = words[i]
        for k in range(1, n):
            key = (key ^ (key >> SHIFT)) * MULTIPLIER + words[i + k]
        key = ((key ^ (key >> SHIFT)) * MULTIPLIER) | ONE
        slot = find_slot(slots, key)
        if slots[slot] == 0:
            slots[slot] = key
            seen[slot] = i
        seen[slot] += 1 << 32
        count, first = seen[slot] >> 32, seen[slot] & 0xFFFFFFFF
        if count > best or (count == best and first < best_first):
            best, best_first = count, first
    words_of = slice(best_first, best_first + n)
    return int(n - 1 + (ends[words_of] - starts[words_of]).sum()) * best


@compiled
def _sum_prefixes(codes: Array, starts: Array, ends: Array) -> tuple[Array, Array, Array]:
    """Return arrays, (words + 1,), from which `_repeated_characters` hashes any run of words with one multiplication.

    With all words joined without spaces, let p be the position where a word begins. The arrays have, for each word and for
    the end, the sum over all earlier characters of their mixed code times BASE^position; BASE^-p; and p.
    """
    sums, inverses = np.empty(len(starts) + 1, np.uint64), np.empty(len(starts) + 1, np.uint64)
    positions = np.empty(len(starts) + 1, np.int64)
    sums[0], inverses[0], positions[0] = np.uint64(0), ONE, 0
    power, inverse, total, position = ONE, ONE, np.uint64(0), 0
    for i in range(len(starts)):
        for at in range(starts[i], ends[i]):
            mixed = (np.uint64(codes[at]) + ONE) * MULTIPLIER
            total += (mixed ^ (mixed >> SHIFT)) * power
            power *= BASE
            inverse *= INVERSE
        position += ends[i] - starts[i]
        sums[i + 1], inverses[i + 1], positions[i + 1] = total, inverse, position
    return sums, inverses, positions


@compiled
def _repeated_characters(sums: Array, inverses: Array, positions: Array, n: int) -> int:
    """Return the number of characters in n-grams that occurred before, read from the left without overlap.

    The first three arguments are the arrays of `_sum_prefixes`. Spaces between words do not count.
    """
    num_words = len(positions) - 1
    slots = hash_table(num_words)
    repeated, i = 0, 0
    while i < num_words - n + 1:
        key = (sums[i + n] - sums[i]) * inverses[i]
        key = (key ^ (key >> SHIFT)) * MULTIPLIER + np.uint64(positions[i + n] - positions[i])
        key = ((key ^ (key >> SHIFT)) * BASE) | ONE
        slot = find_slot(slots, key)
        if slots[slot] == key:
            repeated += positions[i + n] - positions[i]
            i += n
        else:
            slots[slot] = key
            i += 1
    return repeated


@compiled
def _count_sentences(codes: Array, bits: Array, starts: Array, ends: Array) -> int:
    """Count sentences, in each line separately, as spaCy's sentencizer does. `starts` and `ends` are the spans of words.

    A sentence begins after a closing mark, at the next word that is not punctuation, or at a run of white space longer
    than one blank. A line with words has at least one sentence.
    """
    sentences, closed = 0, False
    for i in range(len(starts)):
        new_line, gap = i == 0, False
        if i:
            for at in range(ends[i - 1], starts[i]):
                new_line = new_line or codes[at] == 10
                gap = gap or codes[at] != 32 or at > ends[i - 1]
        if new_line or (closed and gap):
            sentences += 1
            closed = False
        if ends[i] - starts[i] == 1 and bits[codes[starts[i]]] & kinds.SENTENCE_END:
            closed = True
        elif closed:
            mark = True
            for at in range(starts[i], ends[i]):
                mark = mark and bits[codes[at]] & kinds.PUNCTUATION != 0
            if not mark:
                sentences += 1
                closed = False
    return sentences
