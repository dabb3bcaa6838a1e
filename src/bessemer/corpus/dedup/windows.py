"""Compiled loops over windows of tokens: which stood before. Imported inside functions only.

A window is known by two polynomial hashes of 64 bits, each mixed: 128 bits, so that among 10^10 windows two unlike
ones are taken for equal with a chance below 10^-18.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from bessemer.corpus.dedup.hashing import BASE, mix

OTHER_BASE = np.uint64(0xC2B2AE3D27D4EB4F)
OFFSET = np.uint64(0x9FB21C651E98DF25)
"""Added to each token, so that zeros count."""


@njit(nogil=True, cache=True, inline="always")
def _power(base, exponent):  # type: ignore[no-untyped-def]
    value = np.uint64(1)
    for _ in range(exponent):
        value *= base
    return value


@njit(nogil=True, cache=True)
def _windows(tokens, length, one, other):  # type: ignore[no-untyped-def]
    """Both hashes of every window of a document, into `one` and `other`; gives how many windows there are."""
    number = len(tokens) - length + 1
    if number <= 0:
        return 0
    drop, other_drop = _power(BASE, length - 1), _power(OTHER_BASE, length - 1)
    value = other_value = np.uint64(0)
    for i in range(length - 1):
        token = mix(np.uint64(tokens[i]) + OFFSET)
        value = value * BASE + token
        other_value = other_value * OTHER_BASE + token
    for i in range(number):
        token = mix(np.uint64(tokens[i + length - 1]) + OFFSET)
        value = value * BASE + token
        other_value = other_value * OTHER_BASE + token
        one[i], other[i] = mix(value), mix(other_value)
        token = mix(np.uint64(tokens[i]) + OFFSET)
        value -= token * drop
        other_value -= token * other_drop
    return number


@njit(nogil=True, cache=True, inline="always")
def _cell(sketch, key):  # type: ignore[no-untyped-def]
    """Cell of a window in the sketch of 2-bit counters, four a byte."""
    return ((key >> np.uint64(32)) * np.uint64(len(sketch) * 4)) >> np.uint64(32)


@njit(nogil=True, cache=True)
def count_windows(tokens, offsets, length, sketch, one, other):  # type: ignore[no-untyped-def]
    """Count each window's cell up to 2."""
    for document in range(len(offsets) - 1):
        number = _windows(tokens[offsets[document] : offsets[document + 1]], length, one, other)
        for i in range(number):
            cell = _cell(sketch, one[i])
            shift = np.uint8((cell & np.uint64(3)) << np.uint64(1))
            byte = sketch[np.int64(cell >> np.uint64(2))]
            if (byte >> shift) & np.uint8(3) < 2:
                sketch[np.int64(cell >> np.uint64(2))] = byte + np.uint8(np.uint8(1) << shift)


@njit(nogil=True, cache=True)
def count_candidates(tokens, offsets, length, sketch, one, other):  # type: ignore[no-untyped-def]
    """How many windows are not alone in their cell; every repeated one is among them."""
    candidates = 0
    for document in range(len(offsets) - 1):
        number = _windows(tokens[offsets[document] : offsets[document + 1]], length, one, other)
        for i in range(number):
            cell = _cell(sketch, one[i])
            candidates += (
                sketch[np.int64(cell >> np.uint64(2))] >> np.uint8((cell & np.uint64(3)) << np.uint64(1))
            ) & 2 != 0
    return candidates


@njit(nogil=True, cache=True)
def mark_repeated(  # type: ignore[no-untyped-def]
    tokens, offsets, start, length, sketch, part, num_parts, keys, others, places, used, one, other, marks
):
    """Mark the windows of this part that stood before without overlapping; gives the table's entries, -1 when full.

    `start` is the number of the first token here; `keys`, `others` and `places` are an open hash table from windows to
    where they first stood (-1: free), of which `used` entries are taken.
    """
    capacity = np.uint64(len(keys))
    for document in range(len(offsets) - 1):
        begin = offsets[document]
        number = _windows(tokens[begin : offsets[document + 1]], length, one, other)
        for i in range(number):
            key = one[i]
            if num_parts > 1 and key % np.uint64(num_parts) != np.uint64(part):
                continue
            cell = _cell(sketch, key)
            if not (sketch[np.int64(cell >> np.uint64(2))] >> np.uint8((cell & np.uint64(3)) << np.uint64(1))) & 2:
                continue
            here = start + begin + i
            slot = np.int64(((key >> np.uint64(32)) * capacity) >> np.uint64(32))
            while places[slot] >= 0 and (keys[slot] != key or others[slot] != other[i]):
                slot = (slot + 1) % len(keys)
            if places[slot] < 0:
                if used * 10 >= len(keys) * 9:
                    return -1
                keys[slot], others[slot], places[slot] = key, other[i], here
                used += 1
            elif here >= places[slot] + length:
                marks[begin + i] = 1
    return used


@njit(nogil=True, cache=True)
def spans_of(marks, offsets, length, documents, starts, ends):  # type: ignore[no-untyped-def]
    """The union of the marked windows of each document, as token spans within it; gives how many."""
    number = 0
    for document in range(len(offsets) - 1):
        first = offsets[document]
        end = -1
        for i in range(first, offsets[document + 1]):
            if marks[i]:
                if i - first > end:
                    documents[number], starts[number] = document, i - first
                    number += 1
                end = i - first + length
                ends[number - 1] = end
    return number
