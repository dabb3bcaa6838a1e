"""Documents as rows of numbers: a hashed bag of their distinct words and pairs of words, and ten statistics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array

from bessemer.text.hashing import BASE, Array, compiled, mix
from bessemer.text.ngrams import folded_words
from bessemer.text.statistics import Statistics

NUM_STATISTICS = 10
STATISTICS_SCALE = 0.3  # of shares, next to a bag of length 1: words decide


def extract(texts: Sequence[str], read_bytes: int, hash_bits: int) -> csr_array:
    """Return a row (2^hash_bits + NUM_STATISTICS) for the first `read_bytes` bytes of each text.

    The value of each bucket that occurs is 1 / sqrt(distinct buckets): bags have length 1, however long the text is.
    """
    seen = np.zeros(1 << hash_bits, dtype=np.int32)
    columns, values, ends = [np.zeros(0, dtype=np.int32)], [np.zeros(0)], [0]
    last = np.arange(1 << hash_bits, (1 << hash_bits) + NUM_STATISTICS, dtype=np.int32)
    for number, text in enumerate(texts, 1):
        text = prefix(text, read_bytes)
        buckets = buckets_of(folded_words(text)[0], hash_bits)
        count = _move_distinct_first(buckets, seen, number)
        columns += [buckets[:count], last]
        values += [np.full(count, 1 / np.sqrt(max(count, 1))), np.multiply(STATISTICS_SCALE, _statistics(text))]
        ends.append(ends[-1] + count + NUM_STATISTICS)
    shape = (len(texts), (1 << hash_bits) + NUM_STATISTICS)
    return csr_array((np.concatenate(values), np.concatenate(columns), ends), shape=shape)


def _statistics(text: str) -> tuple[float, ...]:
    """Return shares of visible characters and of lines, and logarithms of lengths over 10."""
    counts = Statistics(text)
    characters, lines = counts.characters, counts.lines
    visible, num_lines = max(characters.total - characters.white_space, 1), max(lines.total, 1)
    return (
        characters.alphabetic / visible,
        characters.decimal / visible,
        characters.punctuation / visible,
        characters.upper / max(characters.alphabetic, 1),
        characters.white_space / max(characters.total, 1),
        lines.terminal / num_lines,
        counts.num_short_lines(30) / num_lines,
        lines.duplicates / num_lines,
        np.log1p(characters.total) / 10,
        np.log1p(lines.characters / num_lines) / 10,
    )


def prefix(text: str, num_bytes: int) -> str:
    """Return as many characters from the beginning of a text as fit into `num_bytes` bytes of UTF-8."""
    if 4 * len(text) <= num_bytes:
        return text
    return text[:num_bytes].encode("utf-8", "replace")[:num_bytes].decode("utf-8", "ignore")


@compiled
def buckets_of(words: Array, hash_bits: int) -> Array:
    """Return the bucket of each word, by its hash, then of each pair of neighbours."""
    buckets = np.empty(max(2 * len(words) - 1, 0), np.int32)
    shift = np.uint64(64 - hash_bits)
    for number in range(len(words)):
        buckets[number] = words[number] >> shift
    for number in range(len(words) - 1):
        buckets[len(words) + number] = mix(words[number] * BASE + words[number + 1]) >> shift
    return buckets


@compiled
def _move_distinct_first(buckets: Array, seen: Array, stamp: int) -> int:
    """Move the distinct ones to the front, in their order; return their number. `seen` marks them with the stamp."""
    count = 0
    for bucket in buckets:
        if seen[bucket] != stamp:
            seen[bucket] = stamp
            buckets[count] = bucket
            count += 1
    return count
