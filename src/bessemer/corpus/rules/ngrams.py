"""What is counted over the words of a text, and how much of it repeats; compiled with Numba.

N-grams are compared by 64-bit hashes: two different ones are taken for equal once in 10^19 pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.corpus.rules.characters import ALPHABETIC, PUNCTUATION, SENTENCE_END, SYMBOL
from bessemer.corpus.rules.compiled import compiled
from bessemer.corpus.rules.words import hash_span

Array = npt.NDArray[Any]

BASE, INVERSE = np.uint64(0x9E3779B97F4A7C15), np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
MIX, SHIFT, ONE = np.uint64(0xFF51AFD7ED558CCD), np.uint64(32), np.uint64(1)
MOST_STOP_WORDS = 62


@compiled
def count_words(codes: Array, bits: Array, starts: Array, ends: Array, stop_words: Array) -> Array:
    """Words; those that are not punctuation alone, and their characters; those with a letter; a bit for each stop word
    (given by their hashes) that occurs; the longest word's characters; distinct words."""
    found = np.zeros(7, np.int64)
    size = 16
    while size < 2 * len(starts):
        size *= 2
    slots = np.zeros(size, np.uint64)
    mask = np.uint64(size - 1)
    for i in range(len(starts)):
        word, letter = False, False
        for at in range(starts[i], ends[i]):
            kind = bits[codes[at]]
            word = word or not kind & SYMBOL
            if kind & ALPHABETIC:
                letter = True
                if word:
                    break
        found[1] += word
        found[2] += ends[i] - starts[i] if word else 0
        found[3] += letter
        found[5] = max(found[5], ends[i] - starts[i])
        key = hash_span(codes, starts[i], ends[i])
        slot = key & mask
        while slots[slot] != 0 and slots[slot] != key:
            slot = (slot + ONE) & mask
        if slots[slot] == 0:
            slots[slot] = key
            found[6] += 1
            for place in range(len(stop_words)):
                if stop_words[place] == key:
                    found[4] |= 1 << place
    found[0] = len(starts)
    return found


@compiled
def word_hashes(codes: Array, starts: Array, ends: Array) -> Array:
    """The hash of each word."""
    found = np.empty(len(starts), np.uint64)
    for i in range(len(starts)):
        found[i] = hash_span(codes, starts[i], ends[i])
    return found


@compiled
def top_ngram(words: Array, starts: Array, ends: Array, n: int) -> tuple[int, int]:
    """Characters of the most frequent n-gram with single spaces between its words (the first of equals), and how often
    it occurs; `words` are the words' hashes."""
    total = len(starts) - n + 1
    if total < 1:
        return 0, 0
    size = 16
    while size < 2 * total:
        size *= 2
    slots, seen = np.zeros(size, np.uint64), np.zeros(size, np.int64)  # seen: how often << 32 | the first place
    mask = np.uint64(size - 1)
    best, best_first = 0, 0
    for i in range(total):
        key = words[i]
        for k in range(1, n):
            key = (key ^ (key >> SHIFT)) * MIX + words[i + k]
        key = ((key ^ (key >> SHIFT)) * MIX) | ONE
        slot = (key >> SHIFT) & mask
        while slots[slot] != 0 and slots[slot] != key:
            slot = (slot + ONE) & mask
        if slots[slot] == 0:
            slots[slot] = key
            seen[slot] = i
        seen[slot] += 1 << 32
        count, first = seen[slot] >> 32, seen[slot] & 0xFFFFFFFF
        if count > best or (count == best and first < best_first):
            best, best_first = count, first
    length = n - 1
    for k in range(best_first, best_first + n):
        length += ends[k] - starts[k]
    return length, best


@compiled
def place_words(codes: Array, starts: Array, ends: Array) -> tuple[Array, Array, Array]:
    """What makes the hash of any run of words one product: with all words written without a space between them, the
    sum of mixed characters times BASE^place up to each word; BASE^-place; and the place itself."""
    sums, inverses = np.empty(len(starts) + 1, np.uint64), np.empty(len(starts) + 1, np.uint64)
    places = np.empty(len(starts) + 1, np.int64)
    sums[0], inverses[0], places[0] = np.uint64(0), ONE, 0
    power, inverse, total, place = ONE, ONE, np.uint64(0), 0
    for i in range(len(starts)):
        for at in range(starts[i], ends[i]):
            mixed = (np.uint64(codes[at]) + ONE) * MIX
            total += (mixed ^ (mixed >> SHIFT)) * power
            power *= BASE
            inverse *= INVERSE
        place += ends[i] - starts[i]
        sums[i + 1], inverses[i + 1], places[i + 1] = total, inverse, place
    return sums, inverses, places


@compiled
def repeated_characters(sums: Array, inverses: Array, places: Array, n: int) -> int:
    """Characters in n-grams that stood before, read from the left without overlap; words joined without a space."""
    num_words = len(places) - 1
    size = 16
    while size < 2 * num_words:
        size *= 2
    slots = np.zeros(size, np.uint64)
    mask = np.uint64(size - 1)
    repeated, i = 0, 0
    while i < num_words - n + 1:
        key = (sums[i + n] - sums[i]) * inverses[i]
        key = (key ^ (key >> SHIFT)) * MIX + np.uint64(places[i + n] - places[i])
        key = ((key ^ (key >> SHIFT)) * BASE) | ONE
        slot = (key >> SHIFT) & mask
        while slots[slot] != 0 and slots[slot] != key:
            slot = (slot + ONE) & mask
        if slots[slot] == key:
            repeated += places[i + n] - places[i]
            i += n
        else:
            slots[slot] = key
            i += 1
    return repeated


@compiled
def count_sentences(codes: Array, bits: Array, starts: Array, ends: Array) -> int:
    """Sentences as spaCy's sentencizer finds them in each line: one begins after a closing mark, at the next word that
    is not punctuation, or at a run of white space longer than one blank. A line of words has at least one."""
    sentences = 0
    closed = False
    for i in range(len(starts)):
        new_line, gap = i == 0, False
        if i:
            for at in range(ends[i - 1], starts[i]):
                new_line = new_line or codes[at] == 10
                gap = gap or codes[at] != 32 or at > ends[i - 1]
        if new_line or (closed and gap):
            sentences += 1
            closed = False
        ends_sentence = ends[i] - starts[i] == 1 and bits[codes[starts[i]]] & SENTENCE_END != 0
        if ends_sentence:
            closed = True
        elif closed:
            mark = True
            for at in range(starts[i], ends[i]):
                mark = mark and bits[codes[at]] & PUNCTUATION != 0
            if not mark:
                sentences += 1
                closed = False
    return sentences
