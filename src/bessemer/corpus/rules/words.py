"""A text cut into words as spaCy's blank English tokenizer cuts it, compiled with Numba.

A word for the rule sets is what datatrove counts: a run without white space, minus the punctuation in front of it and
behind it, cut at hyphens, slashes and full stops between letters; contractions are two words (do n't). The algorithm
and its order of attempts are spaCy's ("How spaCy's tokenizer works" in its manual); every attempt here looks at a
bounded number of characters, so that the time is linear in the text. What differs: five emoticons outside ASCII,
symbols that newer versions of Unicode added, and URLs with more than eight @.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.corpus.rules.addresses import is_digit, is_url
from bessemer.corpus.rules.characters import (
    BEFORE_DOT,
    CURRENCY,
    ICON,
    INFIX,
    LETTER,
    LOWER_LETTER,
    PLAIN,
    PREFIX,
    QUOTE,
    SPACE,
    STARTS_SPECIAL,
    SUFFIX,
    UPPER_LETTER,
    table,
)  # fmt: skip
from bessemer.corpus.rules.compiled import compiled
from bessemer.corpus.rules.specials import LONGEST, UNITS, specials

Array = npt.NDArray[Any]

SLOTS = 8192
"""Slots of the table of special strings, a power of two; it holds about 1,500."""
UNIT, MERGED = 1 << 30, 1 << 29
"""Values: a unit of measurement; a string that is put together again where it was cut: most are emoticons."""
LONGEST_UNIT = 5
LOOKED_AT = 24
"""Letters that are looked over at once; most words have fewer."""
LONGEST_MERGED = 9
"""Pieces of a string that was cut, at most."""
SEED, FACTOR, SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFF51AFD7ED558CCD), np.uint64(32)
ONE, SLOT_MASK = np.uint64(1), np.uint64(SLOTS - 1)
ENDS = 128 * 128
"""After the slots: for each first and last character (their low 7 bits), a bit for each length that a special string
has. Nearly every word is seen not to be one without its hash."""


def split(codes: Array) -> tuple[Array, Array]:
    """First character of every word, and the one after its last; `codes` are code points."""
    starts, ends = split_words(codes, table(), *special_table())
    return starts, ends


@cache
def special_table() -> tuple[Array, Array]:
    """Special strings by their hash: open addressing; the value holds the lengths of the words, or what it is for."""
    keys, values = np.zeros(SLOTS + ENDS, np.uint64), np.zeros(SLOTS, np.uint32)
    none = keys.copy(), values.copy()
    entries = [(text, pieces, 0) for text, pieces in specials().items()] + [(unit, (), UNIT) for unit in UNITS.split()]
    for text, pieces, flags in entries:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        for place, piece in enumerate(pieces):
            flags |= len(piece) << 4 * place
        if len(pieces) == 1:
            num_cut = len(split_words(codes, table(), *none)[0])
            flags |= MERGED | num_cut << 16 if num_cut > 1 else 0
        keys[SLOTS + (ord(text[0]) & 127) * 128 + (ord(text[-1]) & 127)] |= np.uint64(1 << len(text))
        key = hash_span(codes, 0, len(codes))
        slot = int(key) % SLOTS
        while keys[slot] not in (0, key):
            slot = (slot + 1) % SLOTS
        keys[slot] = key
        values[slot] |= np.uint32(flags)
    return keys, values


@compiled
def hash_span(codes: Array, first: int, last: int) -> np.uint64:
    """64-bit hash of the characters from first to before last; never 0."""
    h = SEED
    for i in range(first, last):
        h = (h ^ np.uint64(codes[i])) * FACTOR
        h ^= h >> SHIFT
    return h | ONE


@compiled
def look_up(codes: Array, first: int, last: int, keys: Array, values: Array) -> int:
    """Value of the special string first to last; 0 when it is none."""
    if last - first > LONGEST or last <= first:
        return 0
    lengths = keys[SLOTS + (np.int64(codes[first]) & 127) * 128 + (np.int64(codes[last - 1]) & 127)]
    if not (lengths >> np.uint64(last - first)) & ONE:
        return 0
    key = hash_span(codes, first, last)
    slot = key & SLOT_MASK
    while keys[slot] != 0:
        if keys[slot] == key:
            return int(values[slot])
        slot = (slot + ONE) & SLOT_MASK
    return 0


@compiled
def _special(codes: Array, first: int, last: int, keys: Array, values: Array) -> int:
    """Lengths of the words of a special string, 4 bits each; 0 when it is none."""
    return look_up(codes, first, last, keys, values) & 0xFFF


@compiled
def _prefix(codes: Array, first: int, last: int, bits: Array) -> int:
    """Characters to cut off at the start."""
    code = codes[first]
    if bits[code] & PREFIX:
        return 1
    if code == 43:  # + unless a digit follows
        return 0 if first + 1 < last and is_digit(codes[first + 1]) else 1
    if code == 46:  # two full stops or more
        end = first
        while end < last and codes[end] == 46:
            end += 1
        return end - first if end - first > 1 else 0
    if last - first > 1 and codes[first + 1] == 36 and (code == 67 or code == 65):  # C$ A$
        return 2
    if last - first > 2 and code == 85 and codes[first + 1] == 83 and codes[first + 2] == 36:  # US$
        return 3
    return 0


@compiled
def _suffix(codes: Array, first: int, last: int, bits: Array, keys: Array, values: Array) -> int:
    """Characters to cut off at the end: the longest that any pattern finds."""
    if first >= last:
        return 0
    code = codes[last - 1]
    kind = bits[code]
    found = 1 if kind & SUFFIX else 0
    before = codes[last - 2] if last - 2 >= first else codes[last - 1] * 0
    if code == 46:
        start = last
        while start > first and codes[start - 1] == 46:
            start -= 1
        if last - start > 1:
            return last - start
        if before and bits[before] & BEFORE_DOT:
            return 1
        third = codes[last - 3] if last - 3 >= first else before * 0
        if third and bits[before] & UPPER_LETTER and bits[third] & UPPER_LETTER:
            return 1
        return 1 if third == 0xB0 and (before == 70 or before == 67 or before == 75) else 0
    if (code == 115 or code == 83) and (before == 39 or before == 0x2019):  # 's
        found = 2
    if is_digit(before) and (code == 43 or kind & CURRENCY):
        found = max(found, 1)
    if code == 36:  # 5US$ 5C$
        if last - 4 >= first and codes[last - 3] == 85 and before == 83 and is_digit(codes[last - 4]):
            found = 3
        if last - 3 >= first and (before == 67 or before == 65) and is_digit(codes[last - 3]):
            found = max(found, 2)
    for length in range(1, LONGEST_UNIT + 1):
        if last - length - 1 < first or is_digit(codes[last - length]):
            break
        if is_digit(codes[last - length - 1]):
            if look_up(codes, last - length, last, keys, values) & UNIT:
                found = max(found, length)
            break
    return found


@compiled
def _infix(codes: Array, at: int, first: int, last: int, bits: Array) -> int:
    """Characters to cut out at a place inside a word."""
    code = codes[at]
    kind = bits[code]
    if code == 46 and at + 1 < last and codes[at + 1] == 46:
        end = at
        while end < last and codes[end] == 46:
            end += 1
        return end - at
    if code == 0x2026 or kind & ICON:
        return 1
    if at == first or at + 1 >= last:
        return 0
    before, after = codes[at - 1], codes[at + 1]
    left, right = bits[before], bits[after]
    if (code == 43 or code == 45 or code == 42 or code == 94) and is_digit(before) and (is_digit(after) or after == 45):
        return 1
    if code == 46:
        return 1 if left & (LOWER_LETTER | QUOTE) and right & (UPPER_LETTER | QUOTE) else 0
    if code == 44:
        return 1 if left & LETTER and right & LETTER else 0
    if not left & LETTER and not is_digit(before):
        return 0
    if code == 58 or code == 60 or code == 61 or code == 62 or code == 47:  # : < = > /
        return 1 if right & LETTER else 0
    if code == 45 or code == 0x2013 or code == 0x2014 or code == 126:  # - – — ~
        if right & LETTER:
            return 1
        most = 3 if code == 45 else 2 if code == 0x2014 else 1
        for length in range(2, most + 1):
            if at + length >= last or codes[at + length - 1] != code:
                return 0
            if bits[codes[at + length]] & LETTER:
                return length
    return 0


def split_words(codes: Array, bits: Array, keys: Array, values: Array) -> tuple[Array, Array]:
    """First character of every word, and the one after its last."""
    starts, ends = np.empty(len(codes), np.int32), np.empty(len(codes), np.int32)  # only what is written takes memory
    count = write_words(codes, bits, keys, values, starts, ends)
    return starts[:count].copy(), ends[:count].copy()


@compiled
def write_words(codes: Array, bits: Array, keys: Array, values: Array, starts: Array, ends: Array) -> int:
    """Words into starts and ends, which have a place for every character; returns how many there are."""
    length = len(codes)
    count, at = 0, 0
    while at < length:
        while at < length and bits[codes[at]] & SPACE:
            at += 1
        if at >= length:
            break
        first = at
        plain = True
        while at < length:
            kind = bits[codes[at]]
            if kind & SPACE:
                break
            plain = plain and kind & PLAIN != 0
            at += 1
        if plain and not _special(codes, first, at, keys, values):
            starts[count], ends[count] = first, at
            count += 1
        else:
            count = _split_run(codes, first, at, bits, keys, values, starts, ends, count)
    return count


@compiled
def _write(lengths: int, first: int, starts: Array, ends: Array, count: int) -> int:
    """Write a special string as the words it is; returns the new count."""
    while lengths:
        starts[count] = first
        first += lengths & 15
        ends[count] = first
        count += 1
        lengths >>= 4
    return count


@compiled
def _split_run(
    codes: Array, first: int, last: int, bits: Array, keys: Array, values: Array, starts: Array, ends: Array, count: int
) -> int:
    """Cut one run without white space; words are written to starts and ends from `count` on."""
    begin = count
    low, high = first, last
    tail = count + last - first  # suffixes are stacked from here downwards; words never outnumber characters
    size = -1
    lengths = _special(codes, first, last, keys, values)
    letters = False
    while low < high and high - low != size and not lengths:
        size = high - low
        letters = _letters_alone(codes, low, high, bits)
        if letters:
            break
        front = _prefix(codes, low, high, bits)
        if front:
            starts[count], ends[count] = low, low + front
            lengths = _special(codes, low + front, high, keys, values)
            if lengths:
                count += 1
                low += front
                break
        back = _suffix(codes, low + front, high, bits, keys, values)
        if back:
            tail -= 1
            starts[tail], ends[tail] = high - back, high
            lengths = _special(codes, low, high - back, keys, values)
            if lengths:
                high -= back
                break
        if front:
            count += 1
            low += front
        high -= back
        if front or back:
            lengths = _special(codes, low, high, keys, values)
    if lengths:
        count = _write(lengths, low, starts, ends, count)
    elif letters:
        starts[count], ends[count] = low, high
        count += 1
    elif low < high:
        count = _cut_inside(codes, low, high, bits, starts, ends, count)
    for place in range(tail, begin + last - first):
        starts[count], ends[count] = starts[place], ends[place]
        count += 1
    if count - begin > 1:
        return _merge(codes, begin, count, bits, keys, values, starts, ends)
    return count


@compiled
def _letters_alone(codes: Array, first: int, last: int, bits: Array) -> bool:
    """Whether a word of a common length has letters alone, so that nothing more is cut off or out."""
    if last - first > LOOKED_AT:
        return False
    for at in range(first, last):  # noqa: SIM110 - Numba compiles no generator expression
        if not bits[codes[at]] & PLAIN:
            return False
    return True


@compiled
def _cut_inside(codes: Array, low: int, high: int, bits: Array, starts: Array, ends: Array, count: int) -> int:
    at, start = low + 1, low
    looked = False
    while at < high:
        length = _infix(codes, at, low, high, bits) if bits[codes[at]] & INFIX else 0
        if length and not looked:
            looked = True
            if is_url(codes, low, high, bits):
                break
        if length:
            if at > start:
                starts[count], ends[count] = start, at
                count += 1
            starts[count], ends[count] = at, at + length
            count += 1
            start = at + length
            at = start
        else:
            at += 1
    if start < high:
        starts[count], ends[count] = start, high
        count += 1
    return count


@compiled
def _may_merge(code: int, following: int, bits: Array) -> bool:
    """Whether a special string that was cut can begin with these two words, by their first characters."""
    if not bits[code] & STARTS_SPECIAL:
        return False
    if bits[code] & LETTER:  # Mr. goin' and/or
        return following == 46 or following == 39 or following == 0x2019 or following == 47
    return True


@compiled
def _merge(
    codes: Array, begin: int, count: int, bits: Array, keys: Array, values: Array, starts: Array, ends: Array
) -> int:
    """Put together the special strings among neighbouring words of one run, the longest first."""
    place, out = begin, begin
    while place < count:
        taken = 1
        if place + 1 < count and _may_merge(codes[starts[place]], codes[starts[place + 1]], bits):
            most = 1
            while most < LONGEST_MERGED and place + most < count and ends[place + most] - starts[place] <= LONGEST:
                most += 1
            for number in range(most, 1, -1):
                value = look_up(codes, starts[place], ends[place + number - 1], keys, values)
                if value & MERGED and (value >> 16) & 15 == number:
                    taken = number
                    break
        starts[out], ends[out] = starts[place], ends[place + taken - 1]
        out += 1
        place += taken
    return out
