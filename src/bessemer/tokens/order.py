"""A computed shuffle: find the n-th item of a random order without storing the order.

A Feistel network over the bits of an index is a permutation of 2^k items; cycle walking (Black and Rogaway 2002,
section 3) narrows it to any size. So the item at any position of any epoch is a pure function of (key, position), and
the inverse is as fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bessemer.common.hashing import key_of

Indices = npt.NDArray[np.uint64]

ROUNDS = 6  # 4 make a pseudo-random permutation from pseudo-random rounds (Luby and Rackoff 1988); 6 for small domains


def permute(
    keys: Sequence[int], which: npt.NDArray[np.intp], positions: npt.ArrayLike, size: int, is_inverse: bool = False
) -> Indices:
    """Return the items at some positions of random permutations of range(size), without computing the permutations.

    Values are computed by cycle walking (Black and Rogaway 2002): a Feistel network is applied until the value is in
    range(size).

    Args:
        keys: Random key of each permutation.
        which: For each position, the index in `keys` of its permutation.
        positions: Positions, integers in [0, size).
        size: Number of items of every permutation.
        is_inverse: True for the inverse: `positions` are items, and the result has their positions.
    """
    values = np.atleast_1d(np.array(positions, dtype=np.uint64))
    if values.size and int(values.max()) >= size:
        raise ValueError(f"{int(values.max())} is outside a permutation of {size} items")
    if size <= 1:
        return values
    half_bits = max((int(size - 1).bit_length() + 1) // 2, 1)
    rounds_RK = np.array([[key_of(key, half_bits, number) for key in keys] for number in range(ROUNDS)], np.uint64)
    rounds_RN = rounds_RK[:, which]
    values = _network(values, rounds_RN, half_bits, is_inverse)
    outside = values >= size
    while outside.any():  # the domain of the network is at most 4 * `size`, so a few rounds suffice
        values[outside] = _network(values[outside], rounds_RN[:, outside], half_bits, is_inverse)
        outside = values >= size
    return values


def _network(values: Indices, keys: Indices, half_bits: int, is_inverse: bool) -> Indices:
    """Apply a Feistel network, a bijection of the integers below 4^half_bits, to each value.

    `keys` are the round keys of each value, (rounds, values). The inverse is the same network with the halves of
    `half_bits` bits exchanged and the keys reversed.
    """
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    if is_inverse:
        left, right, keys = right, left, keys[::-1]
    for key in keys:
        left, right = right, left ^ (_splitmix64_finaliser(right ^ key) & mask)
    if is_inverse:
        left, right = right, left
    return (left << bits) | right


def _splitmix64_finaliser(values: Indices) -> Indices:
    """Mix bits with the finaliser of splitmix64 (Steele, Lea and Flood 2014): each input bit affects all output bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
