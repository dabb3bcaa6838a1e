"""Which source each training sequence comes from: exact shares, as arithmetic.

Slots of the global sequence of samples are grouped in blocks. Every block holds the same whole number of slots for
each source, so after every block the shares are exactly the block's; within it each slot goes to the source that
is furthest behind, so that every batch has the shares to within a sequence. Chance enters only through what a
source's slot reads: its k-th slot reads sequence k of that source's shuffled epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, lcm

import numpy as np
import numpy.typing as npt

from bessemer.tokens.order import key_of, permute

SMALL_BLOCK = 1024  # slots: long enough to mix well, short enough that the shares hold over a few steps
CHUNK = 4096  # slots whose draw is computed together
LARGEST_BLOCK = 8192  # slots: shares that no smaller block makes exact are rounded to 1/8192


@dataclass(frozen=True)
class Draw:
    """What slots read: for each slot, the source's number, the epoch and the sequence within the source."""

    source: npt.NDArray[np.int64]
    epoch: npt.NDArray[np.int64]
    sequence: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """Sources in fixed shares.

    names: sources, in order; sequences: how many whole sequences each holds; slots: how many slots of a block each
    has; seed: names the shuffles.
    """

    names: tuple[str, ...]
    sequences: tuple[int, ...]
    slots: tuple[int, ...]
    seed: int

    @classmethod
    def of(cls, names: tuple[str, ...], sequences: tuple[int, ...], weights: tuple[float, ...], seed: int) -> Mixture:
        """A mixture with shares in proportion to `weights`."""
        return cls(names, sequences, _whole_slots(weights), seed)

    @property
    def block(self) -> int:
        """Slots in a block."""
        return sum(self.slots)

    @property
    def shares(self) -> tuple[float, ...]:
        """The exact share of the sequences that each source has."""
        return tuple(count / self.block for count in self.slots)

    def draw(self, first: int, count: int) -> Draw:
        """What slots [first, first + count) read: a pure function of the mixture and the slot's number."""
        chunks = range(first // CHUNK, (first + max(count, 1) - 1) // CHUNK + 1)
        parts = [_chunk(self, chunk) for chunk in chunks]
        here = slice(first - chunks.start * CHUNK, first - chunks.start * CHUNK + count)
        if len(parts) == 1:
            return Draw(parts[0].source[here], parts[0].epoch[here], parts[0].sequence[here])
        return Draw(*(np.concatenate([getattr(part, name) for part in parts])[here] for name in Draw.__annotations__))

    def drawn(self, count: int) -> tuple[int, ...]:
        """How many of the first `count` slots each source has: counted from the order itself, for the audit."""
        whole, rest = divmod(count, self.block)
        counts = whole * np.asarray(self.slots)
        if rest:
            counts = counts + np.bincount(_block(self.slots)[0][:rest], minlength=len(self.slots))
        return tuple(int(number) for number in counts)


@lru_cache(maxsize=8)
def _chunk(mixture: Mixture, number: int) -> Draw:
    """The draw of slots [number * CHUNK, (number + 1) * CHUNK), computed once: a few long arrays instead of many short
    ones are what makes the order cheap."""
    slots = np.arange(number * CHUNK, (number + 1) * CHUNK, dtype=np.int64)
    blocks, positions = np.divmod(slots, mixture.block)
    source_of, rank_of = _block(mixture.slots)
    source, rank = source_of[positions], rank_of[positions]
    drawn = blocks * np.asarray(mixture.slots)[source] + rank
    epoch, place = np.divmod(drawn, np.asarray(mixture.sequences)[source])
    sequence = np.empty(CHUNK, dtype=np.int64)
    for source_number, name in enumerate(mixture.names):
        for turn in np.unique(epoch[source == source_number]):
            here = (source == source_number) & (epoch == turn)
            key = key_of("epoch", mixture.seed, name, int(turn))
            sequence[here] = permute(key, place[here], mixture.sequences[source_number]).astype(np.int64)
    return Draw(source, epoch, sequence)


@lru_cache(maxsize=8)
def _block(slots: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each slot of a block, its source and how many slots of that source stand before it in the block."""
    wanted, total = np.asarray(slots), sum(slots)
    given = np.zeros(len(slots), dtype=np.int64)
    source, rank = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    for slot in range(total):
        behind = wanted * (slot + 1) - given * total
        chosen = int(behind.argmax())
        source[slot], rank[slot] = chosen, given[chosen]
        given[chosen] += 1
    return source, rank


def _whole_slots(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Slots of a block in proportion to `weights`; exact when a block of at most LARGEST_BLOCK slots can be."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact, Fraction(0))
    shares = [weight / total for weight in exact]
    denominator = lcm(*(share.denominator for share in shares))
    if denominator <= LARGEST_BLOCK:
        block = denominator * ceil(SMALL_BLOCK / denominator)
        return tuple(int(share * block) for share in shares)
    # Largest remainder; a source that was asked for has at least one slot.
    slots = [max(int(share * LARGEST_BLOCK), 1) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda n: slots[n] - shares[n] * LARGEST_BLOCK)
    for number in by_remainder[: LARGEST_BLOCK - sum(slots)]:
        slots[number] += 1
    return tuple(slots)
