"""Compiled loops of the Bloom filter over paragraphs.

The filter is blocked (Putze, Sanders and Singler 2007): all bits of an item lie in one block of 512, a cache line, so
that a look-up costs one miss instead of one a bit. Imported inside functions only.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from bessemer.corpus.dedup.hashing import BASE, NEWLINE, hash_shingles, hash_words, mix

SALT = np.uint64(0xD6E8FEB86659FD93)


@njit(nogil=True, cache=True, inline="always")
def _first_word(filter_words, item):  # type: ignore[no-untyped-def]
    """Where the item's block begins: by the upper 32 bits."""
    num_blocks = np.uint64(len(filter_words) // 8)
    return np.int64(((item >> np.uint64(32)) * num_blocks) >> np.uint64(32)) * 8


@njit(nogil=True, cache=True)
def contains(filter_words, num_bits, item):  # type: ignore[no-untyped-def]
    """Whether all `num_bits` bits of an item (64 bits, mixed) are set."""
    start = _first_word(filter_words, item)
    state = item
    for number in range(num_bits):
        if number % 7 == 0:  # 7 places of 9 bits from each 64
            state = mix(state ^ SALT)
            places = state
        if not (
            filter_words[start + np.int64(places >> np.uint64(6) & np.uint64(7))] >> (places & np.uint64(63))
        ) & np.uint64(1):
            return False
        places >>= np.uint64(9)
    return True


@njit(nogil=True, cache=True)
def insert(filter_words, num_bits, item):  # type: ignore[no-untyped-def]
    """Set the bits of an item."""
    start = _first_word(filter_words, item)
    state = item
    for number in range(num_bits):
        if number % 7 == 0:
            state = mix(state ^ SALT)
            places = state
        filter_words[start + np.int64(places >> np.uint64(6) & np.uint64(7))] |= np.uint64(1) << (
            places & np.uint64(63)
        )
        places >>= np.uint64(9)


@njit(nogil=True, cache=True)
def _items(tokens, number, ngram):  # type: ignore[no-untyped-def]
    """Hashes of a paragraph's items into `tokens`: its n-grams, or the whole where it is shorter or ngram is 0."""
    if ngram and number >= ngram:
        return hash_shingles(tokens, number, ngram, tokens)
    value = np.uint64(number)
    for i in range(number):
        value = value * BASE + tokens[i]
    tokens[0] = mix(value)
    return 1


@njit(nogil=True, cache=True)
def judge_paragraphs(  # type: ignore[no-untyped-def]
    data, offsets, filter_words, num_bits, ngram, threshold, min_words, buffer, only_insert, repeated
):
    """Mark in `repeated` the lines of folded texts that stood before, in order; put the others into the filter.

    Gives how many items were put in. With `only_insert` nothing is marked and all lines go in.
    """
    line = inserted = 0
    for document in range(len(offsets) - 1):
        end = offsets[document + 1]
        start = offsets[document]
        while start <= end:
            stop = start
            while stop < end and data[stop] != NEWLINE:
                stop += 1
            number = hash_words(data[start:stop], buffer)
            if number >= min_words:
                number = _items(buffer, number, ngram)
                seen = 0
                if not only_insert:
                    for i in range(number):
                        seen += contains(filter_words, num_bits, buffer[i])
                if seen > 0 and seen >= threshold * number:
                    repeated[line] = True
                else:
                    for i in range(number):
                        insert(filter_words, num_bits, buffer[i])
                    inserted += number
            line += 1
            start = stop + 1
    return inserted
