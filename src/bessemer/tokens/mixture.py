"""The mixture: compute which source and sequence each training sample reads, with exact shares.

A slot is the position of one sample in the run's order. Slots are grouped in blocks. Every block has the same whole number
of slots of each source, so the shares are exact after every block. Within a block each slot goes to a source that is
behind, so every batch has the shares to within one sequence. Only the order within a source is random: a source's k-th slot
reads sequence k of its shuffled epochs.

The shares may change from phase to phase. A phase begins a new block, and each source's count k continues, so no
sequence is repeated before its epoch ends.
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
FINEST_BLOCK = 65536  # largest block of phases; the smallest of many languages has a share of about 1/65536

Weight = float | Fraction
Counts = npt.NDArray[np.int64]


class Draw(NamedTuple):
    """The sequences that a range of samples of the run reads, as three arrays with one element per sample.

    Attributes:
        source: Index of the source.
        epoch: Number of complete earlier passes over that source.
        sequence: Index of the sequence within the source.
    """

    source: Counts
    epoch: Counts
    sequence: Counts


@dataclass(frozen=True)
class Phase:
    """A part of the run in which the sources have fixed shares; it ends where the next phase begins.

    A slot is the position of one sample in the run's order. Slots are divided into blocks of equal composition.

    Attributes:
        first: The first slot of the phase.
        slots: Number of slots of each source in a block.
        before: Number of sequences of each source that were read before the phase.
        by_deadline: If true, `_block_by_deadline` orders the sources within a block, else `_block`.
        recipe_phase: Index of the phase in the recipe.
        exact: Numerators of the exact shares if the block is the whole phase and `slots` only approximates them; else
            empty.
    """

    first: int
    slots: tuple[int, ...]
    before: tuple[int, ...]
    by_deadline: bool = True
    recipe_phase: int = 0
    exact: tuple[int, ...] = ()

    @property
    def block(self) -> int:
        """Length of a block: number of consecutive slots after which the shares of the sources are exact."""
        return sum(self.slots)

    def drawn(self, count: int) -> Counts:
        """Return the number of slots of each source among the phase's first `count` slots."""
        whole, rest = divmod(count, self.block)
        counts = whole * np.asarray(self.slots, dtype=np.int64)
        if rest:
            counts = counts + np.bincount(self.order()[0][:rest], minlength=len(self.slots))
        return counts

    def slots_of(self, source: int, numbers: npt.ArrayLike) -> Counts:
        """Return the slots of the phase in which a source is read for the n-th time.

        Args:
            source: Index of the source.
            numbers: Values of n, 0 for the phase's first read of the source.

        Returns:
            Slots, counted from the phase's first slot.
        """
        whole, rest = np.divmod(numbers, self.slots[source])
        places = np.flatnonzero(self.order()[0] == source)
        return np.asarray(whole * self.block + places[rest], dtype=np.int64)

    def order(self) -> tuple[Counts, Counts]:
        """Return two arrays, (block,): the source of each slot, and the number of earlier slots in the block of that source."""
        return _block_by_deadline(self.exact or self.slots, self.block) if self.by_deadline else _block(self.slots)


class PhaseShares(NamedTuple):
    """Shares of the tokens in a phase of the recipe, by source.

    Attributes:
        recipe: Shares that the recipe sets, before caps.
        planned: Shares after sources are capped at max_epochs.
    """

    recipe: tuple[float, ...]
    planned: tuple[float, ...]


