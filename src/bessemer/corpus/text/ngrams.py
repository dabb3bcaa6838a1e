"""Case-folded words and their n-grams as 64-bit hashes, for contamination checks and the quality classifier.

A word is a run of letters, digits and combining marks; punctuation and white space separate words (GPT-3, Brown et al.
2020, appendix C). In scripts without spaces (Han, kana, Thai, Lao, Khmer, Burmese) each letter is a word.
"""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np

from bessemer.corpus.extract import code_points
from bessemer.corpus.text.hashing import BASE, FNV_OFFSET, FNV_PRIME, Array, compiled, find_slot, hash_table, mix

ALONE = 1 << 31  # marks a letter that is a word of its own

# blocks of scripts without spaces between words (Unicode, Blocks.txt): Thai and Lao, Myanmar, Khmer, Han, kana
UNSPACED = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3040, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0xFF66, 0xFF9F), (0x20000, 0x323AF),
)  # fmt: skip


def folded_words(text: str) -> tuple[Array, Array]:
    """The hash of each word, and its first character and the one after its last: (words, 2)."""
    codes = np.frombuffer(text.encode("ascii"), dtype=np.uint8) if text.isascii() else code_points(text)
    hashes, spans = np.empty(len(codes), dtype=np.uint64), np.empty((len(codes), 2), dtype=np.int64)
    count = _write_words(codes, folding(), hashes, spans)
    return hashes[:count], spans[:count]


@compiled
def table(hashes: Array) -> tuple[Array, Array]:
    """A hash table of distinct n-gram hashes: slots with the hash (0: empty) and slots with its number."""
    slots = hash_table(2 * len(hashes))
    numbers = np.zeros(len(slots), np.int32)
    for number in range(len(hashes)):
        slot = find_slot(slots, hashes[number])
        slots[slot], numbers[slot] = hashes[number], number
    return slots, numbers


def find(text: str, lengths: Array, slots: Array, numbers: Array) -> tuple[Array, Array]:
    """Numbers and spans in characters (n-grams, 2) of a text's n-grams that are in the table; `lengths`: in words."""
    hashes, spans = folded_words(text)
    places = np.empty((16, 3), dtype=np.int64)
    count = _find(hashes, lengths, slots, numbers, places)
    if count > len(places):
        places = np.empty((count, 3), dtype=np.int64)
        _find(hashes, lengths, slots, numbers, places)
    places = places[:count]
    return places[:, 0].astype(np.int32), np.stack([spans[places[:, 1], 0], spans[places[:, 2], 1]], axis=1)


@cache
def folding() -> Array:
    """For each code point: its lower case, 0 where it is in no word; ALONE added where it is a word by itself."""
    fold = np.zeros(0x110000, dtype=np.uint32)
    for point in (*range(0xD800), *range(0xF900, 0x40000)):  # no surrogates, no private use; the rest has no letters
        character = chr(point)
        if unicodedata.category(character)[0] in "LNM":
            fold[point] = ord(character.lower()[0])
    for low, high in UNSPACED:
        block = fold[low : high + 1]
        block[block > 0] |= ALONE
    return fold


@compiled
def _write_words(codes: Array, fold: Array, hashes: Array, spans: Array) -> int:
    """Write FNV-1a of each word's letters, mixed, and its span; returns the number of words."""
    count, start, word = 0, -1, FNV_OFFSET
    for at in range(len(codes) + 1):
        folded = fold[codes[at]] if at < len(codes) else np.uint32(0)
        alone = folded & np.uint32(ALONE)
        if start >= 0 and (alone or not folded):
            hashes[count], spans[count, 0], spans[count, 1] = mix(word), start, at
            count += 1
            start = -1
        if alone:
            word = (FNV_OFFSET ^ np.uint64(folded)) * FNV_PRIME
            hashes[count], spans[count, 0], spans[count, 1] = mix(word), at, at + 1
            count += 1
        elif folded:
            if start < 0:
                start, word = at, FNV_OFFSET
            word = (word ^ np.uint64(folded)) * FNV_PRIME
    return count


@compiled
def _find(words: Array, lengths: Array, slots: Array, numbers: Array, places: Array) -> int:
    """Write number, first and last word of every n-gram in the table, as far as `places` has room; returns how many."""
    grams, drops = np.zeros(len(lengths), np.uint64), np.ones(len(lengths), np.uint64)
    for which in range(len(lengths)):
        for _ in range(lengths[which]):
            drops[which] *= BASE
    hits = 0
    for last in range(len(words)):
        for which in range(len(lengths)):
            first = last - lengths[which] + 1
            grams[which] = grams[which] * BASE + words[last]
            if first > 0:
                grams[which] -= words[first - 1] * drops[which]
            if first < 0:
                continue
            gram = mix(grams[which])
            slot = find_slot(slots, gram)
            if slots[slot] == gram:
                if hits < len(places):
                    places[hits, 0], places[hits, 1], places[hits, 2] = numbers[slot], first, last
                hits += 1
    return hits
