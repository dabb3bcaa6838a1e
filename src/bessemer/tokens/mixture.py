"""Which source each training sequence comes from: exact shares, as arithmetic.

Slots of the global sequence of samples are grouped in blocks. Every block has the same whole number of slots of each source,
so after every block the shares are exact; within it each slot goes to a source that is behind, so that every batch has the
shares to within a sequence. Only what a slot reads is random: a source's k-th slot reads sequence k of its shuffled epochs.

The shares may change from phase to phase. A phase begins with a new block, and a source's count k continues, so no sequence is
repeated before its epoch ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import ceil, lcm
from operator import truediv
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bessemer.common.hashing import key_of
from bessemer.tokens.order import permute

SMALL_BLOCK = 1024  # slots: long enough to mix well, short enough for exact shares over a few steps
CHUNK = 4096  # slots drawn at a time
LARGEST_BLOCK = 8192  # slots: shares that no smaller block makes exact are rounded to 1/8192
FINEST_BLOCK = 65536  # the same with phases: the smallest of many languages has a share of that order

Weight = float | Fraction
Counts = npt.NDArray[np.int64]


class Draw(NamedTuple):
    """What slots read: for each slot, the source's number, the epoch and the sequence within the source."""

    source: Counts
    epoch: Counts
    sequence: Counts


@dataclass(frozen=True)
class Phase:
    """A stretch of slots with fixed shares. It ends where the next phase begins.

    Attributes:
        first: The first slot.
        slots: Slots of each source in a block.
        before: Sequences of each source drawn before the phase.
        by_deadline: The rule of the order within a block: `_block_by_deadline`, else `_block`.
        recipe_phase: Number of the phase in the recipe.
        exact: Numerators of the shares, where the block is the whole phase and the shares are no multiples of 1 / block.
    """

    first: int
    slots: tuple[int, ...]
    before: tuple[int, ...]
    by_deadline: bool = True
    recipe_phase: int = 0
    exact: tuple[int, ...] = ()

    @property
    def block(self) -> int:
        """Slots in a block."""
        return sum(self.slots)

    def drawn(self, count: int) -> Counts:
        """How many of the phase's first `count` slots each source has."""
        whole, rest = divmod(count, self.block)
        counts = whole * np.asarray(self.slots, dtype=np.int64)
        if rest:
            counts = counts + np.bincount(self.order()[0][:rest], minlength=len(self.slots))
        return counts

    def slots_of(self, source: int, numbers: npt.ArrayLike) -> Counts:
        """Slots of a source's sequences `numbers` of the phase (from 0), counted from the phase's first slot."""
        whole, rest = np.divmod(numbers, self.slots[source])
        places = np.flatnonzero(self.order()[0] == source)
        return np.asarray(whole * self.block + places[rest], dtype=np.int64)

    def order(self) -> tuple[Counts, Counts]:
        """For each slot of a block, its source and the number of that source's slots before it in the block."""
        return _block_by_deadline(self.exact or self.slots, self.block) if self.by_deadline else _block(self.slots)


class PhaseShares(NamedTuple):
    """Shares of the tokens in a phase of the recipe: as the recipe says, and as caps on repetition leave them."""

    recipe: tuple[float, ...]
    planned: tuple[float, ...]


