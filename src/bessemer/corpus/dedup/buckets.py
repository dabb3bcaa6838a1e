"""Similar documents that share an LSH bucket: what each is similar to and stays, or their connected components.

Bands are processed one after the other, each in as many parts (by the first bits of the keys) as fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, sqrt
from typing import NamedTuple

import numpy as np

from bessemer.corpus.dedup.signatures import ShingleSets, Signatures
from bessemer.corpus.engine import check_stop

# members of a bucket before it that a member is compared with, besides the first: buckets of 17 are compared in full,
# larger ones cost 17 comparisons a member and not one for each pair
REACH = 16
SORTED_BYTES = 48  # that one key takes while it is sorted: key, place, order, and copies of them
CHUNK = 1 << 18  # keys read at one time

# with verification, pairs whose estimate lies so many standard deviations below the threshold are not computed: a pair
# at the threshold is lost with 3 in 100,000 (normal law)
ESTIMATE_DEVIATIONS = 4.0


class Members(NamedTuple):
    """Members of buckets: their rows and keys, signatures, shingle sets one behind the other and where each begins (none without
    verification)."""

    rows: np.ndarray
    keys: np.ndarray
    signatures: np.ndarray
    shingles: np.ndarray
    starts: np.ndarray


def components(
    signatures: Signatures, sets: ShingleSets | None, min_jaccard: float, min_equal: int, row_of_arrival: np.ndarray,
    compared: np.ndarray, memory: int,
) -> np.ndarray:  # fmt: skip
    """The smallest row of each row's component (int32).

    Two documents are linked when their signatures agree in `min_equal` places and, where there are shingle sets, those
    have the Jaccard `min_jaccard`. `row_of_arrival` maps document order to rows, `compared` (by row) is true for documents
    to compare, `memory` is in bytes.
    """
    from bessemer.corpus.dedup.kernels import link, roots

    parents = np.arange(len(row_of_arrival), dtype=np.int32)
    least = min_jaccard if sets else 0.0

    def is_open(rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Not all in one component already."""
        root = roots(parents)[rows]
        differ: np.ndarray = np.minimum.reduceat(root, starts) != np.maximum.reduceat(root, starts)
        return differ

    for one in _in_buckets(signatures, sets, row_of_arrival, compared, None, is_open, memory):
        link(one.rows, one.keys, one.signatures, one.shingles, one.starts, min_equal, least, REACH, parents)
    return roots(parents)


