"""An interpolated byte n-gram model: the honest yardstick for a small language model.

Orders 1 to n are interpolated by Witten and Bell's rule (1991; Chen and Goodman 1999, section 2.4): a context that was
followed by many different bytes trusts its shorter context more,

    p(b | c) = (count(c b) + distinct(c) p(b | shorter c)) / (count(c) + distinct(c)),

down to the uniform distribution over 256 bytes. Documents are scored on their own: before their first byte there is
nothing. An n-gram is a number of up to 5 bytes; counts are sorted arrays, so that millions of contexts fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint64]
MAX_ORDER = 5
START = np.uint64(256)  # what stands before a document: a symbol that no byte is


@dataclass(frozen=True)
class _Order:
    """Counts of one order: n-grams with how often they occur, contexts with their totals and distinct successors."""

    grams: Numbers
    counts: npt.NDArray[np.int64]
    contexts: Numbers
    totals: npt.NDArray[np.int64]
    distinct: npt.NDArray[np.int64]


class NgramModel:
    """A byte n-gram model of order `order`: `order - 1` bytes of context."""

    def __init__(self, documents: list[bytes], order: int = MAX_ORDER) -> None:
        self._orders = [_counted(_windows(documents, length)) for length in range(1, order + 1)]

    def nats(self, documents: list[bytes]) -> float:
        """Negative log likelihood of the documents, in nats, summed over all their bytes."""
        probability = np.full(sum(map(len, documents)), 1.0 / 256.0)
        for length, order in enumerate(self._orders, start=1):
            grams = _windows(documents, length)
            count = _looked_up(order.grams, order.counts, grams)
            total = _looked_up(order.contexts, order.totals, grams >> np.uint64(9))
            distinct = _looked_up(order.contexts, order.distinct, grams >> np.uint64(9))
            seen = total > 0  # a context never seen hands the question to the shorter one unchanged
            mixed = (count + distinct * probability) / np.maximum(total + distinct, 1)
            probability = np.where(seen, mixed, probability)
        return float(-np.log(probability).sum())


def _windows(documents: list[bytes], length: int) -> Numbers:
    """Return the number of the `length`-gram that ends at each byte of each document; 9 bits a symbol."""
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
    """The value of each wanted key, 0 where it does not occur."""
    if not len(keys):
        return np.zeros(len(wanted), dtype=np.int64)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
