"""Connected components of similar documents that share an LSH bucket.

Bands are processed one after the other, each in as many parts (by the first bits of the keys) as fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np

from bessemer.corpus.dedup.signatures import ShingleSets, Signatures
from bessemer.corpus.engine import check_stop

REACH = 16
"""Members of a bucket before it that a member is compared with, besides the first: buckets of 17 are compared in
full, larger ones cost 17 comparisons a member and not one for each pair."""

SORTED_BYTES = 48
"""Bytes that one key takes while it is sorted: key, place, order, and copies of them."""

CHUNK = 1 << 18
"""Keys read at one time."""

ESTIMATE_DEVIATIONS = 4.0
"""With verification, pairs whose estimate lies so many standard deviations below the threshold are not computed:
a pair at the threshold is lost with 3 in 100,000 (normal law)."""


@dataclass(frozen=True)
class Alike:
    """When two documents are linked."""

    min_jaccard: float
    sets: ShingleSets | None = None
    """Where there are sets, their Jaccard decides and the signatures only spare hopeless comparisons."""
    lenient: bool = False
    """Link whatever might turn out to be alike once it is verified."""

    def fewest(self, num_hashes: int) -> int:
        """Places in which signatures have to agree."""
        least = self.min_jaccard
        if self.lenient or self.sets is not None:
            least -= ESTIMATE_DEVIATIONS * sqrt(least * (1 - least) / num_hashes)
        return max(ceil(least * num_hashes - 1e-9), 1)


def components(
    signatures: Signatures, row_of_place: np.ndarray, compared: np.ndarray, alike: Alike, memory: int
) -> np.ndarray:
    """The smallest row of each row's component (int32).

    `row_of_place` maps document order to rows, `compared` (by row) is true for documents to compare, `memory` is in
    bytes.
    """
    from bessemer.corpus.dedup.kernels import roots

    parents = np.arange(len(row_of_place), dtype=np.int32)
    place_of_row = np.empty(len(row_of_place), dtype=np.int32)
    place_of_row[row_of_place] = np.arange(len(row_of_place), dtype=np.int32)
    num_parts = max(-(-len(row_of_place) * SORTED_BYTES * 2 // memory), 1)
    for band in range(signatures.bands):
        for part in range(num_parts):
            rows, keys = _members(signatures, band, part, num_parts, row_of_place, compared)
            rows, keys = _undecided(rows, keys, parents)
            for batch in _batches(rows, keys, signatures, alike, memory // 2):
                _compare(rows[batch], keys[batch], signatures, place_of_row, alike, parents)
                check_stop()
    smallest = np.empty_like(parents)
    roots(parents, smallest)
    return smallest


def _members(
    signatures: Signatures, band: int, part: int, num_parts: int, row_of_place: np.ndarray, compared: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and keys of one part of a band, where a key has at least two, sorted by (key, row)."""
    found_rows, found_keys = [], []
    start = 0
    for keys in signatures.keys[band].chunks(CHUNK):
        rows = row_of_place[start : start + len(keys)]
        start += len(keys)
        taken = compared[rows]
        if num_parts > 1:
            taken &= (keys >> np.uint64(32)) * np.uint64(num_parts) >> np.uint64(32) == part
        found_rows.append(rows[taken])
        found_keys.append(keys[taken])
    rows, keys = np.concatenate(found_rows or [row_of_place]), np.concatenate(found_keys or [np.zeros(0, np.uint64)])
    order = np.argsort(keys)
    keys = keys[order]
    shared = _beside_equal(keys)
    rows, keys = rows[order[shared]], keys[shared]
    order = np.lexsort((rows, keys))
    return rows[order], keys[order]


def _beside_equal(ordered: np.ndarray) -> np.ndarray:
    """Which values of a sorted array occur more than once."""
    same = ordered[1:] == ordered[:-1]
    shared = np.zeros(len(ordered), dtype=bool)
    shared[1:] |= same
    shared[:-1] |= same
    return shared


def _undecided(rows: np.ndarray, keys: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without the buckets whose members are all in one component already."""
    from bessemer.corpus.dedup.kernels import roots

    if not len(rows):
        return rows, keys
    root = np.empty_like(parents)
    roots(parents, root)
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    root = root[rows]
    joined = np.minimum.reduceat(root, starts) == np.maximum.reduceat(root, starts)
    open_ = ~np.repeat(joined, np.diff(np.append(starts, len(keys))))
    return rows[open_], keys[open_]


def _batches(
    rows: np.ndarray, keys: np.ndarray, signatures: Signatures, alike: Alike, memory: int
) -> Iterator[np.ndarray]:
    """Members, by number, in batches that fit into `memory`. Where one begins inside a bucket it repeats the
    bucket's first member and the last REACH, so that a bucket gives the same however it is cut."""
    sizes = np.full(len(rows), signatures.num_hashes * 12, dtype=np.int64)
    if alike.sets is not None:
        sizes += alike.sets.counts[rows].astype(np.int64) * 24
    ends = np.cumsum(sizes)
    first = 0
    while first < len(rows):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + memory, side="right")), first + 1)
        if first and keys[first] == keys[first - 1]:
            head = int(np.searchsorted(keys, keys[first]))
            begin = max(head + 1, first - REACH)
            yield np.concatenate([[head], np.arange(begin, last)])
        else:
            yield np.arange(first, last)
        first = last


def _compare(
    rows: np.ndarray,
    keys: np.ndarray,
    signatures: Signatures,
    place_of_row: np.ndarray,
    alike: Alike,
    parents: np.ndarray,
) -> None:
    from bessemer.corpus.dedup.kernels import link

    signed = signatures.of(place_of_row[rows])
    if alike.sets is None:
        sets, starts, least = np.zeros(0, dtype=np.uint64), np.zeros(1, dtype=np.int64), 0.0
    else:
        (sets, starts), least = alike.sets.of(rows), alike.min_jaccard
    link(rows, keys, signed, sets, starts, alike.fewest(signatures.num_hashes), least, REACH, parents)
