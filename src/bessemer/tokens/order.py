"""A random order as arithmetic: the n-th item of a shuffle, without storing the shuffle.

A Feistel network over the bits of an index is a permutation of 2^k items, whatever its round function is; cycle
walking (Black and Rogaway 2002, section 3) narrows it to any size. So the item at any position of any epoch is a
pure function of (key, position): the order needs no state, no memory, and knows nothing of how many processes
read it. It also runs backwards, so the position of an item is found as fast as the item at a position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.uint64]

ROUNDS = 6  # 4 make a pseudo-random permutation from pseudo-random rounds (Luby and Rackoff 1988); 6 for small domains


def key_of(*parts: object) -> int:
    """A 64-bit key from any values, equal on every machine and Python."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def permute(key: int, positions: npt.ArrayLike, size: int) -> Indices:
    """Items at `positions` of the permutation of range(size) that `key` names.

    positions: integers in [0, size), one or many. Returns uint64, one for each.
    """
    return _walked(_network, key, positions, size, "position")


def positions_of(key: int, items: npt.ArrayLike, size: int) -> Indices:
    """Where `items` stand in the permutation of range(size) that `key` names: the inverse of `permute`.

    items: integers in [0, size), one or many. Returns uint64, one for each.
    """
    return _walked(_network_back, key, items, size, "item")


def _walked(
    network: Callable[[Indices, list[np.uint64], int], Indices], key: int, given: npt.ArrayLike, size: int, what: str
) -> Indices:
    """A network's values narrowed to range(size). Its cycles are walked one way or the other, so that the walk of the
    inverse network is the inverse of the walk."""
    values = np.atleast_1d(np.array(given, dtype=np.uint64))
    if values.size and int(values.max()) >= size:
        raise ValueError(f"{what} {int(values.max())} lies outside a permutation of {size} items")
    if size <= 1:
        return values
    half = max((int(size - 1).bit_length() + 1) // 2, 1)
    keys = [np.uint64(key_of(key, half, number)) for number in range(ROUNDS)]
    found = network(values, keys, half)
    outside = found >= size
    while outside.any():  # the network permutes up to 4x more than `size`, so this ends after a few turns
        found[outside] = network(found[outside], keys, half)
        outside = found >= size
    return found


def _network(values: Indices, keys: list[np.uint64], half: int) -> Indices:
    bits = np.uint64(half)
    mask = np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _network_back(values: Indices, keys: list[np.uint64], half: int) -> Indices:
    bits = np.uint64(half)
    mask = np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in reversed(keys):
        left, right = right ^ (_mixed(left ^ key) & mask), left
    return (left << bits) | right


def _mixed(values: Indices) -> Indices:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit of the input moves every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
