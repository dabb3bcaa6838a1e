"""Connected components of similar documents that share an LSH bucket.

Bands are processed one after the other, each in as many parts (by the first bits of the keys) as fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, sqrt

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
    arrival_of_row = inverse_of(row_of_arrival)
    num_parts = max(-(-len(row_of_arrival) * SORTED_BYTES * 2 // memory), 1)
    for band in range(signatures.bands):
        for part in range(num_parts):
            rows, keys = _members(signatures, band, part, num_parts, row_of_arrival, compared)
            rows, keys = _undecided(rows, keys, parents)
            for batch in _batches(rows, keys, signatures, sets, memory // 2):
                chosen, least = rows[batch], min_jaccard if sets else 0.0
                shingles, starts = (
                    sets.of(chosen) if sets else (np.zeros(0, dtype=np.uint64), np.zeros(1, dtype=np.int64))
                )
                signed = signatures.of(arrival_of_row[chosen])
                link(chosen, keys[batch], signed, shingles, starts, min_equal, least, REACH, parents)
                check_stop()
    return roots(parents)


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
    signatures: Signatures, band: int, part: int, num_parts: int, row_of_arrival: np.ndarray, compared: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and keys of one part of a band, where a key has at least two, sorted by (key, row)."""
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
    order = np.argsort(keys)
    _, sizes = runs(keys[order])
    order = order[np.repeat(sizes > 1, sizes)]
    rows, keys = rows[order], keys[order]
    order = np.lexsort((rows, keys))
    return rows[order], keys[order]


def _undecided(rows: np.ndarray, keys: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without the buckets whose members are all in one component already."""
    from bessemer.corpus.dedup.kernels import roots

    if not len(rows):
        return rows, keys
    root = roots(parents)[rows]
    starts, sizes = runs(keys)
    is_open = np.repeat(np.minimum.reduceat(root, starts) != np.maximum.reduceat(root, starts), sizes)
    return rows[is_open], keys[is_open]


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
