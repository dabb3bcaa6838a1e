"""The place in the order of all scores where a share or a band ends, by counts of tasks: exact, in bounded memory, in any order.

A document's key is its score and, for equal scores, its identity: 20 bytes, ordered as the documents are. The key of a rank is
found as by a radix sort: the first two bytes of all keys are counted, then the next two of those that share what is known, until
one document is left. That takes ten rounds at the most, and two where scores differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

KEY_BYTES, DIGIT_BYTES = 20, 2
DIGITS = 1 << 8 * DIGIT_BYTES
Keys = npt.NDArray[np.uint8]


class RankQuery(NamedTuple):
    """A rank that is looked for, counted from 0, among the documents of some sources whose key begins with `known`."""

    sources: tuple[str, ...]
    best_first: bool  # scores descend; identities ascend in either case
    rank: int
    known: bytes = b""


def keys_of(scores: npt.NDArray[np.float32], identities: npt.NDArray[np.bytes_], best_first: bool) -> Keys:
    """The key of each document (KEY_BYTES); scores are not negative."""
    bits = (scores + np.float32(0)).view(np.uint32)  # in this form ordered as the numbers are; + 0 for -0
    keys = np.empty((len(scores), KEY_BYTES), dtype=np.uint8)
    keys[:, :4] = (~bits if best_first else bits).astype(">u4").view(np.uint8).reshape(-1, 4)
    keys[:, 4:] = np.ascontiguousarray(identities).view(np.uint8).reshape(-1, 16)
    return keys


def digit_counts(keys: Keys, known: bytes) -> npt.NDArray[np.int64]:
    """How often each value of the next digit occurs in the keys that begin with `known`."""
    place = len(known)
    same = keys[(keys[:, :place] == np.frombuffer(known, dtype=np.uint8)).all(axis=1)]
    digits = same[:, place].astype(np.int64) << 8 | same[:, place + 1]
    return np.bincount(digits, minlength=DIGITS)


def up_to(keys: Keys, cut: bytes) -> npt.NDArray[np.bool_]:
    """Which keys come before the cut, or are the document that it stands for."""
    found: npt.NDArray[np.bool_] = _strings(keys) <= np.bytes_(cut.ljust(KEY_BYTES, b"\xff"))
    return found


def from_on(keys: Keys, cut: bytes) -> npt.NDArray[np.bool_]:
    """Which keys come after the cut, or are the document that it stands for."""
    found: npt.NDArray[np.bool_] = _strings(keys) >= np.bytes_(cut)
    return found


def _strings(keys: Keys) -> npt.NDArray[np.bytes_]:
    return np.ascontiguousarray(keys).view(f"S{KEY_BYTES}").reshape(-1)


def find_cuts(
    queries: Sequence[RankQuery], count: Callable[[Sequence[RankQuery]], Sequence[npt.NDArray[np.int64]]]
) -> list[bytes]:
    """The beginning of the key of each rank that no other document shares. count: the `digit_counts` of all documents for each
    query."""
    cuts = [b""] * len(queries)
    left = dict(enumerate(queries))
    while left:
        counted = count(list(left.values()))
        for (number, query), counts in zip(list(left.items()), counted, strict=True):
            ends = np.cumsum(counts)
            digit = int(np.searchsorted(ends, query.rank, side="right"))
            known = query.known + digit.to_bytes(DIGIT_BYTES, "big")
            if counts[digit] == 1 or len(known) == KEY_BYTES:
                cuts[number] = known
                del left[number]
            else:
                left[number] = query._replace(known=known, rank=query.rank - int(ends[digit] - counts[digit]))
    return cuts
