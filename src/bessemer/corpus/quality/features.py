"""Documents as numbers: sixteen statistics, and the distinct words and pairs of words as a hashed bag."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

STATISTICS = {
    "log_bytes": "logarithm of the length of the whole document in bytes",
    "mean_word_length": "characters in a word, on the average",
    "letter_share": "letters among the characters other than white space",
    "digit_share": "digits among them",
    "punctuation_share": "punctuation marks among them",
    "symbol_share": "other signs among them, such as # { | _",
    "uppercase_share": "capitals among the letters",
    "space_share": "white space among all characters",
    "stop_word_share": "Gopher's eight stop words among the words",
    "unique_word_share": "distinct words among the first 256",
    "log_line_length": "logarithm of the mean length of a line in characters",
    "closed_line_share": "lines that end with an end mark or a closing quotation mark",
    "short_line_share": "lines of at most 30 characters",
    "bullet_line_share": "lines that begin with a bullet",
    "repeated_line_share": "lines that stood in the document before",
    "log_sentence_length": "logarithm of the words to a sentence's end mark",
}
"""What `kernels.scan` and `kernels.grams` measure, in their order, over the bytes that are read."""

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
"""Rae et al. 2021 (Gopher), appendix A. English; for other languages the share is near 0 and the bag decides."""


@dataclass(frozen=True)
class Texts:
    """Texts in one buffer of UTF-8: text n is data[starts[n]:ends[n]]."""

    data: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, texts: Sequence[bytes]) -> Texts:
        """Texts held as bytes."""
        ends = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(texts) or b" ", dtype=np.uint8), ends[:-1], ends[1:])

    @classmethod
    def of_column(cls, column: Any) -> Texts:
        """A string column of a pyarrow table, without a copy where it is one chunk of large strings."""
        import pyarrow as pa

        array = column.cast(pa.large_string()).combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], pa.large_string())
        _, offsets, data = array.buffers()
        if offsets is None or data is None or not len(array):
            return cls(np.zeros(1, dtype=np.uint8), *(np.zeros(len(array), dtype=np.int64) for _ in range(2)))
        bounds = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
        return cls(np.frombuffer(data, dtype=np.uint8), bounds[:-1], bounds[1:])

    def __len__(self) -> int:
        return len(self.starts)

    def text(self, number: int, limit: int) -> bytes:
        """At most `limit` bytes from the beginning of a text, cut between two characters."""
        from bessemer.corpus.quality import kernels

        start, end = int(self.starts[number]), int(self.ends[number])
        return self.data[start : kernels.cut(self.data, start, end, limit)].tobytes()


@dataclass(frozen=True)
class Features:
    """statistics (texts, 16); the buckets of text n are buckets[bounds[n]:bounds[n + 1]], each once."""

    statistics: npt.NDArray[np.float64]
    buckets: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.int64]

    def rows(self, chosen: npt.NDArray[np.int64]) -> Features:
        """Some of the texts."""
        pieces = [self.buckets[self.bounds[row] : self.bounds[row + 1]] for row in chosen.tolist()]
        bounds = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        return Features(self.statistics[chosen], np.concatenate([*pieces, self.buckets[:0]]), bounds)


def extract(texts: Texts, read_bytes: int, hash_bits: int) -> Features:
    """The features of texts, of each the first `read_bytes` bytes; buckets are below 2^hash_bits."""
    from bessemer.corpus.quality import kernels

    read = np.minimum(texts.ends - texts.starts, read_bytes)
    statistics = np.empty((len(texts), len(STATISTICS)), dtype=np.float64)
    found = np.empty(int(read.sum()) + 2 * len(texts) + 2, dtype=np.int32)
    bounds = np.zeros(len(texts) + 1, dtype=np.int64)
    kernels.collect(
        texts.data, texts.starts, texts.ends, read_bytes, hash_bits, stop_words(), statistics, found, bounds
    )
    return Features(statistics, found[: bounds[-1]].copy(), bounds)


def joined(parts: Iterable[Features]) -> Features:
    """Features of several batches, in order."""
    every = list(parts)
    lengths = np.concatenate([np.diff(part.bounds) for part in every])
    return Features(
        np.concatenate([part.statistics for part in every]),
        np.concatenate([part.buckets for part in every]),
        np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]),
    )


@cache
def stop_words() -> npt.NDArray[np.uint64]:
    """The hashes of STOP_WORDS."""
    from bessemer.corpus.quality import kernels

    hashes = [kernels.fnv(np.frombuffer(word.encode(), dtype=np.uint8), 0, len(word.encode())) for word in STOP_WORDS]
    return np.array(hashes, dtype=np.uint64)
