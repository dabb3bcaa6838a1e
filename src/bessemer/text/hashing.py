"""A decorator that compiles functions, 64-bit hashes of words and n-grams, and hash tables of them."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

from bessemer.text.normalise import TIBETAN, UNSPACED

Array = npt.NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])

FNV_OFFSET, FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # FNV-1a with 64 bits (RFC 9923)

# Base of the polynomial over words and of SplitMix64; it is odd, so that no bit of a word's hash is shifted out.
BASE = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIER, SHIFT, ONE = np.uint64(0xFF51AFD7ED558CCD), np.uint64(32), np.uint64(1)
SPACE, NEWLINE = np.uint8(32), np.uint8(10)

# Scripts without spaces by the first two bytes of a character in UTF-8: 64 characters of three bytes, or 4,096 of four
LEADS_ALONE = np.zeros((32, 64), dtype=np.bool_)
for _low, _high in (*UNSPACED[:-1], TIBETAN):
    LEADS_ALONE.reshape(-1)[_low >> 6 : (_high >> 6) + 1] = True
LEADS_ALONE[16, UNSPACED[-1][0] >> 12 : (UNSPACED[-1][1] >> 12) + 1] = True

# Hash of this folder's files. Numba checks only the file of a function to see whether its machine code is current, not
# the functions and constants of other files that were compiled into it; so the hash is part of the cache key.
SOURCES = blake2b(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))), digest_size=6
).hexdigest()


def compiled(function: Function) -> Function:
    """Compile a function with Numba at its first call, so that it runs without the GIL.

    The machine code is cached on disk if the cache folder is writable.
    """
    function.__qualname__ = f"{function.__qualname__}_{SOURCES}"
    try:
        return cast(Function, njit(nogil=True, cache=True, error_model="numpy")(function))
    except RuntimeError:  # neither the source's folder nor the user's cache is writable
        return cast(Function, njit(nogil=True, error_model="numpy")(function))


@compiled
def mix(value: np.uint64) -> np.uint64:
    """Mix 64 bits with a bijection in which each input bit affects all output bits (MurmurHash3, fmix64)."""
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xFF51AFD7ED558CCD)
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


def splitmix(seed: int, count: int) -> Array:
    """Return `count` pseudo-random 64-bit numbers, the same with any library version (SplitMix64, Steele 2014)."""
    states = [(seed + int(BASE) * number) % (1 << 64) for number in range(1, count + 1)]
    return np.array([mix(np.uint64(state)) for state in states], np.uint64)


@compiled
def hash_span(codes: Array, first: int, last: int) -> np.uint64:
    """Return a 64-bit hash, never 0, of the code points codes[first:last]."""
    value = BASE
    for at in range(first, last):
        value = (value ^ np.uint64(codes[at])) * MULTIPLIER
        value ^= value >> SHIFT
    return value | ONE


@compiled
def hash_words(text: Array, tokens: Array, by_script: bool = False) -> int:
    """Write the hash of each word of a text into `tokens` and return the number of words.

    `text` is the UTF-8 bytes of text from `normalise.fold`. Single spaces or newlines separate words. With `by_script`,
    each character of a script without spaces is a word.
    """
    number, value, inside, end = 0, FNV_OFFSET, False, -1
    for at in range(len(text)):
        byte = text[at]
        is_space = byte in (SPACE, NEWLINE)
        alone = by_script and byte >= 0xE0 and LEADS_ALONE[byte - 0xE0, text[at + 1] & 0x3F]
        if inside and (is_space or alone or at == end):
            tokens[number] = mix(value)
            number, value, inside = number + 1, FNV_OFFSET, False
        if alone:
            end = at + (3 if byte < 0xF0 else 4)
        if not is_space:
            value, inside = (value ^ np.uint64(byte)) * FNV_PRIME, True
    if inside:
        tokens[number] = mix(value)
        number += 1
    return number


@compiled
def hash_characters(text: Array, tokens: Array) -> int:
    """Write the hash of each character of a text, given as UTF-8 bytes, into `tokens` and return their number."""
    number, value = 0, np.uint64(0)
    for byte in text:
        if byte & np.uint8(0xC0) != np.uint8(0x80) and value != np.uint64(0):  # a new character begins
            tokens[number] = mix(value)
            number += 1
            value = np.uint64(0)
        value = (value << np.uint64(8)) | np.uint64(byte)
    if value != np.uint64(0):
        tokens[number] = mix(value)
        number += 1
    return number


@compiled
def hash_ngrams(tokens: Array, number: int, length: int, ngrams: Array) -> int:
    """Hash every run of `length` tokens, of the first `number` tokens, into `ngrams` and return the number of hashes.

    `tokens` are 64-bit hashes of words or characters, and `ngrams` may be the same array. The hashes are polynomials of the
    tokens (Karp and Rabin 1987, modulo 2^64), mixed.
    """
    if number < length:
        return 0
    drop, value = ONE, np.uint64(0)
    for i in range(length - 1):
        drop *= BASE
        value = value * BASE + np.uint64(tokens[i])
    for i in range(number - length + 1):
        value = value * BASE + np.uint64(tokens[i + length - 1])
        mixed = mix(value)
        value -= np.uint64(tokens[i]) * drop
        ngrams[i] = mixed
    return number - length + 1


@compiled
def hash_table(num_keys: int) -> Array:
    """Return an empty hash table for `num_keys` 64-bit keys other than 0.

    Its size is a power of two, and at most half of its slots get filled. An empty slot is 0.
    """
    size = 16
    while size < 2 * num_keys:
        size *= 2
    return np.zeros(size, np.uint64)


@compiled
def find_slot(slots: Array, key: np.uint64) -> np.uint64:
    """Return the index in the hash table `slots` at which `key` is, or should be inserted (linear probing)."""
    mask = np.uint64(len(slots) - 1)
    slot = (key ^ (key >> SHIFT)) & mask
    while slots[slot] != 0 and slots[slot] != key:
        slot = (slot + ONE) & mask
    return slot
