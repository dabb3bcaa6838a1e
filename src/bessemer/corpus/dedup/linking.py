"""Compiled loops over the members of buckets: compare neighbours, join those that are alike.

Components live in a forest of parents (union-find with path halving, the smaller row becomes the root), so that a
pair that is joined already costs nothing and no list of pairs is ever held.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, inline="always")
def root_of(parents, row):  # type: ignore[no-untyped-def]
    """The root of a row's component."""
    while parents[row] != row:
        parents[row] = parents[parents[row]]
        row = parents[row]
    return row


@njit(nogil=True, cache=True)
def roots(parents, out):  # type: ignore[no-untyped-def]
    """The root of every row, into `out`."""
    for row in range(len(parents)):
        out[row] = root_of(parents, row)


@njit(nogil=True, cache=True)
def equal_places(left, right):  # type: ignore[no-untyped-def]
    """Places in which two signatures agree."""
    count = np.int32(0)
    for k in range(len(left)):
        count += np.int32(left[k] == right[k])
    return count


@njit(nogil=True, cache=True)
def common(left, right):  # type: ignore[no-untyped-def]
    """Elements that two sorted sets share."""
    i = j = count = 0
    while i < len(left) and j < len(right):
        if left[i] < right[j]:
            i += 1
        elif left[i] > right[j]:
            j += 1
        else:
            count += 1
            i += 1
            j += 1
    return count


@njit(nogil=True, cache=True)
def jaccard(left, right):  # type: ignore[no-untyped-def]
    """Jaccard similarity of two sorted sets."""
    shared = common(left, right)
    whole = len(left) + len(right) - shared
    return shared / whole if whole else 0.0


@njit(nogil=True, cache=True)
def link(rows, keys, signatures, sets, starts, fewest, least, reach, parents):  # type: ignore[no-untyped-def]
    """Join the alike among members of buckets, sorted by (key, row).

    Each member is compared with the first of its bucket and with the `reach` members before it: buckets of up to
    reach + 1 members are compared in full. Two are alike when their signatures agree in `fewest` places and, where
    `least` is above 0, the Jaccard of their sets (sets[starts[i]:starts[i + 1]]) is `least` or more.
    """
    first = 0
    for i in range(len(rows)):
        if keys[i] != keys[first]:
            first = i
        for step in range(reach + 1):
            j = first if step == 0 else i - step
            if j < first or j >= i or (step and j == first):
                continue
            mine, other = root_of(parents, rows[i]), root_of(parents, rows[j])
            if mine == other or equal_places(signatures[i], signatures[j]) < fewest:
                continue
            if least > 0.0:
                left, right = sets[starts[i] : starts[i + 1]], sets[starts[j] : starts[j + 1]]
                if jaccard(left, right) < least:
                    continue
            if mine < other:
                parents[other] = mine
            else:
                parents[mine] = other


@njit(nogil=True, cache=True)
def estimates(signatures, left, right, out):  # type: ignore[no-untyped-def]
    """Share of equal places of the pairs (left[i], right[i]): an unbiased estimate of the Jaccard similarity."""
    for i in range(len(left)):
        out[i] = equal_places(signatures[left[i]], signatures[right[i]]) / signatures.shape[1]


@njit(nogil=True, cache=True)
def jaccards(sets, starts, left, right, out):  # type: ignore[no-untyped-def]
    """Jaccard similarity of the pairs of sets (left[i], right[i])."""
    for i in range(len(left)):
        one, other = left[i], right[i]
        out[i] = jaccard(sets[starts[one] : starts[one + 1]], sets[starts[other] : starts[other + 1]])
