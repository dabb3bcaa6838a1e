"""Packing of documents into sequences, computed once when the shards are written.

A document of at most one sequence's length is never cut; a longer one gives whole sequences and a remainder. `best-fit`
packs documents and remainders by best-fit decreasing (Ding et al. 2024, "Fewer truncations improve language modeling",
section 3.2, algorithm 1). `document` gives each a separate sequence. Both pad, and drop nothing.

    NAME.pack   little-endian: 8 bytes magic "BSMRPAK2"; uint64 length of a sequence, number of sequences S, number of
                segments P; S+1 uint64, the first segment of each sequence and P; P uint64, where each segment starts in the
                stream of NAME's shards, in tokens; P uint64, the segments in the order of the stream; P uint32, the tokens
                of each segment.

The segments of a sequence are in the order of the stream, and sequences are in the order of their first segments.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.common.errors import BessemerError, InputError
from bessemer.common.hashing import fingerprint
from bessemer.recipe import Recipe
from bessemer.recipe.tokens import Packing
from bessemer.storage.path import map_array
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.shards.shard import SPLITS

MAGIC = b"BSMRPAK2"
HEADER = 32  # bytes

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pack:
    """The packing of a split: which segments, documents or parts of one, each sequence contains.

    Segments are numbered by the sequence that contains them. The stream is all documents of the split, concatenated.

    Attributes:
        length: Positions of a sequence.
        first: Index of the first segment of each sequence, then the number of segments, (sequences + 1,).
        starts: Start of each segment in the stream, in tokens, (segments,).
        sizes: Tokens of each segment, (segments,).
        by_start: Indices of the segments sorted by `starts`, (segments,).
    """

    length: int
    first: npt.NDArray[Any]
    starts: npt.NDArray[Any]
    sizes: npt.NDArray[Any]
    by_start: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.first) - 1

    def to_bytes(self) -> bytes:
        """Return the content of a .pack file."""
        counts = np.array([self.length, len(self), len(self.starts)])
        arrays = [array.astype("<u8").tobytes() for array in (counts, self.first, self.starts, self.by_start)]
        return MAGIC + b"".join(arrays) + self.sizes.astype("<u4").tobytes()

    @classmethod
    def open(cls, path: Path) -> Pack:
        """Map a .pack file into memory. Raises BessemerError when it is not a .pack file or is incomplete."""
        raw = map_array(path, np.uint8)
        length, sequences, segments = raw[8:HEADER].view("<u8").tolist() if len(raw) >= HEADER else (0, 0, 0)
        *ends, end = accumulate((HEADER, 8 * (sequences + 1), 8 * segments, 8 * segments))
        if raw[:8].tobytes() != MAGIC or len(raw) != end + 4 * segments:
            raise BessemerError(f"{path}: damaged: not a complete .pack file; write the tokens again")
        first, starts, by_start = (part.view("<i8") for part in np.split(raw[:end], ends)[1:])
        return cls(length, first, starts, raw[end:].view("<u4"), by_start)

    def samples_in(self, start: int, end: int) -> Ints:
        """Return the indices of the sequences that contain a token of [start, end) of the stream, ascending."""
        # Segments do not overlap, so only the last one that begins at or before `start` and those up to `end` qualify.
        low, high = (
            find(self.by_start, border, key=self.starts.__getitem__)
            for find, border in ((bisect_right, start), (bisect_left, end))
        )
        segments = self.by_start[max(low - 1, 0) : high]
        segments = segments[self.starts[segments] + self.sizes[segments] > start]
        return np.unique(np.searchsorted(self.first, segments, side="right") - 1)


def pack(starts: Ints, sizes: Ints, length: int, packing: Packing) -> Pack:
    """Pack documents into sequences of `length` tokens.

    Args:
        starts: Start of each document in the concatenated documents, in tokens.
        sizes: Tokens of each document.
        length: Positions of a sequence.
        packing: "best-fit" (best-fit decreasing) or "document" (each document in separate sequences).
    """
    parts = -(-sizes // length)
    document = np.repeat(np.arange(len(sizes)), parts)
    index = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    segment_starts = starts[document] + index * length
    segment_sizes = np.minimum(length, starts[document] + sizes[document] - segment_starts)
    sequence = np.arange(len(document))
    if packing == "best-fit":
        order = np.argsort(-segment_sizes, kind="stable")
        sequence[order] = _best_fit()(segment_sizes[order], length)
    # Sequences and their segments are in the order in which they begin in the stream.
    begins = np.unique(sequence, return_index=True)[1][sequence]
    order = np.argsort(begins, kind="stable")
    first = np.append(np.flatnonzero(np.diff(begins[order], prepend=-1)), len(order))
    segment_starts = segment_starts[order]
    return Pack(length, first, segment_starts, segment_sizes[order], np.argsort(segment_starts, kind="stable"))


@cache
def _best_fit() -> Callable[[Ints, int], Ints]:
    """Return `_best_fit_decreasing`, compiled."""
    from bessemer.text.hashing import compiled  # loads numba, which is slow to import

    return compiled(_best_fit_decreasing)


def _best_fit_decreasing(sizes: Ints, length: int) -> Ints:
    """Return the index of the bin of each item, for item sizes in descending order and bins of size `length`.

    Bins with equal free room are kept in a stack. A binary tree over the amounts of room counts the non-empty stacks below
    each node, so an item takes log2(length) steps. The stack for room `length` always counts as non-empty: it represents a
    new bin.
    """
    leaves = 1
    while leaves <= length:
        leaves *= 2
    stacks = np.zeros(2 * leaves, dtype=np.int64)
    top = np.full(length + 1, -1, dtype=np.int64)  # top bin of the stack for each amount of room
    below = np.empty(len(sizes), dtype=np.int64)
    bins = np.empty(len(sizes), dtype=np.int64)
    num_bins = 0

    def count(room: int, change: int) -> None:
        node = leaves + room
        while node > 0:
            stacks[node] += change
            node //= 2

    count(length, 1)
    for item in range(len(sizes)):
        node = leaves + sizes[item]
        while stacks[node] == 0:  # go to the next node on the right, and up while it is a left child
            node += 1
            while node % 2 == 0:
                node //= 2
        while node < leaves:
            node = 2 * node if stacks[2 * node] else 2 * node + 1
        room = node - leaves
        if room == length:
            chosen = num_bins
            num_bins += 1
        else:
            chosen = top[room]
            top[room] = below[chosen]
            if top[room] < 0:
                count(room, -1)
        bins[item] = chosen
        left = room - sizes[item]
        if left > 0:
            if top[left] < 0:
                count(left, 1)
            below[chosen] = top[left]
            top[left] = chosen
    return bins


def _num_skipped_tokens(store: TokenStore) -> int:
    """Return how many tokens of each document are never a target: 1 with a framing prefix (BOS, [CLS]), else 0."""
    return int(bool(store.manifest["tokenizer"].get("prefix")))


def add_packs(store: TokenStore, recipe: Recipe) -> None:
    """Pack a store's documents as the recipe says, and record the packing in the manifest.

    For each source and split, a .pack file next to the shards stores the packing (`Pack`). Concatenated documents need none.
    """
    tokens, skip = recipe.tokens, _num_skipped_tokens(store)
    for source, split in product(store.sources, SPLITS) if tokens.packing != "concatenate" else ():
        starts, sizes = store.split(source, split).document_spans()
        path = store.folder / f"{source}-{split}.pack"
        path.write_bytes(pack(starts + skip, sizes - skip, tokens.sequence_length, tokens.packing).to_bytes())
        store.manifest["files"][path.name] = fingerprint(path)
    store.manifest["packing"] = pack_settings(recipe)
    store.manifest["packing"] = facts(store, recipe)


def pack_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's packing and sequence length, on which .pack files depend, as the manifest records them."""
    return {"packing": recipe.tokens.packing, "sequence_length": recipe.tokens.sequence_length}


