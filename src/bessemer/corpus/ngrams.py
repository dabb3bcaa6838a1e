"""Words and their n-grams as 64-bit hashes, in one pass over a text (numba).

A word is a run of letters, digits and combining marks, in lower case; punctuation and white space part words and count
for nothing (GPT-3, Brown et al. 2020, appendix C: lower case, without punctuation). In scripts that write without
spaces (Han, kana, Thai, Lao, Khmer, Burmese) each letter is a word of its own.

An n-gram's hash is a polynomial over its words' hashes mod 2^64, so that each step costs two multiplications. Two
different n-grams share one with a probability of about 2^-64.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numba
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """To machine code at the first call, kept beside the module; other threads run meanwhile."""
    machine_code: Function = numba.njit(cache=True, nogil=True)(function)
    return machine_code


ALONE = 1 << 31
"""Marks a letter that is a word of its own."""

UNSPACED = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3040, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0xFF66, 0xFF9F), (0x20000, 0x323AF),
)  # fmt: skip
"""Blocks of scripts without spaces between words (Unicode, Blocks.txt): Thai and Lao, Myanmar, Khmer, Han, kana."""

BASE = 0x9E3779B97F4A7C15
"""An odd number: it can be divided by mod 2^64, so that no word's share of the hash is lost."""


def codes(text: str) -> NDArray[Any]:
    """The text's characters as numbers; one byte each where it can be."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def gram_hashes(text: str, length: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The hash of each n-gram of so many words, and where it begins and ends: (number, 2), in characters."""
    characters = codes(text)
    number = int(_count(characters, folding()))
    hashes = np.empty(max(number - length + 1, 0), dtype=np.uint64)
    spans = np.empty((len(hashes), 2), dtype=np.int64)
    if len(hashes):
        _hash(characters, folding(), length, hashes, spans)
    return hashes, spans


def num_words(text: str) -> int:
    """Words of a text."""
    return int(_count(codes(text), folding()))


