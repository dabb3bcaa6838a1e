"""Lines and paragraphs of a text, as spans of code points, and what is counted over them; compiled with Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.corpus.rules.characters import (
    ALPHABETIC,
    ALPHANUMERIC,
    BASE64,
    BRACKET,
    COMMON,
    DECIMAL,
    HEXADECIMAL,
    LINE_END,
    NUMERIC,
    SPACE,
    TERMINAL,
    UPPER,
)  # fmt: skip
from bessemer.corpus.rules.compiled import compiled
from bessemer.corpus.rules.words import hash_span

Array = npt.NDArray[Any]
NEWLINE = 10
ESCAPE = 6  # characters of a \uXXXX
DATA_LINE = 40
"""Characters of a line of base64, at least: PEM has 64, MIME 76. Shorter lines are lists of words."""


@compiled
def count_characters(codes: Array, bits: Array) -> Array:
    """Characters that are: alphabetic, alphanumeric, white space, decimal digits, brackets, COMMON, line feeds, #,
    ellipses (the sign, or three full stops; as str.count does, without overlap), one of \\t \\n \\r \\b and space, or
    alphanumeric in Unicode or upper case."""
    found = np.zeros(11, np.int64)
    dots = 0
    for i in range(len(codes)):
        code = codes[i]
        kind = bits[code]
        found[0] += kind & ALPHABETIC != 0
        found[1] += kind & ALPHANUMERIC != 0
        found[2] += kind & SPACE != 0
        found[3] += kind & DECIMAL != 0
        found[4] += kind & BRACKET != 0
        found[5] += kind & COMMON != 0
        found[6] += code == NEWLINE
        found[7] += code == 35
        found[9] += code == 9 or code == 10 or code == 13 or code == 8 or code == 32
        found[10] += kind & UPPER != 0
        if code == 46:
            dots += 1
            if dots == 3:
                found[8] += 1
                dots = 0
        else:
            dots = 0
            found[8] += code == 0x2026
    return found


@compiled
def find_lines(codes: Array, bits: Array, every_end: bool) -> tuple[Array, Array]:
    """Spans of the lines: cut at each line feed as str.split does, or, with `every_end`, as str.splitlines does."""
    count = 1
    for i in range(len(codes)):
        count += codes[i] == NEWLINE or (every_end and bits[codes[i]] & LINE_END != 0)
    starts, ends = np.empty(count, np.int32), np.empty(count, np.int32)
    place, start, i = 0, 0, 0
    while i < len(codes):
        if codes[i] == NEWLINE or (every_end and bits[codes[i]] & LINE_END):
            starts[place], ends[place] = start, i
            place += 1
            if every_end and codes[i] == 13 and i + 1 < len(codes) and codes[i + 1] == NEWLINE:
                i += 1
            start = i + 1
        i += 1
    if not every_end or start < len(codes):
        starts[place], ends[place] = start, len(codes)
        place += 1
    return starts[:place].copy(), ends[:place].copy()


@compiled
def find_blocks(codes: Array, fewest: int, first: int, last: int) -> tuple[Array, Array]:
    """Spans between runs of at least `fewest` line feeds, within first to last, as re.split gives them."""
    count = 1
    for i in range(first, last):
        count += codes[i] == NEWLINE
    starts, ends = np.empty(count, np.int32), np.empty(count, np.int32)
    place, start, i = 0, first, first
    while i < last:
        if codes[i] != NEWLINE:
            i += 1
            continue
        run = i
        while run < last and codes[run] == NEWLINE:
            run += 1
        if run - i >= fewest:
            starts[place], ends[place] = start, i
            place += 1
            start = run
        i = run
    starts[place], ends[place] = start, last
    return starts[: place + 1].copy(), ends[: place + 1].copy()


@compiled
def trim(codes: Array, bits: Array, first: int, last: int) -> tuple[int, int]:
    """The span without white space at both ends."""
    while first < last and bits[codes[first]] & SPACE:
        first += 1
    while last > first and bits[codes[last - 1]] & SPACE:
        last -= 1
    return first, last


@compiled
def count_duplicates(codes: Array, starts: Array, ends: Array) -> tuple[int, int, int]:
    """Spans that stood before, their characters, and the characters of the distinct ones."""
    size = 16
    while size < 2 * len(starts):
        size *= 2
    slots = np.zeros(size, np.uint64)
    mask = np.uint64(size - 1)
    duplicates, characters, distinct = 0, 0, 0
    for i in range(len(starts)):
        key = hash_span(codes, starts[i], ends[i])
        slot = key & mask
        while slots[slot] != 0 and slots[slot] != key:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot] == key:
            duplicates += 1
            characters += ends[i] - starts[i]
        else:
            slots[slot] = key
            distinct += ends[i] - starts[i]
    return duplicates, characters, distinct


@compiled
def drop_blank(codes: Array, bits: Array, starts: Array, ends: Array) -> tuple[Array, Array]:
    """The spans that hold more than white space."""
    kept = np.zeros(len(starts), np.bool_)
    for i in range(len(starts)):
        for at in range(starts[i], ends[i]):
            if not bits[codes[at]] & SPACE:
                kept[i] = True
                break
    return starts[kept], ends[kept]


@compiled
def line_ends(codes: Array, bits: Array, starts: Array, ends: Array, short: int) -> Array:
    """Of non-blank lines, how many: end in terminal punctuation as they stand; have at most `short` characters; end in
    . ? ! \" or ' once trimmed; and the longest line's characters and the characters of all."""
    found = np.zeros(5, np.int64)
    for i in range(len(starts)):
        found[0] += bits[codes[ends[i] - 1]] & TERMINAL != 0
        found[1] += ends[i] - starts[i] <= short
        _, last = trim(codes, bits, starts[i], ends[i])
        code = codes[last - 1]
        found[2] += code == 46 or code == 63 or code == 33 or code == 34 or code == 39
        found[3] = max(found[3], ends[i] - starts[i])
        found[4] += ends[i] - starts[i]
    return found


