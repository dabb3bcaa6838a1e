"""Batches of packed documents: sequences that are pieces of documents, whole wherever they fit, and padding.

A piece of n tokens takes n positions. Its targets are its tokens; its inputs are the token before it and all but its last:
an end-of-text token where the document begins, so that every token of every document, its own end-of-text included, is a
target once an epoch. Attention and positions, with tokens.document_mask, begin anew at each piece. Padding has end-of-text
tokens for inputs and no targets (-1).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bessemer.errors import InputError
from bessemer.recipe import Recipe
from bessemer.tokens.held_out import HeldOut, held_out
from bessemer.tokens.loader import Batch, Loader
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.packing import Ints, Pack, open_pack
from bessemer.tokens.phases import Holding, mixture_of
from bessemer.tokens.shards import Split, TokenStore


class PackedSplit:
    """The packed sequences of one source and split, by number."""

    def __init__(self, split: Split, pack: Pack, end_of_text: int) -> None:
        self.split, self.pack, self._end_of_text = split, pack, end_of_text

    def rows(self, numbers: Ints) -> tuple[Ints, Ints, npt.NDArray[np.bool_], Ints]:
        """Sequences as inputs, targets (-1: none) and starts of pieces, all (sequences, length), and how many positions
        of each are real."""
        pack, shape = self.pack, (len(numbers), self.pack.length)
        counts = pack.first[numbers + 1] - pack.first[numbers]
        row = np.repeat(np.arange(len(numbers)), counts)
        piece = np.arange(len(row)) + np.repeat(pack.first[numbers] - (np.cumsum(counts) - counts), counts)
        start, size = pack.starts[piece], pack.sizes[piece].astype(np.int64)
        ends = np.cumsum(size)
        real = np.add.reduceat(size, np.cumsum(counts) - counts)
        filled = np.arange(pack.length) < real[:, None]
        targets = np.full(shape, -1, dtype=np.int64)
        targets[filled] = self._read(start, size, ends)
        inputs = np.full(shape, self._end_of_text, dtype=np.int64)
        np.copyto(inputs[:, 1:], targets[:, :-1], where=filled[:, 1:])
        column = ends - size - (np.cumsum(real) - real)[row]
        inputs[row, column] = self._before(start)
        starts = np.zeros(shape, dtype=np.bool_)
        starts[row, column] = True
        padded = np.flatnonzero(real < pack.length)
        starts[padded, real[padded]] = True
        return inputs, targets, starts, real

    def documents(self, number: int) -> list[str]:
        """Identities of the documents in a sequence."""
        found: list[str] = []
        for piece in range(int(self.pack.first[number]), int(self.pack.first[number + 1])):
            start = int(self.pack.starts[piece])
            found += self.split.documents(start, start + int(self.pack.sizes[piece]))
        return found

    def _read(self, start: Ints, size: Ints, ends: Ints) -> npt.NDArray[np.unsignedinteger]:  # type: ignore[type-arg]
        """The tokens of pieces, one after the other. No piece lies over a shard's border, since no document does."""
        shard = np.searchsorted(self.split.starts, start, side="right") - 1
        out = np.empty(int(ends[-1]) if len(ends) else 0, dtype=self.split.shards[0].dtype)
        place = start - self.split.starts[shard]
        for number in np.unique(shard):
            tokens = self.split.shards[number].tokens
            for piece in np.flatnonzero(shard == number).tolist():
                begin, end = place[piece], ends[piece]
                out[end - size[piece] : end] = tokens[begin : begin + size[piece]]
        return out

    def _before(self, start: Ints) -> Ints:
        """The token before each piece: of its document, or the end-of-text token of the one before."""
        shard = np.searchsorted(self.split.starts, start, side="right") - 1
        place = start - self.split.starts[shard]
        found = np.full(len(start), self._end_of_text, dtype=np.int64)
        for number in np.unique(shard):
            here = np.flatnonzero((shard == number) & (place > 0))  # a shard begins with a document
            found[here] = self.split.shards[number].tokens[place[here] - 1]
        return found