@dataclass(frozen=True)
class Mixture:
    """The mixture of a run: an assignment of each slot to a sequence of a source, in shares that are fixed within a phase.

    A slot is the position of one sample in the run's order.

    Attributes:
        names: Names of the sources.
        sequences: Number of sequences of each source.
        phases: The phases in order; the first begins at slot 0, the last has no end.
        seed: Seed of the shuffles.
        shares: Token shares of each phase of the recipe, for the report on the mixture.
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
        """Return a mixture with one phase and shares in proportion to `weights`."""
        first = Phase(0, block_slots(weights), (0,) * len(names), by_deadline=False)
        shares = tuple(weight / sum(weights) for weight in weights)
        return cls(names, sequences, (first,), seed, (PhaseShares(shares, shares),))

    @classmethod
    def from_phases(
        cls, names: tuple[str, ...], sequences: tuple[int, ...], spans: Sequence[tuple[int, tuple[Weight, ...]]], seed: int,
        end: int | None = None,
    ) -> Mixture:  # fmt: skip
        """Return a mixture whose shares change from phase to phase.

        Args:
            names: Names of the sources.
            sequences: Number of sequences of each source.
            spans: For each phase its first slot (0 for the first phase) and the weights of the sources.
            seed: Seed of the shuffles.
            end: The slot after the last phase, if known. Shares with a denominator over FINEST_BLOCK are exact in phases
                with a known end and at most FINEST_BLOCK slots, else rounded to 1 / FINEST_BLOCK.
        """
        phases: list[Phase] = []
        ends = [*(first for first, _ in spans[1:]), end]
        for number, ((first, weights), until) in enumerate(zip(spans, ends, strict=True)):
            before = count_slots(phases, first) if phases else (0,) * len(names)
            length = None if until is None else until - first
            phases.append(_phase(first, weights, before, number, length))
        return cls(names, sequences, tuple(phases), seed)

    def phase_at(self, slot: int) -> int:
        """Return the index in `phases` of the phase that contains a slot, the position of a sample in the run's order."""
        return bisect_right(self.phases, slot, key=lambda phase: phase.first) - 1

    def draw(self, first: int, count: int) -> Draw:
        """Return the sequences that slots [first, first + count) read, which depend only on the mixture and the slots."""
        chunks = range(first // CHUNK, (first + max(count, 1) - 1) // CHUNK + 1)
        parts = [_chunk(self, chunk) for chunk in chunks]
        here = slice(first - chunks.start * CHUNK, first - chunks.start * CHUNK + count)
        return Draw(*(np.concatenate(fields)[here] for fields in zip(*parts, strict=True)))

    def slots_of(self, source: int, sequences: npt.ArrayLike, count: int) -> Counts:
        """Return the slots among the first `count` that read one of the given sequences, ascending.

        This is the inverse of `draw`. The time grows with the number of epochs, not with the number of slots.

        Args:
            source: Index of the source.
            sequences: Indices of sequences within the source.
            count: Number of slots to search.
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
        # If several phases have the same count before them, only the last of them reads the source.
        of_phase = np.searchsorted(before, numbers, side="right") - 1
        slots = np.empty_like(numbers)
        for at in np.unique(of_phase).tolist():
            here, phase = of_phase == at, self.phases[at]
            slots[here] = phase.first + phase.slots_of(source, numbers[here] - phase.before[source])
        return slots

    def drawn(self, count: int) -> tuple[int, ...]:
        """Return the number of slots of each source among the first `count` slots of the run."""
        return count_slots(self.phases[: self.phase_at(max(count, 1) - 1) + 1], count)

    def epochs(self, count: int) -> dict[str, float]:
        """Return, by name of the source, how many epochs of it the first `count` slots read."""
        return dict(zip(self.names, map(truediv, self.drawn(count), self.sequences), strict=True))


def count_slots(phases: Sequence[Phase], slot: int) -> tuple[int, ...]:
    """Return the number of slots of each source before `slot`; the last phase continues up to it."""
    if not phases:
        return ()
    last = phases[-1]
    return tuple(int(number) for number in np.asarray(last.before) + last.drawn(slot - last.first))


@lru_cache(maxsize=8)
def _chunk(mixture: Mixture, number: int) -> Draw:
    """Return the sequences that slots [number * CHUNK, (number + 1) * CHUNK) read.

    The result is cached, because computing few long arrays is cheaper than many short ones.
    """
    source, draws, sequence = (np.empty(CHUNK, dtype=np.int64) for _ in range(3))
    slots = np.arange(number * CHUNK, (number + 1) * CHUNK, dtype=np.int64)
    of_phase = np.searchsorted([phase.first for phase in mixture.phases], slots, side="right") - 1
    for at in np.unique(of_phase).tolist():
        here, phase = of_phase == at, mixture.phases[at]
        blocks, positions = np.divmod(slots[here] - phase.first, phase.block)
        source_of, rank_of = phase.order()
        source[here] = chosen = source_of[positions]
        draws[here] = np.asarray(phase.before)[chosen] + blocks * np.asarray(phase.slots)[chosen] + rank_of[positions]
    epoch, position = np.divmod(draws, np.asarray(mixture.sequences)[source])
    for one in np.unique(source).tolist():
        chosen = source == one
        turns, which = np.unique(epoch[chosen], return_inverse=True)
        keys = [_epoch_key(mixture, one, turn) for turn in turns.tolist()]
        sequence[chosen] = permute(keys, which, position[chosen], mixture.sequences[one]).astype(np.int64)
    return Draw(source, epoch, sequence)


def _epoch_key(mixture: Mixture, source: int, epoch: int) -> int:
    """Return the random key of the permutation (`order.permute`) that shuffles a source's sequences in an epoch."""
    return key_of("epoch", mixture.seed, mixture.names[source], epoch)


def _phase(
    first: int, weights: Sequence[Weight], before: tuple[int, ...], recipe_phase: int, length: int | None
) -> Phase:
    """Return a phase of `length` slots (None if unknown) with shares in proportion to `weights`.

    The other arguments are the attributes of `Phase`.
    """
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
    """Compute `Phase.order` for a block with slots[s] slots of each source s.

    Each slot goes to the source that is furthest behind its share. For some shares a source gets more than one sequence
    behind (1.16 was observed).
    """
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
    """Compute `Phase.order` for the first `length` slots of a block with slots[s] slots of each source s.

    No source is ever a whole sequence ahead or behind.

    Among the sources that would not get ahead by a sequence, a slot goes to the one whose next sequence is due first
    (Tijdeman 1980, the chairman assignment problem; Steiner and Yeomans 1993). A source's sequence n is released at
    slot n * total // slots, and due by slot ceil((n + 1) * total / slots); released sequences wait in a heap.
    """
    total, num_sources = sum(slots), len(slots)
    placed, ready = [0] * num_sources, list[int]()
    released: list[list[int]] = [[] for _ in range(length)]
    released[0] = [source for source, wanted in enumerate(slots) if wanted]
    source_of, rank = [0] * length, [0] * length
    for slot in range(length):
        for source in released[slot]:
            due = -(-(placed[source] + 1) * total // slots[source])
            heappush(ready, due * num_sources + source)  # ties go to the first source of the mixture
        source = heappop(ready) % num_sources
        source_of[slot], rank[slot] = source, placed[source]
        placed[source] += 1
        if placed[source] < slots[source]:
            free = max(placed[source] * total // slots[source], slot + 1)
            if free < length:
                released[free].append(source)
    return np.array(source_of, dtype=np.int64), np.array(rank, dtype=np.int64)


def block_slots(weights: Sequence[Weight], largest: int = LARGEST_BLOCK) -> tuple[int, ...]:
    """Return the number of slots of each source in a block, in proportion to `weights`.

    The shares are exact if a block of at most `largest` slots can represent them. A source with a positive weight has
    at least one slot, a source with weight 0 has none.
    """
    shares = _shares(weights)
    denominator = lcm(*(share.denominator for share in shares))
    if denominator <= largest:
        block = denominator * ceil(SMALL_BLOCK / denominator)
        return tuple(int(share * block) for share in shares)
    slots = [max(int(share * largest), 1) if share else 0 for share in shares]  # largest remainder
    by_remainder = sorted(range(len(shares)), key=lambda n: slots[n] - shares[n] * largest)
    spare = largest - sum(slots)  # negative where one slot exceeds the share of some sources
    if largest > LARGEST_BLOCK:  # keeps the order of runs from before phases existed
        spare = max(spare, 0)
    for number in by_remainder[:spare]:
        slots[number] += 1
    return tuple(slots)
