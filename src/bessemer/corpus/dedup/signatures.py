"""MinHash signatures and shingle sets of folded texts, and their comparison, in compiled functions.

A token is the 64-bit hash of a word or character. A shingle is a run of n tokens.

Value j of a signature is the minimum of a_j x + b_j mod 2^32 over the text's shingles x, with a_j odd: a permutation of the
32-bit numbers (Broder 1997; multiply-shift of Dietzfelbinger 1997). The probability that two texts share a value is the
Jaccard similarity of their shingles. Arithmetic modulo 2^32 vectorises to 8 or 16 lanes, unlike the usual prime 2^61 - 1.
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
UNITS = ("words", "characters", "script")  # kinds of tokens
NOTHING = np.uint32(0xFFFFFFFF)  # value that fills the signature of a text without a shingle


def num_hashes(settings: Dedup) -> int:
    """Return the number of values in a MinHash signature."""
    return settings.bands * settings.rows


def shingle_length(settings: Dedup) -> int:
    """Return the number of tokens (words or characters) in a shingle."""
    return settings.shingle_characters if settings.shingle == "characters" else settings.shingle_words


def signatures(folded: Sequence[str] | pa.Array, settings: Dedup) -> np.ndarray:
    """Return MinHash signatures of texts that `normalise.fold` has folded, as uint32 of shape (texts, num_hashes).

    A text shorter than a shingle has 2^32 - 1 everywhere and is not compared.
    """
    data, offsets = utf8(folded)
    signed = np.empty((len(offsets) - 1, num_hashes(settings)), dtype=np.uint32)
    factors, addends = _permutations(num_hashes(settings))
    buffer = np.empty(longest(offsets), dtype=np.uint64)
    sign(data, offsets, UNITS.index(settings.shingle), shingle_length(settings), factors, addends, buffer, signed)
    return signed


def shingle_sets(texts: Sequence[str], settings: Dedup) -> tuple[np.ndarray, np.ndarray]:
    """Return the shingle sets of unfolded texts as sorted uint64 hashes, concatenated, and the length of each set."""
    data, offsets = utf8([fold(text) for text in texts])
    buffer = np.empty(longest(offsets), dtype=np.uint64)
    sets = [shingle_set(data[start:end], settings, buffer) for start, end in pairwise(offsets.tolist())]
    return np.concatenate(sets), np.array([*map(len, sets)])


def shingle_set(text: np.ndarray, settings: Dedup, buffer: np.ndarray) -> np.ndarray:
    """Return the distinct shingle hashes (sorted, uint64) of one folded text in UTF-8.

    `buffer` is scratch space, a uint64 array with at least one item per byte of the text.
    """
    number = shingles_of(text, UNITS.index(settings.shingle), shingle_length(settings), buffer)
    return np.unique(buffer[:number])


def utf8(texts: Sequence[str] | pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return texts as one array of UTF-8 bytes, and the int64 offset of each text, followed by the offset of the end."""
    array: Any = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.large_string())
    array = pc.fill_null(array.cast(pa.large_string()), "")
    if not len(array):
        return np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    _, places, values = array.buffers()
    offsets = np.frombuffer(places, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return np.frombuffer(values or b"", dtype=np.uint8), offsets


def longest(offsets: np.ndarray) -> int:
    """Return the number of tokens for which a buffer needs room. A text has at most one token per byte."""
    return int(np.diff(offsets).max(initial=0)) + 1


@cache
def _permutations(number: int) -> tuple[np.ndarray, np.ndarray]:
    values = splitmix(SEED, number)
    return (values >> np.uint64(32)).astype(np.uint32) | np.uint32(1), values.astype(np.uint32)


# --- Compiled passes


@compiled
def shingles_of(text: Array, unit: int, length: int, buffer: Array) -> int:
    """Write the shingle hashes of a folded text in UTF-8 into `buffer` and return their number.

    `unit` is the kind of token as an index into UNITS, and `length` the number of tokens in a shingle. A buffer with
    one item per byte of the text is large enough.
    """
    number = hash_characters(text, buffer) if unit == 1 else hash_words(text, buffer, unit == 2)
    return hash_ngrams(buffer, number, length, buffer)


@compiled
def sign(
    data: Array, offsets: Array, unit: int, length: int, factors: Array, addends: Array, buffer: Array,
    signatures: Array,
) -> None:  # fmt: skip
    """Write the MinHash signature of each text `data[offsets[i]:offsets[i + 1]]` into row i of `signatures`.

    Value j is the minimum of factors[j] x + addends[j] mod 2^32 over the upper 32 bits x of the shingle hashes (Broder
    1997). `unit` and `length` are those of `shingles_of`, and `buffer` is scratch space for the hashes of the longest
    text.
    """
    num_hashes = len(factors)
    for document in range(len(offsets) - 1):
        text = data[offsets[document] : offsets[document + 1]]
        number = shingles_of(text, unit, length, buffer)
        smallest = signatures[document]
        smallest[:] = NOTHING
        # The inner loop is vectorised over the hashes. Four shingles per iteration need a quarter of its loads and stores.
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
    """Write a 64-bit hash of each band of each signature and of the document's salt into `keys[band, document]`.

    A band is `rows` consecutive values of a signature.
    """
    num_bands = keys.shape[0]
    for document in range(len(signatures)):
        for band in range(num_bands):
            value = mix(np.uint64(band) + salts[document])
            for k in range(band * rows, (band + 1) * rows):
                value = mix(value ^ np.uint64(signatures[document, k]))
            keys[band, document] = value


@compiled
def jaccard(left: Array, right: Array) -> float:
    """Return the Jaccard similarity of two sorted sets."""
    i = j = shared = 0
    while i < len(left) and j < len(right):
        one, other = left[i], right[j]
        shared += one == other
        i += one <= other
        j += other <= one
    return shared / max(len(left) + len(right) - shared, 1)


@compiled
def equal_share(left: Array, right: Array) -> float:
    """Return the share of positions at which two signatures have equal values."""
    count = np.int32(0)
    for k in range(len(left)):
        count += np.int32(left[k] == right[k])
    return count / len(left)


@compiled
def similarities(
    are_sets: bool, left: Array, starts: Array, chosen: Array, right: Array, right_starts: Array, right_chosen: Array,
    out: Array,
) -> None:  # fmt: skip
    """Write the similarity of each pair of documents into `out`: Jaccard if `are_sets`, else the share of equal values.

    Pair i compares item chosen[i] of `left` with item right_chosen[i] of `right`. Item k of `left`, a set or a
    signature, is left[starts[k]:starts[k + 1]]; the items of `right` are found in the same way by `right_starts`.
    """
    for i in range(len(out)):
        one = left[starts[chosen[i]] : starts[chosen[i] + 1]]
        other = right[right_starts[right_chosen[i]] : right_starts[right_chosen[i] + 1]]
        out[i] = jaccard(one, other) if are_sets else equal_share(one, other)


@compiled
def first_neighbours(left: Array, right: Array, can_go: Array, edge_of: Array) -> None:
    """Set `edge_of` of each document to reject to the index of its first edge from a document that is kept.

    Documents are numbered in the order of preference. A document is kept unless an edge joins it to an earlier one that is
    kept. `can_go` marks the documents that may be rejected. Edge i joins the documents left[i] < right[i], and edges are
    sorted by (right, left). `edge_of` must be filled with -1, which remains for kept documents.
    """
    for i in range(len(left)):
        one, other = left[i], right[i]
        if can_go[other] and edge_of[other] < 0 and edge_of[one] < 0:
            edge_of[other] = i