def keepers(
    signatures: Signatures, sets: ShingleSets | None, min_jaccard: float, min_equal: int, row_of_arrival: np.ndarray,
    compared: np.ndarray, order: np.ndarray, num_documents: int, memory: int,
) -> np.ndarray:  # fmt: skip
    """For each row the first in `order` that stays and is similar to it, or its own (int32): a document goes only when it is
    similar to one that stays.

    As if the documents were taken in `order`, and each stayed unless it is similar to one that stays already. Found in rounds:
    who is similar to none before it that stays or is undecided, stays; who is similar to one that stays, goes. Rows from
    `num_documents` on stay always. Else as `components`.
    """
    from bessemer.corpus.dedup.kernels import GOES, STAYS, UNDECIDED, seek

    every = np.arange(len(row_of_arrival), dtype=np.int32)
    found, least = every.copy(), min_jaccard if sets else 0.0
    state = np.where(compared, UNDECIDED, GOES).astype(np.uint8)
    state[num_documents:][compared[num_documents:]] = STAYS

    def is_open(rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Some are undecided."""
        undecided: np.ndarray = np.minimum.reduceat(state[rows], starts) == UNDECIDED
        return undecided

    while (state == UNDECIDED).any():
        is_blocked = np.zeros(len(every), dtype=bool)
        for one in _in_buckets(signatures, sets, row_of_arrival, state != GOES, order, is_open, memory):
            texts = one.signatures, one.shingles, one.starts
            seek(one.rows, one.keys, order, state, *texts, min_equal, least, REACH, found, is_blocked)
        is_undecided, goes = state == UNDECIDED, found != every
        state[is_undecided & goes] = GOES
        state[is_undecided & ~goes & ~is_blocked] = STAYS
    return found


def _in_buckets(
    signatures: Signatures, sets: ShingleSets | None, row_of_arrival: np.ndarray, compared: np.ndarray,
    order: np.ndarray | None, is_open: Callable[[np.ndarray, np.ndarray], np.ndarray], memory: int,
) -> Iterator[Members]:  # fmt: skip
    """Members of buckets, sorted by key and `order` (None: by row), in batches that fit into `memory`. is_open: of rows and where
    buckets begin, which buckets are wanted."""
    arrival_of_row = inverse_of(row_of_arrival)
    num_parts = max(-(-len(row_of_arrival) * SORTED_BYTES * 2 // memory), 1)
    nothing = np.zeros(0, dtype=np.uint64), np.zeros(1, dtype=np.int64)
    for band in range(signatures.bands):
        for part in range(num_parts):
            rows, keys = _members(signatures, band, part, num_parts, row_of_arrival, compared, order)
            if not len(rows):
                continue
            starts, sizes = runs(keys)
            wanted = np.repeat(is_open(rows, starts), sizes)
            rows, keys = rows[wanted], keys[wanted]
            for batch in _batches(rows, keys, signatures, sets, memory // 2):
                chosen = rows[batch]
                signed = signatures.of(arrival_of_row[chosen])
                yield Members(chosen, keys[batch], signed, *(sets.of(chosen) if sets else nothing))
                check_stop()


def min_equal_places(min_jaccard: float, num_hashes: int, to_verify: bool) -> int:
    """Places in which signatures have to agree: for the estimate itself, or so few that a pair may pass verification."""
    if to_verify:
        min_jaccard -= ESTIMATE_DEVIATIONS * sqrt(min_jaccard * (1 - min_jaccard) / num_hashes)
    return max(ceil(min_jaccard * num_hashes - 1e-9), 1)


def inverse_of(permutation: np.ndarray) -> np.ndarray:
    """The inverse of a permutation."""
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(len(permutation), dtype=permutation.dtype)
    return inverse


def runs(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each run of equal values begins, and how long it is."""
    is_first = np.ones(len(ordered), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(is_first)
    return starts, np.diff(np.append(starts, len(ordered)))


def _members(
    signatures: Signatures, band: int, part: int, num_parts: int, row_of_arrival: np.ndarray, compared: np.ndarray,
    order: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Rows and keys of one part of a band, where a key has at least two, sorted by key and `order`, or by (key, row)."""
    found_rows, found_keys = [row_of_arrival[:0]], [np.zeros(0, np.uint64)]
    start = 0
    for keys in signatures.keys[band].chunks(CHUNK):
        rows = row_of_arrival[start : start + len(keys)]
        start += len(keys)
        taken = compared[rows]
        if num_parts > 1:
            taken &= (keys >> np.uint64(32)) * np.uint64(num_parts) >> np.uint64(32) == part
        found_rows.append(rows[taken])
        found_keys.append(keys[taken])
    rows, keys = np.concatenate(found_rows), np.concatenate(found_keys)
    by_key = np.argsort(keys)
    _, sizes = runs(keys[by_key])
    by_key = by_key[np.repeat(sizes > 1, sizes)]
    rows, keys = rows[by_key], keys[by_key]
    by_key = np.lexsort((rows if order is None else order[rows], keys))
    return rows[by_key], keys[by_key]


def _batches(
    rows: np.ndarray, keys: np.ndarray, signatures: Signatures, sets: ShingleSets | None, memory: int
) -> Iterator[np.ndarray]:
    """Members, by number, in batches that fit into `memory`. Where one begins inside a bucket it repeats the
    bucket's first member and the last REACH, so that a bucket gives the same however it is cut."""
    sizes = np.full(len(rows), signatures.num_hashes * 12, dtype=np.int64)
    if sets is not None:
        sizes += sets.counts[rows].astype(np.int64) * 24
    ends = np.cumsum(sizes)
    first = 0
    while first < len(rows):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + memory, side="right")), first + 1)
        if first and keys[first] == keys[first - 1]:
            head = int(np.searchsorted(keys, keys[first]))
            yield np.concatenate([[head], np.arange(max(head + 1, first - REACH), last)])
        else:
            yield np.arange(first, last)
        first = last
