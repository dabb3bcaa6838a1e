"""Documents as numbers: sixteen statistics, and the distinct words and pairs of words as a hashed bag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from bessemer.corpus.text.hashing import BASE, Array, compiled, mix
from bessemer.corpus.text.ngrams import folded_words
from bessemer.corpus.text.statistics import STOP_WORDS, Statistics

# In their order in a row of `Features.statistics`. Stop words are English: for other languages the bag decides.
STATISTICS = (
    "log_length", "mean_word_length", "letter_share", "digit_share", "punctuation_share", "symbol_share",
    "uppercase_share", "space_share", "stop_word_share", "unique_word_share", "log_line_length", "closed_line_share",
    "short_line_share", "bullet_line_share", "repeated_line_share", "log_sentence_length",
)  # fmt: skip
UNIQUE_WORDS = 256  # among which distinct ones are counted: over whole texts the share falls with the length


@dataclass(frozen=True)
class Features:
    """Of n texts: statistics (n, 16); bag (n, 2^hash_bits), 1 / sqrt(distinct words and pairs) for each that occurs, so
    that a row has length 1 however long the text is."""

    statistics: npt.NDArray[np.float64]
    bag: csr_array


def extract(texts: Sequence[str], read_bytes: int, hash_bits: int) -> Features:
    """The features of texts, of each the first `read_bytes` bytes."""
    statistics = np.empty((len(texts), len(STATISTICS)))
    seen = np.zeros(1 << hash_bits, dtype=np.int32)
    found: list[Array] = [np.zeros(0, dtype=np.int32)]
    for number, text in enumerate(texts):
        text = prefix(text, read_bytes)
        words, spans = folded_words(text)
        statistics[number] = _statistics(text, words, spans)
        buckets = buckets_of(words, hash_bits)
        found.append(buckets[: _move_distinct_first(buckets, seen, number + 1)])
    sizes = np.array([len(buckets) for buckets in found])
    values = np.repeat(1 / np.sqrt(np.maximum(sizes, 1)), sizes)
    return Features(
        statistics, csr_array((values, np.concatenate(found), np.cumsum(sizes)), shape=(len(texts), 1 << hash_bits))
    )


def prefix(text: str, num_bytes: int) -> str:
    """As many characters from the beginning of a text as have at most so many bytes in UTF-8."""
    if 4 * len(text) <= num_bytes:
        return text
    return text[:num_bytes].encode("utf-8", "replace")[:num_bytes].decode("utf-8", "ignore")


def standardised(statistics: Array, centre: Array, spread: Array) -> Array:
    """Statistics in standard deviations from the mean, at most 5: no single document is to outweigh its words."""
    return np.clip((statistics - centre) / spread, -5.0, 5.0)


def _statistics(text: str, words: Array, spans: Array) -> tuple[float, ...]:
    """The values of STATISTICS: logarithms of characters, and shares of visible characters, words and lines."""
    counts = Statistics(text)
    characters, lines, (num_lines, bullets, _) = counts.characters, counts.lines, counts.line_marks
    visible, num_words = max(characters.total - characters.white_space, 1), max(len(words), 1)
    first = words[:UNIQUE_WORDS].tolist()
    return (
        np.log1p(characters.total),
        (spans[:, 1] - spans[:, 0]).sum() / num_words,
        characters.alphabetic / visible,
        characters.decimal / visible,
        characters.punctuation / visible,
        (visible - characters.alphanumeric - characters.punctuation) / visible,
        characters.upper / max(characters.alphabetic, 1),
        characters.white_space / max(characters.total, 1),
        np.count_nonzero(words[:, None] == _stop_words()) / num_words,
        len(set(first)) / max(len(first), 1),
        np.log1p(lines.characters / max(lines.total, 1)),
        lines.terminal / max(lines.total, 1),
        counts.num_short_lines(30) / max(lines.total, 1),
        bullets / max(num_lines, 1),
        lines.duplicates / max(lines.total, 1),
        np.log1p(len(words) / (1 + characters.sentence_ends)),
    )


@cache
def _stop_words() -> Array:
    return folded_words(" ".join(STOP_WORDS))[0]


@compiled
def buckets_of(words: Array, hash_bits: int) -> Array:
    """The bucket of each word, by its hash, then of each pair of neighbours."""
    found = np.empty(max(2 * len(words) - 1, 0), np.int32)
    shift = np.uint64(64 - hash_bits)
    for number in range(len(words)):
        found[number] = words[number] >> shift
    for number in range(len(words) - 1):
        found[len(words) + number] = mix(words[number] * BASE + words[number + 1]) >> shift
    return found


@compiled
def _move_distinct_first(buckets: Array, seen: Array, stamp: int) -> int:
    """Move the distinct ones to the front, in their order; returns how many they are. `seen` marks with the stamp."""
    count = 0
    for bucket in buckets:
        if seen[bucket] != stamp:
            seen[bucket] = stamp
            buckets[count] = bucket
            count += 1
    return count
