"""Counts and spans of a text's characters, lines and paragraphs, in code points; compiled with Numba."""

from __future__ import annotations

import numpy as np

from bessemer.text import characters as kinds
from bessemer.text.hashing import Array, compiled, find_slot, hash_span, hash_table

ESCAPE = 6  # characters of an escape \uXXXX
MIN_DATA_LINE = 40  # characters of a line of base64: PEM has 64, MIME 76; shorter lines may be lists of words


@compiled
def count_classes(codes: Array, classes: Array, num_classes: int) -> Array:
    """Count the characters of a text, given as code points, by class: (num_classes,).

    `classes` has the class of every code point (`characters.classes`).
    """
    counts = np.zeros(num_classes, np.int64)
    for code in codes:
        counts[classes[code]] += 1
    return counts


@compiled
def find_lines(codes: Array, bits: Array, every_end: bool) -> tuple[Array, Array]:
    """Return the starts and ends of the lines, split at line feeds or, with `every_end`, where str.splitlines() splits.

    Here and below, `codes` are the code points of the text, `bits` the flags of every code point (`characters.table`), and
    starts and ends are indices in `codes`.
    """
    starts, ends = np.empty(len(codes) + 1, np.int32), np.empty(len(codes) + 1, np.int32)
    count, start, i = 0, 0, 0
    while i < len(codes):
        if codes[i] == 10 or (every_end and bits[codes[i]] & kinds.LINE_END):
            starts[count], ends[count] = start, i
            count += 1
            if every_end and codes[i] == 13 and i + 1 < len(codes) and codes[i + 1] == 10:
                i += 1
            start = i + 1
        i += 1
    if not every_end or start < len(codes):
        starts[count], ends[count] = start, len(codes)
        count += 1
    return starts[:count].copy(), ends[:count].copy()


@compiled
def find_blocks(codes: Array, min_line_feeds: int, first: int, last: int) -> tuple[Array, Array]:
    """Split codes[first:last] at runs of at least `min_line_feeds` line feeds, like re.split.

    Returns the starts and ends of the pieces.
    """
    starts, ends = np.empty(last - first + 1, np.int32), np.empty(last - first + 1, np.int32)
    count, start, i = 0, first, first
    while i < last:
        run = i
        while run < last and codes[run] == 10:
            run += 1
        if run - i >= min_line_feeds:
            starts[count], ends[count] = start, i
            count += 1
            start = run
        i = max(run, i + 1)
    starts[count], ends[count] = start, last
    return starts[: count + 1].copy(), ends[: count + 1].copy()


@compiled
def trim(codes: Array, bits: Array, first: int, last: int) -> tuple[int, int]:
    """Return the limits of the span codes[first:last] without white space at its ends."""
    while first < last and bits[codes[first]] & kinds.SPACE:
        first += 1
    while last > first and bits[codes[last - 1]] & kinds.SPACE:
        last -= 1
    return first, last


@compiled
def drop_blank(codes: Array, bits: Array, starts: Array, ends: Array) -> tuple[Array, Array]:
    """Return the starts and ends of the spans that contain a character other than white space."""
    has_text = np.zeros(len(starts), np.bool_)
    for i in range(len(starts)):
        first, last = trim(codes, bits, starts[i], ends[i])
        has_text[i] = first < last
    return starts[has_text], ends[has_text]


@compiled
def count_duplicates(codes: Array, starts: Array, ends: Array) -> tuple[int, int]:
    """Return the number of spans whose text equals that of an earlier span, and the sum of their characters."""
    slots = hash_table(len(starts))
    duplicates, characters = 0, 0
    for i in range(len(starts)):
        key = hash_span(codes, starts[i], ends[i])
        slot = find_slot(slots, key)
        if slots[slot] == key:
            duplicates += 1
            characters += ends[i] - starts[i]
        else:
            slots[slot] = key
    return duplicates, characters


@compiled
def bullets_and_ellipses(codes: Array, bits: Array, starts: Array, ends: Array) -> tuple[int, int]:
    """Count the lines that begin with • or -, and those that end with ... or …

    White space at the ends of a line is ignored.
    """
    bullets, ellipses = 0, 0
    for i in range(len(starts)):
        first, last = trim(codes, bits, starts[i], ends[i])
        if first < last:
            dots = last
            while dots > first and codes[dots - 1] == 46 and last - dots < 3:
                dots -= 1
            bullets += codes[first] == 0x2022 or codes[first] == 45
            ellipses += last - dots == 3 or codes[last - 1] == 0x2026
    return bullets, ellipses


@compiled
def encoded_runs(codes: Array, bits: Array, min_base64: int) -> tuple[int, int]:
    r"""Return the number of characters in the longest run of encoded data, and in all runs.

    A run is at least `min_base64` characters of base64, with line feeds after lines of at least MIN_DATA_LINE; or at
    least 8 hexadecimal bytes, each with or without 0x or \x, separated by commas and blanks; or at least 8 \uXXXX
    escapes in a row.
    """
    longest, total, at = 0, 0, 0
    while at < len(codes):
        end, line = _escapes(codes, bits, at), at
        if end - at < 8 * ESCAPE:
            end = at
            while end < len(codes) and (
                bits[codes[end]] & kinds.BASE64 or (codes[end] == 10 and end - line >= MIN_DATA_LINE)
            ):
                end += 1
                if codes[end - 1] == 10:
                    line = end
            if end - at < min_base64:
                hexadecimal, num_bytes = at, 0
                if not at or not bits[codes[at - 1]] & kinds.ALPHANUMERIC:
                    hexadecimal, num_bytes = _hexadecimal(codes, bits, at)
                if num_bytes < 8:
                    at = max(end, at + 1)
                    continue
                end = hexadecimal
        longest, total = max(longest, end - at), total + end - at
        at = end
    return longest, total


@compiled
def _escapes(codes: Array, bits: Array, at: int) -> int:
    r"""Return the index after the run of \uXXXX escapes that begins at index `at`; `at` itself if none begins there."""
    while at + ESCAPE <= len(codes) and codes[at] == 92 and codes[at + 1] == 117:
        for digit in range(at + 2, at + ESCAPE):
            if not bits[codes[digit]] & kinds.HEXADECIMAL:
                return at
        at += ESCAPE
    return at


@compiled
def _hexadecimal(codes: Array, bits: Array, at: int) -> tuple[int, int]:
    """Return the index after the run of hexadecimal bytes that begins at index `at`, and their number.

    A byte followed directly by a letter or digit ends the run and is not part of it.
    """
    num_bytes, end = 0, at
    while at < len(codes):
        if at + 1 < len(codes) and codes[at + 1] == 120 and (codes[at] == 48 or codes[at] == 92):  # 0x \x
            at += 2
        if at + 1 >= len(codes) or not bits[codes[at]] & bits[codes[at + 1]] & kinds.HEXADECIMAL:
            break
        at += 2
        if at < len(codes) and bits[codes[at]] & kinds.ALPHANUMERIC:
            break
        num_bytes += 1
        end = at
        while at < len(codes) and at - end < 80 and (codes[at] == 44 or bits[codes[at]] & kinds.SPACE):
            at += 1
    return end, num_bytes