@compiled
def bullets_and_ellipses(codes: Array, bits: Array, starts: Array, ends: Array) -> tuple[int, int]:
    """Lines that begin with • or -, and lines that end with ... or …, white space aside."""
    bullets, ellipses = 0, 0
    for i in range(len(starts)):
        first, last = trim(codes, bits, starts[i], ends[i])
        if first == last:
            continue
        bullets += codes[first] == 0x2022 or codes[first] == 45
        if codes[last - 1] == 0x2026 or (
            last - first > 2 and codes[last - 1] == 46 and codes[last - 2] == 46 and codes[last - 3] == 46
        ):
            ellipses += 1
    return bullets, ellipses


@compiled
def line_shares(codes: Array, bits: Array, starts: Array, ends: Array) -> tuple[Array, Array]:
    """Upper-case characters and digits of each line."""
    upper, digits = np.zeros(len(starts), np.int32), np.zeros(len(starts), np.int32)
    for i in range(len(starts)):
        for at in range(starts[i], ends[i]):
            upper[i] += bits[codes[at]] & UPPER != 0
            digits[i] += bits[codes[at]] & NUMERIC != 0
    return upper, digits


@compiled
def encoded_runs(codes: Array, bits: Array, fewest: int) -> tuple[int, int]:
    """The longest run of encoded data, and the characters of all: base64 of at least `fewest` characters, with line
    feeds after lines of at least DATA_LINE; at least eight bytes in hexadecimal, each with or without 0x or \\x,
    commas and blanks between; or at least eight characters in a row written \\uXXXX."""
    longest, total = 0, 0
    at = 0
    while at < len(codes):
        escapes = _escapes(codes, bits, at)
        if escapes - at >= 8 * ESCAPE:
            longest, total = max(longest, escapes - at), total + escapes - at
            at = escapes
            continue
        end, line = at, at
        while end < len(codes) and (bits[codes[end]] & BASE64 or (codes[end] == NEWLINE and end - line >= DATA_LINE)):
            end += 1
            if codes[end - 1] == NEWLINE:
                line = end
        if end - at >= fewest:
            longest, total = max(longest, end - at), total + end - at
            at = end
            continue
        hexadecimal, num_bytes = at, 0
        if not at or not bits[codes[at - 1]] & ALPHANUMERIC:
            hexadecimal, num_bytes = _hexadecimal(codes, bits, at)
        if num_bytes >= 8:
            longest, total = max(longest, hexadecimal - at), total + hexadecimal - at
            at = hexadecimal
        else:
            at = max(end, at + 1)
    return longest, total


@compiled
def _escapes(codes: Array, bits: Array, at: int) -> int:
    """Where a run of escaped characters, \\u and four hexadecimal digits each, ends."""
    while at + ESCAPE <= len(codes) and codes[at] == 92 and codes[at + 1] == 117:
        for digit in range(at + 2, at + ESCAPE):
            if not bits[codes[digit]] & HEXADECIMAL:
                return at
        at += ESCAPE
    return at


@compiled
def _hexadecimal(codes: Array, bits: Array, at: int) -> tuple[int, int]:
    """Where a run of bytes in hexadecimal ends, and how many there are; the digits of one may not go on."""
    num_bytes, end = 0, at
    while at < len(codes):
        if at + 1 < len(codes) and codes[at + 1] == 120 and (codes[at] == 48 or codes[at] == 92):
            at += 2
        if at + 1 >= len(codes) or not (bits[codes[at]] & HEXADECIMAL and bits[codes[at + 1]] & HEXADECIMAL):
            break
        at += 2
        if at < len(codes) and bits[codes[at]] & ALPHANUMERIC:
            break
        num_bytes += 1
        end = at
        gap = 0
        while at < len(codes) and gap < 80 and (codes[at] == 44 or bits[codes[at]] & SPACE):
            at += 1
            gap += 1
    return end, num_bytes