def table(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """A hash table of distinct hashes: slots with the hash (0: empty) and slots with its number."""
    size = 1024
    while size < 4 * len(hashes):
        size *= 2
    slots, numbers = np.zeros(size, dtype=np.uint64), np.zeros(size, dtype=np.int32)
    _fill(hashes, slots, numbers)
    return slots, numbers


def find(
    text: str, lengths: NDArray[np.int64], slots: NDArray[np.uint64], numbers: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The n-grams of a text that stand in the table: their numbers, and where they begin and end: (number, 2).

    lengths: the lengths, in words, of the n-grams in the table, shortest first.
    """
    characters = codes(text)
    none = np.empty(0, dtype=np.int32), np.empty((0, 2), dtype=np.int64)
    # Most documents hold nothing: the first pass counts, and only where it counted a second one writes.
    number = int(_find(characters, folding(), lengths, slots, numbers, *none))
    if not number:
        return none
    found, spans = np.empty(number, dtype=np.int32), np.empty((number, 2), dtype=np.int64)
    _find(characters, folding(), lengths, slots, numbers, found, spans)
    return found, spans


@cache
def folding() -> NDArray[np.uint32]:
    """For each code point: its lower case, 0 where it is in no word; ALONE added where it is a word by itself."""
    fold = np.zeros(0x110000, dtype=np.uint32)
    for point in range(0x110000):
        if 0xD800 <= point < 0xF900 or point >= 0x40000:
            continue  # surrogates and private use; beyond plane 3 there are no letters
        character = chr(point)
        if unicodedata.category(character)[0] in "LNM":
            fold[point] = ord(character.lower()[0])
    for low, high in UNSPACED:
        block = fold[low : high + 1]
        block[block > 0] |= ALONE
    return fold


@compiled
def _finished(word: np.uint64) -> np.uint64:
    """The mixing step of SplitMix64 (Steele et al. 2014): every bit of a word's hash depends on every letter."""
    word ^= word >> np.uint64(30)
    word *= np.uint64(0xBF58476D1CE4E5B9)
    word ^= word >> np.uint64(27)
    word *= np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@compiled
def _count(characters: Any, fold: Any) -> int:
    words = 0
    inside = False
    for character in characters:
        folded = fold[character]
        if folded & np.uint32(ALONE):
            words += 1
            inside = False
        elif folded:
            words += not inside
            inside = True
        else:
            inside = False
    return words


@compiled
def _next_word(characters: Any, fold: Any, position: int) -> tuple[int, int, np.uint64]:
    """The next word from a position: where it begins and ends, and its hash; it begins at the end when there is none."""
    size = len(characters)
    while position < size and not fold[characters[position]]:
        position += 1
    start = position
    word = np.uint64(0xCBF29CE484222325)
    if position < size and fold[characters[position]] & np.uint32(ALONE):
        word = (word ^ np.uint64(fold[characters[position]])) * np.uint64(0x100000001B3)
        return start, position + 1, _finished(word)
    while position < size:
        folded = fold[characters[position]]
        if not folded or folded & np.uint32(ALONE):
            break
        word = (word ^ np.uint64(folded)) * np.uint64(0x100000001B3)  # FNV-1a, a character at a time
        position += 1
    return start, position, _finished(word)


@compiled
def _hash(characters: Any, fold: Any, length: int, hashes: Any, spans: Any) -> None:
    words = np.zeros(length, dtype=np.uint64)
    starts = np.zeros(length, dtype=np.int64)
    gone = np.uint64(1)
    for _ in range(length):
        gone *= np.uint64(BASE)
    gram, position, count = np.uint64(0), 0, 0
    while True:
        start, position, word = _next_word(characters, fold, position)
        if start >= len(characters):
            return
        slot = count % length
        gram = gram * np.uint64(BASE) + word - words[slot] * gone
        words[slot], starts[slot] = word, start
        count += 1
        if count >= length:
            hashes[count - length] = gram + np.uint64(length)
            spans[count - length, 0], spans[count - length, 1] = starts[count % length], position


@compiled
def _slot(slots: Any, gram: np.uint64) -> Any:
    """Where a hash stands in the table, or the empty slot where it would."""
    mask = len(slots) - 1
    place = np.int64((gram ^ (gram >> np.uint64(32))) & np.uint64(mask))
    while slots[place] and slots[place] != gram:
        place = (place + 1) & mask
    return place


@compiled
def _fill(hashes: Any, slots: Any, numbers: Any) -> None:
    for number in range(len(hashes)):
        place = _slot(slots, hashes[number])
        slots[place], numbers[place] = hashes[number], number


@compiled
def _find(characters: Any, fold: Any, lengths: Any, slots: Any, numbers: Any, found: Any, spans: Any) -> int:
    longest = lengths[-1]
    words = np.zeros(longest, dtype=np.uint64)
    starts = np.zeros(longest, dtype=np.int64)
    grams = np.zeros(len(lengths), dtype=np.uint64)
    gone = np.ones(len(lengths), dtype=np.uint64)
    for which in range(len(lengths)):
        for _ in range(lengths[which]):
            gone[which] *= np.uint64(BASE)
    position, count, hits = 0, 0, 0
    while True:
        start, position, word = _next_word(characters, fold, position)
        if start >= len(characters):
            return hits
        for which in range(len(lengths)):
            length = lengths[which]
            leaving = words[(count - length) % longest] if count >= length else np.uint64(0)
            grams[which] = grams[which] * np.uint64(BASE) + word - leaving * gone[which]
        words[count % longest], starts[count % longest] = word, start
        count += 1
        for which in range(len(lengths)):
            length = lengths[which]
            if count >= length:
                gram = grams[which] + np.uint64(length)
                place = _slot(slots, gram)
                if slots[place]:
                    if hits < len(found):
                        found[hits] = numbers[place]
                        spans[hits, 0], spans[hits, 1] = starts[(count - length) % longest], position
                    hits += 1
