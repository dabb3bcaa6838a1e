"""64-bit hashes of folded words and their n-grams, for contamination checks and the quality classifier.

A word is a run of letters, digits and combining marks; punctuation and white space separate words (GPT-3, Brown et al.
2020, appendix C). In scripts without spaces (Han, kana, Thai, Lao, Khmer, Burmese) each letter is a word. Words are
equal where they differ only in case, in Unicode compatibility (NFKC: full-width letters, ligatures) or in invisible
characters (soft hyphens, zero-width spaces).
"""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np

from bessemer.text.hashing import BASE, FNV_OFFSET, FNV_PRIME, Array, compiled, find_slot, hash_table, mix
from bessemer.text.normalise import INVISIBLE, UNSPACED, caseless, code_points

# Flags of a folded character: ALONE, a letter that is one word; MARK, a combining mark, which begins no word; PASSED_OVER, a
# skipped character; SEVERAL, a character that folds to several, with its index in the list of sequences as the value
ALONE, MARK, PASSED_OVER, SEVERAL = (1 << bit for bit in (31, 30, 29, 28))

VOICING = "\u3099\u309a"  # voicing marks of kana, which NFC joins with the letter
APOSTROPHES = "ʹʺʻʼʽʾʿˈˊˋ"  # typed for an apostrophe, though Unicode classes them as letters


def folded_words(text: str) -> tuple[Array, Array]:
    """Return the hash of each word of a text, (words,), and its span [first, end) in characters, (words, 2)."""
    codes = np.frombuffer(text.encode("ascii"), dtype=np.uint8) if text.isascii() else code_points(text)
    count = len(codes)
    while True:
        hashes, spans = np.empty(count, dtype=np.uint64), np.empty((count, 2), dtype=np.int64)
        count = _write_words(codes, *folding(), hashes, spans)
        if count <= len(hashes):  # a character may fold to several words, so that there is not enough room
            return hashes[:count], spans[:count]


@compiled
def table(hashes: Array) -> tuple[Array, Array]:
    """Build a hash table from distinct n-gram hashes.

    Returns two arrays of equal length: the hash in each slot (0 if empty), and the index in `hashes` of that hash.
    """
    slots = hash_table(2 * len(hashes))
    numbers = np.zeros(len(slots), np.int32)
    for number in range(len(hashes)):
        slot = find_slot(slots, hashes[number])
        slots[slot], numbers[slot] = hashes[number], number
    return slots, numbers


def find(text: str, lengths: Array, slots: Array, numbers: Array) -> tuple[Array, Array]:
    """Find the word n-grams of a text, for each n in `lengths`, that are in a hash table.

    `slots` and `numbers` are the arrays that `table` returns. Returns for each occurrence the index of its hash among those
    that the table was built from, (hits,), and its span [first, end) in characters, (hits, 2).
    """
    hashes, spans = folded_words(text)
    hits = np.empty((len(hashes) * len(lengths), 3), dtype=np.int64)  # only written pages take memory
    hits = hits[: _find(hashes, lengths, slots, numbers, hits)]
    return hits[:, 0].astype(np.int32), np.stack([spans[hits[:, 1], 0], spans[hits[:, 2], 1]], axis=1)


@cache
def folding() -> tuple[Array, Array]:
    """Build the tables that fold case and compatibility forms of characters in words.

    Returns two uint32 arrays. The first has, for each code point, the folded code point combined with the flags ALONE (a
    letter that is a word by itself), MARK (a combining mark) and PASSED_OVER (ignored); or 0 if it is in no word. With the
    flag SEVERAL, the code point folds to several characters, and the value is instead an index in the second array, where
    the number of these characters and then the characters are.
    """
    fold, sequences, expanded = np.zeros(0x110000, dtype=np.uint32), list[int](), dict[int, str]()
    for point in (*range(0xD800), *range(0xF900, 0x40000)):  # no surrogates, no private use; the rest has no letters
        character = chr(point)
        category = unicodedata.category(character)[0]
        if category in "LNM":
            fold[point] = point | MARK if category == "M" else point
        if category in "LNMSP" and point not in INVISIBLE and not (point < 128 and category in "SP"):
            whole = unicodedata.normalize("NFKD", caseless(unicodedata.normalize("NFKD", character)))
            if whole != character:
                expanded[point] = whole
    for low, high in UNSPACED:
        block = fold[low : high + 1]
        block[block > 0] = block[block > 0] & ~np.uint32(MARK) | ALONE
    fold[code_points(VOICING)] ^= ALONE | MARK
    fold[code_points(APOSTROPHES)] = 0
    fold[list(INVISIBLE)] = PASSED_OVER
    single = fold.copy()
    for point, whole in expanded.items():
        parts = single[code_points(whole)].tolist()
        fold[point] = parts[0] if len(parts) == 1 else SEVERAL | len(sequences)
        sequences += [len(parts), *parts] if len(parts) > 1 else []
    return fold, np.array(sequences, dtype=np.uint32)


@compiled
def _write_words(codes: Array, fold: Array, sequences: Array, hashes: Array, spans: Array) -> int:
    """Write the hash and the span of each word into `hashes` and `spans`, and return the number of words.

    The hash is FNV-1a over the folded code points, mixed (`hashing.mix`). `fold` and `sequences` are the arrays of
    `folding`. Words beyond the length of `hashes` are counted but not written.
    """
    count, start, end, word, is_alone = 0, -1, 0, FNV_OFFSET, False
    for at in range(len(codes) + 1):
        folded = fold[codes[at]] if at < len(codes) else np.uint32(0)
        if start >= 0 and not is_alone and folded and folded < np.uint32(SEVERAL):  # usual case: next letter of a word
            word, end = (word ^ np.uint64(folded)) * FNV_PRIME, at + 1
            continue
        first, number = np.uint32(0), np.uint32(1)
        if folded & np.uint32(SEVERAL):
            first = folded & np.uint32(SEVERAL - 1)
            number = sequences[first]
        for index in range(number):
            if number > 1:
                folded = sequences[first + index + 1]
            if folded & np.uint32(PASSED_OVER) or (folded & np.uint32(MARK) and start < 0):
                continue
            alone = folded & np.uint32(ALONE) != 0
            if start >= 0 and (not folded or alone or (is_alone and not folded & np.uint32(MARK))):
                if count < len(hashes):
                    hashes[count], spans[count, 0], spans[count, 1] = mix(word), start, end
                count += 1
                start = -1
            if folded:
                if start < 0:
                    start, word, is_alone = at, FNV_OFFSET, alone
                word = (word ^ np.uint64(folded)) * FNV_PRIME
                end = at + 1
    return count


@compiled
def _find(words: Array, lengths: Array, slots: Array, numbers: Array, hits: Array) -> int:
    """Write the n-grams of a text that are in a hash table into `hits`, and return their number.

    `words` are the hashes of the text's words, `lengths` the values of n, `slots` and `numbers` the arrays of `table`. A row
    of `hits` has the index of the n-gram in the table's hashes, and the indices of its first and last word.
    """
    grams, drops = np.zeros(len(lengths), np.uint64), np.ones(len(lengths), np.uint64)
    for which in range(len(lengths)):
        for _ in range(lengths[which]):
            drops[which] *= BASE
    count = 0
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
                hits[count, 0], hits[count, 1], hits[count, 2] = numbers[slot], first, last
                count += 1
    return count