@dataclass(frozen=True)
class Mixture:
    """Sources in shares that are fixed in each phase.

    Attributes:
        names: Names of the sources.
        sequences: Number of sequences of each source.
        phases: The phases in order; the first begins at slot 0, the last has no end.
        seed: Seed of the shuffles.
        shares: Token shares of each phase of the recipe, for the audit.
    """

    names: tuple[str, ...]
    sequences: tuple[int, ...]
    phases: tuple[Phase, ...]
    seed: int
    shares: tuple[PhaseShares, ...] = ()

    @classmethod
    def from_weights(
        cls, names: tuple[str, ...], sequences: tuple[int, ...], weights: tuple[float, ...], seed: int
    ) -> Mixture:
        """A mixture with one phase, and shares in proportion to `weights`."""
        first = Phase(0, block_slots(weights), (0,) * len(names), by_deadline=False)
        shares = tuple(weight / sum(weights) for weight in weights)
        return cls(names, sequences, (first,), seed, (PhaseShares(shares, shares),))

    @classmethod
    def from_phases(
        cls, names: tuple[str, ...], sequences: tuple[int, ...], spans: Sequence[tuple[int, tuple[Weight, ...]]], seed: int,
        end: int | None = None,
    ) -> Mixture:  # fmt: skip
        """A mixture whose shares change. spans: the first slot of each phase, 0 first, and its weights; end: of the last phase,
        if known: shares that no block of FINEST_BLOCK slots can have are then exact in phases of at most that length, else
        rounded to 1 / FINEST_BLOCK."""
        phases: list[Phase] = []
        ends = [*(first for first, _ in spans[1:]), end]
        for number, ((first, weights), until) in enumerate(zip(spans, ends, strict=True)):
            before = count_slots(phases, first) if phases else (0,) * len(names)
            length = None if until is None else until - first
            phases.append(_phase(first, weights, before, number, length))
        return cls(names, sequences, tuple(phases), seed)

    def phase_at(self, slot: int) -> int:
        """Number of the phase that a slot lies in."""
        return bisect_right(self.phases, slot, key=lambda phase: phase.first) - 1

    def draw(self, first: int, count: int) -> Draw:
        """What slots [first, first + count) read: a pure function of the mixture and the slot's number."""
        chunks = range(first // CHUNK, (first + max(count, 1) - 1) // CHUNK + 1)
        parts = [_chunk(self, chunk) for chunk in chunks]
        here = slice(first - chunks.start * CHUNK, first - chunks.start * CHUNK + count)
        return Draw(*(np.concatenate(fields)[here] for fields in zip(*parts, strict=True)))

    def slots_of(self, source: int, sequences: npt.ArrayLike, count: int) -> Counts:
        """Those of the first `count` slots that read one of these sequences of a source, ascending: `draw` backwards.

        Takes as long as the answer has epochs, however many slots there are.
        """
        size, total = self.sequences[source], self.drawn(count)[source] if count else 0
        wanted = np.unique(np.asarray(sequences, dtype=np.int64))
        numbers = np.zeros(0, dtype=np.int64)
        if keys := [_epoch_key(self, source, turn) for turn in range(-(-total // size) if size else 0)]:
            turns = np.repeat(np.arange(len(keys)), len(wanted))
            places = permute(keys, turns, np.tile(wanted, len(keys)), size, is_inverse=True).astype(np.int64)
            numbers = np.sort(turns * size + places)
        numbers = numbers[numbers < total]
        before = np.array([phase.before[source] for phase in self.phases])
        # Of phases with the same count before them, all but the last have none of the source's sequences.
        of_phase = np.searchsorted(before, numbers, side="right") - 1
        slots = np.empty_like(numbers)
        for at in np.unique(of_phase).tolist():
            here, phase = of_phase == at, self.phases[at]
            slots[here] = phase.first + phase.slots_of(source, numbers[here] - phase.before[source])
        return slots

    def drawn(self, count: int) -> tuple[int, ...]:
        """How many of the first `count` slots each source has: counted from the order itself."""
        return count_slots(self.phases[: self.phase_at(max(count, 1) - 1) + 1], count)

    def epochs(self, count: int) -> dict[str, float]:
        """How often the first `count` slots read each source."""
        return dict(zip(self.names, map(truediv, self.drawn(count), self.sequences), strict=True))


def count_slots(phases: Sequence[Phase], slot: int) -> tuple[int, ...]:
    """How many of the slots before `slot` each source has, the last of the phases going on up to there."""
    if not phases:
        return ()
    last = phases[-1]
    return tuple(int(number) for number in np.asarray(last.before) + last.drawn(slot - last.first))


@lru_cache(maxsize=8)
def _chunk(mixture: Mixture, number: int) -> Draw:
    """The draw of slots [number * CHUNK, (number + 1) * CHUNK), cached: a few long arrays are cheaper than many short ones."""
    source, drawn, sequence = (np.empty(CHUNK, dtype=np.int64) for _ in range(3))
    slots = np.arange(number * CHUNK, (number + 1) * CHUNK, dtype=np.int64)
    of_phase = np.searchsorted([phase.first for phase in mixture.phases], slots, side="right") - 1
    for at in np.unique(of_phase).tolist():
        here, phase = of_phase == at, mixture.phases[at]
        blocks, positions = np.divmod(slots[here] - phase.first, phase.block)
        source_of, rank_of = phase.order()
        source[here] = chosen = source_of[positions]
        drawn[here] = np.asarray(phase.before)[chosen] + blocks * np.asarray(phase.slots)[chosen] + rank_of[positions]
    epoch, place = np.divmod(drawn, np.asarray(mixture.sequences)[source])
    for one in np.unique(source).tolist():
        chosen = source == one
        turns, which = np.unique(epoch[chosen], return_inverse=True)
        keys = [_epoch_key(mixture, one, turn) for turn in turns.tolist()]
        sequence[chosen] = permute(keys, which, place[chosen], mixture.sequences[one]).astype(np.int64)
    return Draw(source, epoch, sequence)


def _epoch_key(mixture: Mixture, source: int, epoch: int) -> int:
    """Which shuffle of its sequences a source is read in."""
    return key_of("epoch", mixture.seed, mixture.names[source], epoch)


def _phase(
    first: int, weights: Sequence[Weight], before: tuple[int, ...], recipe_phase: int, length: int | None
) -> Phase:
    """A phase with a given number of slots; None: unknown."""
    shares = _shares(weights)
    common = lcm(*(share.denominator for share in shares))
    if length is None or length > FINEST_BLOCK or common <= FINEST_BLOCK or common >= 1 << 62:
        return Phase(first, block_slots(weights, FINEST_BLOCK), before, recipe_phase=recipe_phase)
    exact = tuple(int(share * common) for share in shares)
    counts = np.bincount(_block_by_deadline(exact, length)[0], minlength=len(exact))
    return Phase(first, tuple(counts.tolist()), before, recipe_phase=recipe_phase, exact=exact)


def _shares(weights: Sequence[Weight]) -> list[Fraction]:
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact, Fraction(0))
    return [weight / total for weight in exact]


@lru_cache(maxsize=32)
def _block(slots: tuple[int, ...]) -> tuple[Counts, Counts]:
    """`Phase.order` where a slot goes to the source that is furthest behind, which for some shares leaves one more than a
    sequence behind (1.16 was seen)."""
    wanted, total = np.asarray(slots, dtype=np.int64), sum(slots)
    placed = np.zeros(len(slots), dtype=np.int64)
    source, rank = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    for slot in range(total):
        chosen = int((wanted * (slot + 1) - placed * total).argmax())
        source[slot], rank[slot] = chosen, placed[chosen]
        placed[chosen] += 1
    return source, rank


@lru_cache(maxsize=32)
def _block_by_deadline(slots: tuple[int, ...], length: int) -> tuple[Counts, Counts]:
    """`Phase.order` of the first `length` slots, where of the sources that do not get ahead by a sequence a slot goes to the one
    whose next sequence is due first: none is ever a whole sequence ahead or behind (Tijdeman 1980, the chairman assignment
    problem; Steiner and Yeomans 1993).

    A source's sequence n is released at slot n * total // slots, and due by slot ceil((n + 1) * total / slots); released ones
    wait in a heap.
    """
    total, many = sum(slots), len(slots)
    placed, ready = [0] * many, list[int]()
    released: list[list[int]] = [[] for _ in range(length)]
    released[0] = [source for source, wanted in enumerate(slots) if wanted]
    chosen, rank = [0] * length, [0] * length
    for slot in range(length):
        for source in released[slot]:
            due = -(-(placed[source] + 1) * total // slots[source])
            heappush(ready, due * many + source)  # of those due at once, the first in the mixture
        source = heappop(ready) % many
        chosen[slot], rank[slot] = source, placed[source]
        placed[source] += 1
        if placed[source] < slots[source]:
            free = max(placed[source] * total // slots[source], slot + 1)
            if free < length:
                released[free].append(source)
    return np.array(chosen, dtype=np.int64), np.array(rank, dtype=np.int64)


def block_slots(weights: Sequence[Weight], largest: int = LARGEST_BLOCK) -> tuple[int, ...]:
    """Slots of a block in proportion to `weights`; exact when a block of at most `largest` slots can be.

    A source with a weight has at least one slot, one without (0) has none.
    """
    shares = _shares(weights)
    denominator = lcm(*(share.denominator for share in shares))
    if denominator <= largest:
        block = denominator * ceil(SMALL_BLOCK / denominator)
        return tuple(int(share * block) for share in shares)
    slots = [max(int(share * largest), 1) if share else 0 for share in shares]  # largest remainder
    by_remainder = sorted(range(len(shares)), key=lambda n: slots[n] - shares[n] * largest)
    spare = largest - sum(slots)  # negative where sources have more than their share in their one slot
    if largest > LARGEST_BLOCK:  # orders of runs from before there were phases stay as they are
        spare = max(spare, 0)
    for number in by_remainder[:spare]:
        slots[number] += 1
    return tuple(slots)
