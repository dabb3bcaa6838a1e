"""Batches of labelled texts, for a classifier: one document a row, in the same kind of order as training sequences.

A text is an end-of-text token, then the document's tokens, cut to the sequence length; what is left of the row is padded
with end-of-text tokens. Documents hold none inside, so a text ends where the first one after its first token stands. Under a
model that is used with its own ids around a text these take the place of the first end-of-text token, and an encoder's text
ends with one, which is its separator.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bessemer.errors import BessemerError
from bessemer.recipe import Recipe
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.phases import Holding, mixture_of
from bessemer.tokens.pieces import Framing
from bessemer.tokens.shards import NO_LABEL, Split, TokenStore


class Texts:
    """The labelled documents of one source and split, by number."""

    def __init__(self, split: Split, end_of_text: int, framing: Framing | None = None) -> None:
        self._split, self._end_of_text = split, end_of_text
        around = framing or Framing((end_of_text,))
        self._offset, self._closed = int(around.before == (end_of_text,)), int(around.after[-1:] == (end_of_text,))
        bounds = [
            base + shard.offsets.astype(np.int64) for shard, base in zip(split.shards, split.starts, strict=False)
        ]
        self.starts = np.concatenate([part[:-1] for part in bounds]) if bounds else np.zeros(0, dtype=np.int64)
        ends = np.concatenate([part[1:] for part in bounds]) if bounds else np.zeros(0, dtype=np.int64)
        self.lengths = ends - self.starts - 1  # without the end-of-text token
        parts = [shard.labels for shard in split.shards]
        self.labels = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)
        if (self.labels == NO_LABEL).any():
            identity = split.documents(int(self.starts[np.argmax(self.labels == NO_LABEL)]), int(ends[-1]))[0]
            raise BessemerError(
                f"{split.shards[0].path.parent}: document {identity} has no label; build the tokens again"
            )

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self, numbers: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Texts as rows of `length` tokens, padded."""
        rows = np.full((len(numbers), length), self._end_of_text, dtype=np.int64)
        for row, number in zip(rows, numbers, strict=True):
            end = min(self._offset + int(self.lengths[number]), length - self._closed)
            self._split.read(int(self.starts[number]), row[self._offset : end])
        return rows

    def identity(self, number: int) -> str:
        """Which document a text is."""
        start = int(self.starts[number])
        return self._split.documents(start, start + 1)[0]


class LabelledLoader:
    """Reads the labelled texts of a run in the run's order; a sample is one document."""

    def __init__(
        self, store: TokenStore, mixture: Mixture, sequence_length: int, rank: int = 0, world: int = 1
    ) -> None:
        self.mixture, self.sequence_length, self.rank, self.world = mixture, sequence_length, rank, world
        self._texts = [Texts(store.split(name, "train"), store.end_of_text, store.framing) for name in mixture.names]

    @classmethod
    def of(cls, recipe: Recipe, store: TokenStore, rank: int = 0, world: int = 1) -> LabelledLoader:
        """The loader of a recipe: weights from its sources, else in proportion to their documents."""
        counts = tuple(int(store.manifest["sources"][name]["train"]["documents"]) for name in store.sources)
        mixture = mixture_of(recipe, Holding(store.sources, counts, counts))
        return cls(store, mixture, recipe.tokens.sequence_length, rank, world)

    def batch(self, first: int, count: int) -> Batch:
        """The part of the global batch of samples [first, first + count) that this process takes.

        tokens: (texts, sequence_length); targets: (texts, 1) numbers of the labels.
        """
        draw = self.mixture.draw(first, count)
        mine = slice(self.rank, None, self.world)
        sources, numbers = draw.source[mine], draw.sequence[mine]
        tokens = np.empty((len(sources), self.sequence_length), dtype=np.int64)
        targets = np.empty((len(sources), 1), dtype=np.int64)
        for source in np.unique(sources):
            here = sources == source
            tokens[here] = self._texts[source].rows(numbers[here], self.sequence_length)
            targets[here, 0] = self._texts[source].labels[numbers[here]]
        return Batch(first, tokens, sources, targets)

    def documents(self, first: int, count: int) -> list[dict[str, object]]:
        """The documents that samples [first, first + count) are: sample, source, sequence and document identities."""
        draw = self.mixture.draw(first, count)
        return [
            {
                "sample": first + slot,
                "source": self.mixture.names[int(draw.source[slot])],
                "sequence": int(draw.sequence[slot]),
                "documents": [self._texts[int(draw.source[slot])].identity(int(draw.sequence[slot]))],
            }
            for slot in range(count)
        ]


def held_out_texts(store: TokenStore, sequence_length: int, max_tokens: int | None = None) -> list[HeldOut]:
    """Every source's held-out texts with their labels; with `max_tokens`, an even part of each source's."""
    splits = {name: Texts(store.split(name, "heldout"), store.end_of_text, store.framing) for name in store.sources}
    total = sequence_length * sum(map(len, splits.values()))
    share = 1.0 if max_tokens is None else min(max_tokens / max(total, 1), 1.0)
    parts = []
    for name, texts in splits.items():
        if not len(texts):
            continue
        chosen = np.unique(np.linspace(0, len(texts) - 1, max(int(len(texts) * share), 1)).astype(np.int64))
        tokens = texts.rows(chosen, sequence_length)
        valid = np.ones((len(chosen), 1), dtype=np.bool_)
        text_bytes = store.token_bytes[tokens].sum(axis=1)
        parts.append(HeldOut(name, tokens, valid, text_bytes, texts.labels[chosen][:, None]))
    return parts


def whole_texts(store: TokenStore, sequence_length: int, count: int = 2) -> npt.NDArray[np.int64]:
    """A few held-out texts without padding, (texts, tokens), all cut to the shortest of them."""
    tokens = np.concatenate([part.tokens[:count] for part in held_out_texts(store, sequence_length)])[:count]
    lengths = 1 + (tokens[:, 1:] != store.end_of_text).sum(axis=1) + len(store.framing.after[-1:])
    return tokens[:, : int(lengths.min())]
