"""MinHash signatures and shingle sets of folded texts.

Value j of a signature is the minimum of a_j x + b_j mod 2^32 over the text's shingles x with a_j odd, a permutation of
the 32-bit numbers (Broder 1997; multiply-shift of Dietzfelbinger 1997). Two texts share a value with the probability of
their shingles' Jaccard similarity. Arithmetic modulo 2^32 vectorises to 8 or 16 lanes; the usual prime 2^61 - 1 does
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bessemer.recipe import Dedup

SEED = 0x5EED


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
    from bessemer.corpus.dedup.kernels import UNITS, sign

    data, offsets = utf8(folded)
    signed = np.empty((len(offsets) - 1, num_hashes(settings)), dtype=np.uint32)
    factors, addends = _permutations(num_hashes(settings))
    buffer = np.empty(longest(offsets), dtype=np.uint64)
    sign(data, offsets, UNITS.index(settings.shingle), shingle_length(settings), factors, addends, buffer, signed)
    return signed


def shingle_set(text: np.ndarray, settings: Dedup, buffer: np.ndarray) -> np.ndarray:
    """The distinct hashes (sorted, uint64) of the shingles of one folded text in UTF-8."""
    from bessemer.corpus.dedup.kernels import UNITS, shingles_of

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
    from bessemer.text.hashing import splitmix

    values = splitmix(SEED, number)
    return (values >> np.uint64(32)).astype(np.uint32) | np.uint32(1), values.astype(np.uint32)