def is_packed_as(store: TokenStore, recipe: Recipe) -> bool:
    """Return True if the .pack files of a store were written for this recipe's packing."""
    return bool(pack_settings(recipe).items() <= store.manifest.get("packing", {}).items())


def open_pack(store: TokenStore, recipe: Recipe, source: str, split: str) -> Pack:
    """Open the packing of one source and split ("train" or "heldout").

    Raises InputError if the shards were packed for another kind of packing or sequence length.
    """
    if not is_packed_as(store, recipe):
        raise InputError(
            f"tokens.packing: {store.folder} is not packed for {recipe.tokens.packing} in sequences of "
            f"{recipe.tokens.sequence_length}; write the tokens again with `bessemer tokens RECIPE`"
        )
    store.check(path := store.folder / f"{source}-{split}.pack")
    return Pack.open(path)


def facts(store: TokenStore, recipe: Recipe) -> dict[str, Any]:
    """Count how well the documents fill the sequences of a recipe.

    Returns:
        The recipe's `packing` and `sequence_length`, then `documents`, `documents_cut` (those that span several
            sequences), `cut_share`, `sequences`, `targets` and `utilisation` (the share of positions with a target) over
            all training data. `sources` has the same counts by source and split.
    """
    length = recipe.tokens.sequence_length
    by_source = {name: {split: _facts(store, recipe, name, split) for split in SPLITS} for name in store.sources}
    trained = [splits["train"] for splits in by_source.values()]
    total = {key: sum(row[key] for row in trained) for key in (trained[0] if trained else ())}
    for row in (total, *(row for splits in by_source.values() for row in splits.values())):
        row["utilisation"] = row.get("targets", 0) / max(row.get("sequences", 0) * length, 1)
        row["cut_share"] = row.get("documents_cut", 0) / max(row.get("documents", 0), 1)
    return {**pack_settings(recipe), **total, "sources": by_source}


def _facts(store: TokenStore, recipe: Recipe, source: str, name: str) -> dict[str, Any]:
    packing, length, split = recipe.tokens.packing, recipe.tokens.sequence_length, store.split(source, name)
    starts, sizes = split.document_spans()
    if packing == "concatenate":
        sequences = split.num_sequences(length)
        targets, ends = sequences * length, np.minimum(starts + sizes, sequences * length)
        cut = int((starts // length < (ends - 1) // length)[starts < ends].sum())
    else:
        packed, cut = open_pack(store, recipe, source, name), int((sizes - _num_skipped_tokens(store) > length).sum())
        sequences, targets = len(packed), int(packed.sizes.sum())
        if masks := [shard.is_trained for shard in split.shards if shard.is_trained is not None]:
            targets = sum(int(mask.sum()) for mask in masks)
    return {"documents": len(sizes), "documents_cut": cut, "sequences": sequences, "targets": targets}