class PackedLoader:
    """Reads the packed sequences of a run in the run's order. rank, world: see Loader."""

    def __init__(
        self, splits: list[PackedSplit], mixture: Mixture, sequence_length: int, rank: int = 0, world: int = 1
    ) -> None:
        self.mixture, self.sequence_length, self.rank, self.world = mixture, sequence_length, rank, world
        self.splits = splits

    @classmethod
    def of(cls, recipe: Recipe, store: TokenStore, rank: int = 0, world: int = 1) -> PackedLoader:
        """The loader of a recipe: weights from its sources, else each source is read as often as the others."""
        splits = [packed_split(recipe, store, name, "train") for name in store.sources]
        for name, split in zip(store.sources, splits, strict=True):
            if not len(split.pack):
                raise InputError(f"tokens.packing: source {name!r} has no document to train on; add text")
        sequences = tuple(len(split.pack) for split in splits)
        held = Holding(store.sources, sequences, tuple(split.split.num_tokens for split in splits))
        return cls(splits, mixture_of(recipe, held), recipe.tokens.sequence_length, rank, world)

    def batch(self, first: int, count: int) -> Batch:
        """The part of the global batch of samples [first, first + count) that this process takes."""
        draw = self.mixture.draw(first, count)
        mine = slice(self.rank, None, self.world)
        sources, sequences = draw.source[mine], draw.sequence[mine]
        shape = (len(sources), self.sequence_length)
        inputs, targets = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        starts, real = np.empty(shape, dtype=np.bool_), np.empty(len(sources), dtype=np.int64)
        for number, split in enumerate(self.splits):
            rows = np.flatnonzero(sources == number)
            if len(rows):
                inputs[rows], targets[rows], starts[rows], real[rows] = split.rows(sequences[rows])
        return Batch(first, inputs, sources, targets, starts, real)

    def documents(self, first: int, count: int) -> list[dict[str, object]]:
        """The documents that samples [first, first + count) hold: sample, source, sequence and document identities."""
        draw = self.mixture.draw(first, count)
        return [
            {
                "sample": first + slot,
                "source": self.mixture.names[source],
                "sequence": sequence,
                "documents": self.splits[source].documents(sequence),
            }
            for slot, (source, sequence) in enumerate(zip(draw.source.tolist(), draw.sequence.tolist(), strict=True))
        ]


def packed_split(recipe: Recipe, store: TokenStore, source: str, split: str) -> PackedSplit:
    """The packed sequences of a source and split."""
    return PackedSplit(store.split(source, split), open_pack(store, recipe, source, split), store.end_of_text)


def sequence_loader(recipe: Recipe, store: TokenStore, rank: int = 0, world: int = 1) -> Loader | PackedLoader:
    """The loader of a recipe whose samples are sequences of text: concatenated or packed."""
    kind = Loader if recipe.tokens.packing == "concatenate" else PackedLoader
    return kind.of(recipe, store, rank, world)


def held_out_sequences(recipe: Recipe, store: TokenStore, max_tokens: int | None = None) -> list[HeldOut]:
    """Every source's held-out text in sequences as those of the training; with `max_tokens`, an even part of each.

    Packed, every token of every document is a target once; concatenated, all but the first of a source. End-of-text
    tokens and padding count neither as loss nor as bytes.
    """
    if recipe.tokens.packing == "concatenate":
        return held_out(store, recipe.tokens.sequence_length, max_tokens)
    splits = {name: packed_split(recipe, store, name, "heldout") for name in store.sources}
    total = sum(split.split.num_tokens for split in splits.values())
    share = 1.0 if max_tokens is None else min(max_tokens / max(total, 1), 1.0)
    parts = []
    for name, split in splits.items():
        count = len(split.pack)
        if not count:
            continue
        chosen = np.unique(np.linspace(0, count - 1, max(int(count * share), 1)).astype(np.int64))
        inputs, targets, starts, _ = split.rows(chosen)
        target_bytes = np.where(targets >= 0, store.token_bytes[targets], 0)
        parts.append(HeldOut(name, inputs, target_bytes > 0, target_bytes.sum(axis=1), targets, starts))
    return parts
