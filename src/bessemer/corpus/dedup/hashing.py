"""Compiled loops: text to tokens, tokens to shingles, shingles to MinHash signatures.

A token is a word or a character, as a hash of 64 bits. A shingle is a run of n tokens; its hash is a polynomial
in the tokens' hashes modulo 2^64 with an odd base (Karp and Rabin 1987), which rolls, and is mixed at the end.
Imported inside functions only: numba takes half a second to load.
"""

from __future__ import annotations

import numpy as np
from numba import njit

FNV_OFFSET = np.uint64(0xCBF29CE484222325)
FNV_PRIME = np.uint64(0x100000001B3)
"""FNV-1a with 64 bits (RFC 9923), for the bytes of a word."""

BASE = np.uint64(0x9E3779B97F4A7C15)
"""Base of the polynomial: odd, so that no token's bits are shifted out."""

SPACE, NEWLINE = np.uint8(32), np.uint8(10)
NOTHING = np.uint32(0xFFFFFFFF)
"""Each value of the signature of a text without a shingle."""


@njit(nogil=True, cache=True, inline="always")
def mix(value):  # type: ignore[no-untyped-def]
    """A bijection of 64 bits in which each bit of the input moves all of the output (MurmurHash3, fmix64)."""
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xFF51AFD7ED558CCD)
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@njit(nogil=True, cache=True)
def hash_words(text, tokens):  # type: ignore[no-untyped-def]
    """Hash the words of folded UTF-8 (parted by single spaces or newlines) into `tokens`; gives how many."""
    number = 0
    value = FNV_OFFSET
    inside = False
    for byte in text:
        if byte in (SPACE, NEWLINE):
            if inside:
                tokens[number] = mix(value)
                number += 1
            value = FNV_OFFSET
            inside = False
        else:
            value = (value ^ np.uint64(byte)) * FNV_PRIME
            inside = True
    if inside:
        tokens[number] = mix(value)
        number += 1
    return number


@njit(nogil=True, cache=True)
def hash_characters(text, tokens):  # type: ignore[no-untyped-def]
    """Hash the code points of UTF-8 into `tokens`; gives how many."""
    number = 0
    value = np.uint64(0)
    for byte in text:
        if byte & np.uint8(0xC0) != np.uint8(0x80) and value != np.uint64(0):  # not a continuation: the last one ended
            tokens[number] = mix(value)
            number += 1
            value = np.uint64(0)
        value = (value << np.uint64(8)) | np.uint64(byte)
    if value != np.uint64(0):
        tokens[number] = mix(value)
        number += 1
    return number


@njit(nogil=True, cache=True)
def hash_shingles(tokens, number, length, shingles):  # type: ignore[no-untyped-def]
    """Hash every run of `length` of the first `number` tokens; gives how many. `shingles` may be `tokens`."""
    if number < length:
        return 0
    out = np.uint64(1)
    for _ in range(length - 1):
        out *= BASE
    value = np.uint64(0)
    for i in range(length - 1):
        value = value * BASE + tokens[i]
    for i in range(number - length + 1):
        value = value * BASE + tokens[i + length - 1]
        mixed = mix(value)
        value -= tokens[i] * out
        shingles[i] = mixed
    return number - length + 1


@njit(nogil=True, cache=True)
def shingles_of(text, by_words, length, buffer):  # type: ignore[no-untyped-def]
    """The hashes of a folded text's shingles, into `buffer` (a place a byte is enough); gives how many."""
    number = hash_words(text, buffer) if by_words else hash_characters(text, buffer)
    return hash_shingles(buffer, number, length, buffer)


@njit(nogil=True, cache=True)
def sign(data, offsets, by_words, length, factors, addends, buffer, signatures):  # type: ignore[no-untyped-def]
    """The MinHash signature of each text data[offsets[i]:offsets[i + 1]], into the rows of `signatures`."""
    num_hashes = len(factors)
    for document in range(len(offsets) - 1):
        text = data[offsets[document] : offsets[document + 1]]
        number = shingles_of(text, by_words, length, buffer)
        smallest = signatures[document]
        smallest[:] = NOTHING
        # Four shingles a round: the loop over the hashes is vectorised, and loads and stores once for four.
        whole = number - number % 4
        for i in range(0, whole, 4):
            one = np.uint32(buffer[i] >> np.uint64(32))
            two = np.uint32(buffer[i + 1] >> np.uint64(32))
            three = np.uint32(buffer[i + 2] >> np.uint64(32))
            four = np.uint32(buffer[i + 3] >> np.uint64(32))
            for k in range(num_hashes):
                a, b = factors[k], addends[k]
                left = min(np.uint32(np.uint32(a * one) + b), np.uint32(np.uint32(a * two) + b))
                right = min(np.uint32(np.uint32(a * three) + b), np.uint32(np.uint32(a * four) + b))
                smallest[k] = min(smallest[k], min(left, right))
        for i in range(whole, number):
            one = np.uint32(buffer[i] >> np.uint64(32))
            for k in range(num_hashes):
                smallest[k] = min(smallest[k], np.uint32(np.uint32(factors[k] * one) + addends[k]))


@njit(nogil=True, cache=True)
def band_keys(signatures, rows, salts, keys):  # type: ignore[no-untyped-def]
    """A key of 64 bits for each band of each signature, into keys[band, document]; `salts` go in with the band."""
    num_bands = keys.shape[0]
    for document in range(len(signatures)):
        for band in range(num_bands):
            value = mix(np.uint64(band) + salts[document])
            for k in range(band * rows, (band + 1) * rows):
                value = mix(value ^ np.uint64(signatures[document, k]))
            keys[band, document] = value


@njit(nogil=True, cache=True)
def splitmix(seed, values):  # type: ignore[no-untyped-def]
    """Fill `values` with pseudo-random 64-bit numbers that no version of a library can change (Steele 2014)."""
    state = np.uint64(seed)
    for i in range(len(values)):
        state += BASE
        values[i] = mix(state)
