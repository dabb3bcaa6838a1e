"""MinHash signatures and shingle sets of folded texts, and the comparison of pairs, in compiled passes.

A token is the 64-bit hash of a word or character; a shingle is n tokens.

Value j of a signature is the minimum of a_j x + b_j mod 2^32 over the text's shingles x with a_j odd, a permutation of
the 32-bit numbers (Broder 1997; multiply-shift of Dietzfelbinger 1997). Two texts share a value with the probability of
their shingles' Jaccard similarity. Arithmetic modulo 2^32 vectorises to 8 or 16 lanes; the usual prime 2^61 - 1 does
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bessemer.recipe import Dedup
from bessemer.text.hashing import Array, compiled, hash_characters, hash_ngrams, hash_words, mix, splitmix
from bessemer.text.normalise import fold

SEED = 0x5EED
UNITS = ("words", "characters", "script")  # what a shingle is a run of
NOTHING = np.uint32(0xFFFFFFFF)  # each value of the signature of a text without a shingle


def num_hashes(settings: Dedup) -> int:
    """Values in a signature."""
    return settings.bands * settings.rows


def shingle_length(settings: Dedup) -> int:
    """Words or characters in a shingle."""
    return settings.shingle_characters if settings.shingle == "characters" else settings.shingle_words


def signatures(folded: Sequence[str] | pa.Array, settings: Dedup) -> np.ndarray:
    """Signatures of texts folded by `extract.fold`: uint32 (texts, num_hashes).

    A text shorter than a shingle has 2^32 - 1 everywhere and is compared with nothing.
    """
    data, offsets = utf8(folded)
    signed = np.empty((len(offsets) - 1, num_hashes(settings)), dtype=np.uint32)
    factors, addends = _permutations(num_hashes(settings))
    buffer = np.empty(longest(offsets), dtype=np.uint64)
    sign(data, offsets, UNITS.index(settings.shingle), shingle_length(settings), factors, addends, buffer, signed)
    return signed


def shingle_sets(texts: Sequence[str], settings: Dedup) -> tuple[np.ndarray, np.ndarray]:
    """Return the shingle sets of texts one behind the other, and their lengths."""
    data, offsets = utf8([fold(text) for text in texts])
    buffer = np.empty(longest(offsets), dtype=np.uint64)
    sets = [shingle_set(data[start:end], settings, buffer) for start, end in pairwise(offsets.tolist())]
    return np.concatenate(sets), np.array([*map(len, sets)])


def shingle_set(text: np.ndarray, settings: Dedup, buffer: np.ndarray) -> np.ndarray:
    """The distinct hashes (sorted, uint64) of the shingles of one folded text in UTF-8."""
    number = shingles_of(text, UNITS.index(settings.shingle), shingle_length(settings), buffer)
    return np.unique(buffer[:number])


def utf8(texts: Sequence[str] | pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Texts as one array of bytes and the places where each begins (int64, one more than texts)."""
    array: Any = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.large_string())
    array = pc.fill_null(array.cast(pa.large_string()), "")
    if not len(array):
        return np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    _, places, values = array.buffers()
    offsets = np.frombuffer(places, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return np.frombuffer(values or b"", dtype=np.uint8), offsets


def longest(offsets: np.ndarray) -> int:
    """Bytes of the longest text: as many tokens are the most it can have."""
    return int(np.diff(offsets).max(initial=0)) + 1


@cache
def _permutations(number: int) -> tuple[np.ndarray, np.ndarray]:
    values = splitmix(SEED, number)
    return (values >> np.uint64(32)).astype(np.uint32) | np.uint32(1), values.astype(np.uint32)


# --- Compiled passes


@compiled
def shingles_of(text: Array, unit: int, length: int, buffer: Array) -> int:
    """Write the hashes of a folded text's shingles into `buffer` (one place per byte is enough); returns their number. unit:
    its place in UNITS."""
    number = hash_characters(text, buffer) if unit == 1 else hash_words(text, buffer, unit == 2)
    return hash_ngrams(buffer, number, length, buffer)


@compiled
def sign(
    data: Array, offsets: Array, unit: int, length: int, factors: Array, addends: Array, buffer: Array,
    signatures: Array,
) -> None:  # fmt: skip
    """The MinHash signature of each text data[offsets[i]:offsets[i + 1]], into the rows of `signatures`."""
    num_hashes = len(factors)
    for document in range(len(offsets) - 1):
        text = data[offsets[document] : offsets[document + 1]]
        number = shingles_of(text, unit, length, buffer)
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


@compiled
def band_keys(signatures: Array, rows: int, salts: Array, keys: Array) -> None:
    """A key of 64 bits for each band of each signature, into keys[band, document]; `salts` go in with the band."""
    num_bands = keys.shape[0]
    for document in range(len(signatures)):
        for band in range(num_bands):
            value = mix(np.uint64(band) + salts[document])
            for k in range(band * rows, (band + 1) * rows):
                value = mix(value ^ np.uint64(signatures[document, k]))
            keys[band, document] = value


@compiled
def jaccard(left: Array, right: Array) -> float:
    """Jaccard similarity of two sorted sets."""
    i = j = shared = 0
    while i < len(left) and j < len(right):
        one, other = left[i], right[j]
        shared += one == other
        i += one <= other
        j += other <= one
    return shared / max(len(left) + len(right) - shared, 1)


@compiled
def equal_share(left: Array, right: Array) -> float:
    """Share of equal values of two signatures."""
    count = np.int32(0)
    for k in range(len(left)):
        count += np.int32(left[k] == right[k])
    return count / len(left)


@compiled
def similarities(
    are_sets: bool, left: Array, starts: Array, chosen: Array, right: Array, right_starts: Array, right_chosen: Array,
    out: Array,
) -> None:  # fmt: skip
    """Similarity of pairs of sets, or of signatures; number i is left[starts[i] : starts[i + 1]]."""
    for i in range(len(out)):
        one = left[starts[chosen[i]] : starts[chosen[i] + 1]]
        other = right[right_starts[right_chosen[i]] : right_starts[right_chosen[i] + 1]]
        out[i] = jaccard(one, other) if are_sets else equal_share(one, other)


@compiled
def first_neighbours(left: Array, right: Array, can_go: Array, edge_of: Array) -> None:
    """Decide in order: a document stays unless it is similar to one that stays already; the edge to the first of these goes into
    `edge_of`, at first -1. Edges join left[i] < right[i], places in the order, and are sorted by (right, left)."""
    for i in range(len(left)):
        one, other = left[i], right[i]
        if can_go[other] and edge_of[other] < 0 and edge_of[one] < 0:
            edge_of[other] = i
