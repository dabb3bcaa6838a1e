"""MinHash signatures of folded texts, and the sets of shingles they stand for.

The j-th value of a signature is the smallest of a_j x + b_j mod 2^32 over the text's shingles x, with a_j odd, so
that each is a permutation of the 32-bit numbers (Broder 1997; multiply-shift family of Dietzfelbinger 1997). Two
texts share a value with a probability of their shingles' Jaccard similarity: measured on sets of 60 to 4,000
random shingles, mean and variance are those of the binomial law (tests/corpus/dedup/test_signatures.py).
Arithmetic modulo 2^32 runs in 8 or 16 lanes at once, where the usual prime 2^61 - 1 takes four instructions for two
or four lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.recipe import Dedup

if TYPE_CHECKING:
    import pyarrow as pa

SEED = 0x5EED


def num_hashes(settings: Dedup) -> int:
    """Values in a signature."""
    return settings.bands * settings.rows


def shingle_length(settings: Dedup) -> int:
    """Words or characters in a shingle."""
    return settings.shingle_words if settings.shingle == "words" else settings.shingle_characters


def signatures(folded: Sequence[str] | pa.Array, settings: Dedup) -> np.ndarray:
    """Signatures of texts as `extract.fold` gives them: uint32, one row a text, `num_hashes` values.

    The result depends on the text and the recipe only. A text without a whole shingle has 2^32 - 1 everywhere and
    is compared with nothing.
    """
    from bessemer.corpus.dedup.kernels import sign

    data, offsets = utf8(folded)
    signed = np.empty((len(offsets) - 1, num_hashes(settings)), dtype=np.uint32)
    factors, addends = _permutations(num_hashes(settings))
    buffer = np.empty(longest(offsets), dtype=np.uint64)
    by_words = settings.shingle == "words"
    sign(data, offsets, by_words, shingle_length(settings), factors, addends, buffer, signed)
    return signed


def shingle_set(text: np.ndarray, settings: Dedup, buffer: np.ndarray) -> np.ndarray:
    """The distinct hashes (sorted, uint64) of the shingles of one folded text in UTF-8."""
    from bessemer.corpus.dedup.kernels import shingles_of

    number = shingles_of(text, settings.shingle == "words", shingle_length(settings), buffer)
    return np.unique(buffer[:number])


def compared(signed: np.ndarray) -> np.ndarray:
    """Which rows of signatures belong to texts with a whole shingle."""
    found: np.ndarray = (signed != np.uint32(0xFFFFFFFF)).any(axis=1)
    return found


def utf8(texts: Sequence[str] | pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Texts as one array of bytes and the places where each begins (int64, one more than texts)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array: Any = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.large_string())
    if array.type != pa.large_string():
        array = array.cast(pa.large_string())
    if array.null_count:
        array = pc.fill_null(array, "")
    _, places, values = array.buffers()
    offsets = np.frombuffer(places, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    if not len(offsets):
        offsets = np.zeros(1, dtype=np.int64)
    data = np.frombuffer(values, dtype=np.uint8) if values is not None and len(values) else np.zeros(0, dtype=np.uint8)
    return data, offsets


def longest(offsets: np.ndarray) -> int:
    """Bytes of the longest text: as many tokens are the most it can have."""
    return int(np.diff(offsets).max(initial=0)) + 1


@cache
def _permutations(number: int) -> tuple[np.ndarray, np.ndarray]:
    from bessemer.corpus.text.hashing import splitmix

    values = np.empty(number, dtype=np.uint64)
    splitmix(SEED, values)
    return (values >> np.uint64(32)).astype(np.uint32) | np.uint32(1), values.astype(np.uint32)
