"""URLs and e-mail addresses, which the word splitter does not cut further; compiled with Numba.

What counts as one is spaCy's pattern (lang/tokenizer_exceptions.py, after Diego Perini's), as a walk over the
characters: an optional scheme, an optional user, a host with a top-level domain in small letters or four numbers, an
optional port and path.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from bessemer.corpus.rules.characters import LETTER, LOWER_LETTER
from bessemer.corpus.rules.compiled import compiled

Array = npt.NDArray[Any]

MOST_SIGNS = 8
"""Positions of @ in a word after which a host is looked for."""


@compiled
def is_digit(code: int) -> bool:
    """Whether a code point is one of 0 to 9."""
    return 48 <= code <= 57


@compiled
def _is_private(codes: Array, first: int) -> bool:
    """Whether four numbers with full stops between are an address of a local network, which the pattern leaves out."""
    one, two, at = 0, 0, first
    while codes[at] != 46:
        one = 10 * one + codes[at] - 48
        at += 1
    at += 1
    while codes[at] != 46:
        two = 10 * two + codes[at] - 48
        at += 1
    if one == 10 or one == 127:
        return True
    return (one == 169 and two == 254) or (one == 192 and two == 168) or (one == 172 and 16 <= two <= 31)


@compiled
def _is_host(codes: Array, first: int, last: int, bits: Array) -> bool:
    """Whether a host name with a top-level domain, or four numbers, stands here, then a port and a path or nothing."""
    end = first
    while end < last and not (codes[end] == 58 or codes[end] == 47 or codes[end] == 63 or codes[end] == 35):
        if codes[end] < 0xA1 and not (
            is_digit(codes[end])
            or 97 <= codes[end] | 32 <= 122
            or codes[end] == 45
            or codes[end] == 46
            or codes[end] == 95
        ):
            return False
        end += 1
    after = end
    if after < last and codes[after] == 58:
        after += 1
        digits = after
        while after < last and is_digit(codes[after]):
            after += 1
        if not 2 <= after - digits <= 5:
            return False
        if after < last and not (codes[after] == 47 or codes[after] == 63 or codes[after] == 35):
            return False
    start = first
    num_labels, num_numbers = 0, 0
    for at in range(first, end + 1):
        if at < end and codes[at] != 46:
            continue
        if at == start:
            return False
        if at == end:
            break
        if at - start > 64 or codes[start] == 45 or codes[start] == 95 or codes[at - 1] == 45 or codes[at - 1] == 95:
            return False
        num_labels += 1
        num_numbers += at - start <= 3 and is_digit(codes[start]) and is_digit(codes[at - 1])
        start = at + 1
    if num_labels == 0:
        return False
    if (
        num_labels == 3
        and num_numbers == 3
        and end - start <= 3
        and is_digit(codes[start])
        and is_digit(codes[end - 1])
    ):
        return not _is_private(codes, first)
    if not 2 <= end - start <= 63:
        return False
    for at in range(start, end):  # noqa: SIM110 - Numba compiles no generator expression
        if not bits[codes[at]] & LOWER_LETTER:
            return False
    return True


@compiled
def is_url(codes: Array, first: int, last: int, bits: Array) -> bool:
    """Whether a word is a URL, with or without its scheme, or an e-mail address: it is not cut further."""
    start = first
    for at in range(first, min(last - 2, first + 64)):
        if codes[at] == 58 and codes[at + 1] == 47 and codes[at + 2] == 47:
            start = at + 3 if at - first >= 2 else first
            break
        if not (is_digit(codes[at]) or bits[codes[at]] & LETTER or 43 <= codes[at] <= 46 or codes[at] == 95):
            break
    if _is_host(codes, start, last, bits):
        return True
    signs = 0
    for at in range(start + 1, last):
        if codes[at] == 64:
            signs += 1
            if signs > MOST_SIGNS:
                break
            if _is_host(codes, at + 1, last, bits):
                return True
    return False
