"""An interpolated byte n-gram model, the baseline for small language models.

Orders 1 to n are interpolated by Witten and Bell's rule (1991; Chen and Goodman 1999, section 2.4). A context that was
followed by many different bytes relies more on its shorter context,

    p(b | c) = (count(c b) + distinct(c) p(b | shorter c)) / (count(c) + distinct(c)),

down to the uniform distribution over 256 bytes. Documents are scored separately, without context before their first byte. An
n-gram is a number of up to 5 bytes, and counts are sorted arrays, so that millions of contexts fit in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint64]
MAX_ORDER = 5
START = np.uint64(256)  # symbol before the beginning of a document, which no byte has


@dataclass(frozen=True)
class _Order:
    """The counts of one n-gram order, in sorted arrays: `counts` is parallel to `grams`, the last two to `contexts`.

    Attributes:
        grams: Code of each n-gram that occurs.
        counts: Number of occurrences of each n-gram.
        contexts: Code of each context, the n-gram without its last byte.
        totals: Number of occurrences of each context.
        distinct: Number of distinct bytes that follow each context.
    """

    grams: Numbers
    counts: npt.NDArray[np.int64]
    contexts: Numbers
    totals: npt.NDArray[np.int64]
    distinct: npt.NDArray[np.int64]


class NgramModel:
    """A byte n-gram model with `order - 1` bytes of context."""

    def __init__(self, documents: list[bytes], order: int = MAX_ORDER) -> None:
        self._orders = [_counted(_windows(documents, length)) for length in range(1, order + 1)]

    def nats(self, documents: list[bytes]) -> float:
        """Return the negative log-likelihood of the documents in nats, summed over all bytes."""
        probability = np.full(sum(map(len, documents)), 1.0 / 256.0)
        for length, order in enumerate(self._orders, start=1):
            grams = _windows(documents, length)
            count = _looked_up(order.grams, order.counts, grams)
            total = _looked_up(order.contexts, order.totals, grams >> np.uint64(9))
            distinct = _looked_up(order.contexts, order.distinct, grams >> np.uint64(9))
            seen = total > 0  # an unseen context has the probabilities of its shorter context
            mixed = (count + distinct * probability) / np.maximum(total + distinct, 1)
            probability = np.where(seen, mixed, probability)
        return float(-np.log(probability).sum())


def _windows(documents: list[bytes], length: int) -> Numbers:
    """Return an integer code of the n-gram of `length` bytes that ends at each byte of each document.

    Each symbol takes 9 bits of the code. A start symbol pads the beginning of a document.
    """
    pad = np.full(length - 1, START, dtype=np.uint64)
    parts: list[Numbers] = []
    for document in documents:
        symbols = np.concatenate([pad, np.frombuffer(document, dtype=np.uint8).astype(np.uint64)])
        gram = np.zeros(len(document), dtype=np.uint64)
        for offset in range(length):
            gram = (gram << np.uint64(9)) | symbols[offset : offset + len(document)]
        parts.append(gram)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint64)


def _counted(windows: Numbers) -> _Order:
    grams, counts = np.unique(windows, return_counts=True)
    contexts, first, distinct = np.unique(grams >> np.uint64(9), return_index=True, return_counts=True)
    return _Order(grams, counts, contexts, np.add.reduceat(counts, first) if len(first) else counts, distinct)


def _looked_up(keys: Numbers, values: npt.NDArray[np.int64], wanted: Numbers) -> npt.NDArray[np.int64]:
    """Return the value of each key in `wanted`, 0 for a missing one; `keys` are sorted and parallel to `values`."""
    if not len(keys):
        return np.zeros(len(wanted), dtype=np.int64)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
