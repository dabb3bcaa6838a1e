"""Training batches: a batch is a pure function of the recipe, the tokens and the sample number.

The loader therefore has no state to checkpoint. Depending on the recipe, a sample is a sequence of the concatenated
documents, a packed sequence (`packing`), or a labelled document for a classifier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bessemer.common.errors import BessemerError, InputError
from bessemer.recipe import Recipe
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.packing import Ints, Pack, open_pack
from bessemer.tokens.phases import SourceSizes, mixture_of
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.shards.shard import NO_LABEL, SplitTokens
from bessemer.tokens.tokenizer.description import Framing

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class IgnoredSegment:
    """A segment, the part of a document in one sequence, that the degenerate-text gate excluded from the loss.

    Attributes:
        row: Row in the batch.
        segment: Index of the segment in the sequence, from 0.
        tokens: Number of excluded targets.
        reason: Why they were excluded, one of `degenerate_text.REASONS`.
    """

    row: int
    segment: int
    tokens: int
    reason: str


@dataclass(frozen=True)
class Batch:
    """One data-parallel rank's part of a global batch.

    Attributes:
        first: Number of the first sample of the global batch in the run's order of samples.
        inputs: Token ids that the model reads, (sequences, sequence_length).
        targets: Token ids to predict, (sequences, sequence_length), or classes, (sequences, 1); -1 where there is none.
        source: Index of each sequence's source in the mixture, (sequences,).
        starts: For packed documents, True where a document's part or the padding begins, (sequences, sequence_length).
            None: documents end at their end-of-text tokens.
        real_lengths: Number of positions that are not padding, (sequences,). None: nothing is padded.
        ignored: Segments that the degenerate-text gate excluded from the loss.
        rank: Data-parallel rank that reads this part.
        world: Number of data-parallel ranks.
    """

    first: int
    inputs: Ints
    targets: Ints
    source: Ints
    starts: Bools | None = None
    real_lengths: Ints | None = None
    ignored: tuple[IgnoredSegment, ...] = ()
    rank: int = 0
    world: int = 1

    @classmethod
    def next_token(cls, first: int, tokens: Ints, source: Ints) -> Batch:
        """Return a batch for next-token prediction from `tokens`, (sequences, sequence_length + 1); other arguments: `Batch`."""
        return cls(first, tokens[:, :-1], tokens[:, 1:], source)

    @property
    def samples(self) -> Ints:
        """Number of each sequence in the run's order of samples, (sequences,)."""
        return self.first + self.rank + self.world * np.arange(len(self.inputs), dtype=np.int64)

    def row(self, number: int) -> Batch:
        """Return sequence `number` as a batch of one sequence. The batch must be the whole global batch."""
        return replace(self.part(number, len(self.inputs)), first=self.first + number, ignored=(), rank=0, world=1)

    def part(self, rank: int, world: int) -> Batch:
        """Return the part that data-parallel rank `rank` of `world` reads. The batch must be the whole global batch."""
        fields = {name: field for name, field in vars(self).items() if isinstance(field, np.ndarray)}
        rows: dict[str, Any] = {name: field[rank::world] for name, field in fields.items()}
        return replace(self, rank=rank, world=world, **rows)


class SampleRows(NamedTuple):
    """Samples of one source. The fields have the meaning and shapes of those of `Batch`."""

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[Any]
    starts: Bools | None = None
    real_lengths: Ints | None = None


class ConcatenatedSplit:
    """The samples of a split whose documents are concatenated and cut into sequences of `length` inputs.

    Targets are the next tokens, so the last target of a sequence is the first input of the next one. With `padding`, a token
    id, the last sequence is padded with it; without, an incomplete last sequence is left out.
    """

    def __init__(self, split: SplitTokens, length: int, padding: int | None = None) -> None:
        self.split, self.length, self._padding = split, length, padding
        self._count = split.num_sequences(length, padding is not None)
        self.num_tokens = self._count * length if padding is None else split.num_tokens

    def __len__(self) -> int:
        return self._count

    def rows(self, numbers: Ints) -> SampleRows:
        """Return the samples with these numbers as arrays with one row each."""
        tokens = self.split.sequences(numbers, self.length, self._padding or 0)
        return SampleRows(tokens[:, :-1], tokens[:, 1:])

    def documents(self, number: int) -> list[tuple[str, int]]:
        """Return the identity of each document in sample `number`, and the position in the sample where it begins."""
        start, end = number * self.length, (number + 1) * self.length + 1
        return [(identity, max(offset - start, 0)) for identity, offset in self.split.documents(start, end)]

    def samples_in(self, start: int, end: int) -> Ints:
        # A sequence also predicts the first token of the next one, so a document's first token may be a target of the
        # previous sequence.
        """Return the numbers of the samples that contain a token of [start, end) of the split's concatenated documents."""
        return np.arange(max(start - 1, 0) // self.length, min((end - 1) // self.length, len(self) - 1) + 1)


class PackedSplit:
    """The samples of a split whose documents are packed: sequences of whole documents wherever they fit, and padding.

    A segment, the part of a document in one sequence, of n tokens takes n positions. Its targets are its tokens; its inputs
    are the preceding token (end-of-text at the start of a document) and all of its tokens except the last. So every token
    of every document is a target once per epoch. Padding has end-of-text tokens as inputs and no targets (-1). Tokens of a
    conversation that are not the assistant's have no targets either.
    """

    def __init__(self, split: SplitTokens, pack: Pack, end_of_text: int) -> None:
        self.split, self.pack, self._end_of_text = split, pack, end_of_text
        self.num_tokens = split.num_tokens
        self._is_masked = any(shard.is_trained is not None for shard in split.shards)

    def __len__(self) -> int:
        return len(self.pack)

    def rows(self, numbers: Ints) -> SampleRows:
        """Return the samples with these numbers as arrays with one row each."""
        shape = (len(numbers), self.pack.length)
        inputs = np.full(shape, self._end_of_text, dtype=np.int64)
        targets = np.full(shape, -1, dtype=np.int64)
        starts, real = np.zeros(shape, dtype=np.bool_), np.zeros(len(numbers), dtype=np.int64)
        for row, number in enumerate(numbers.tolist()):
            column = 0
            for start, size in zip(*(part.tolist() for part in self._segments(number)), strict=True):
                here = slice(column, column + size)
                tokens = np.full(size + 1, self._end_of_text, dtype=np.int64)
                self.split.read(max(start - 1, 0), tokens[start == 0 :])
                inputs[row, here], targets[row, here], starts[row, column] = tokens[:-1], tokens[1:], True
                if self._is_masked:
                    is_trained = np.empty(size, dtype=np.bool_)
                    self.split.read(start, is_trained, "is_trained")
                    targets[row, here][~is_trained] = -1
                column += size
            starts[row, column : column + 1], real[row] = True, column
        return SampleRows(inputs, targets, starts, real)

    def _segments(self, number: int) -> tuple[Ints, Ints]:
        """Return the start of each segment of sequence `number` in the concatenated documents, and its size, in tokens."""
        segments = slice(int(self.pack.first[number]), int(self.pack.first[number + 1]))
        return self.pack.starts[segments], self.pack.sizes[segments].astype(np.int64)

    def documents(self, number: int) -> list[tuple[str, int]]:
        """Return the identity of each document in sample `number`, and the position in the sample where it begins."""
        starts, sizes = self._segments(number)
        rows = zip(starts.tolist(), (starts + sizes).tolist(), (np.cumsum(sizes) - sizes).tolist(), strict=True)
        return [(name, offset) for start, end, offset in rows for name, _ in self.split.documents(start, end)]

    def samples_in(self, start: int, end: int) -> Ints:
        """Return the numbers of the samples that contain a token of [start, end) of the split's concatenated documents."""
        return self.pack.samples_in(start, end)


class LabelledTexts:
    """The samples of a classifier: labelled documents of one source and split, each cut or padded to `length` tokens.

    Each has the ids of `framing` around the text, or end-of-text before it if `framing` is None. The padding is end-of-text,
    which texts do not contain, so a text ends at the first end-of-text after its first token.
    """

    def __init__(self, split: SplitTokens, length: int, end_of_text: int, framing: Framing | None = None) -> None:
        self._split, self._length, self._end_of_text = split, length, end_of_text
        around = framing or Framing((end_of_text,))
        self._offset, self._closed = int(around.before == (end_of_text,)), int(around.after[-1:] == (end_of_text,))
        self.starts, sizes = split.document_spans()
        self.num_tokens = len(sizes)
        self.lengths = sizes - 1  # without the end-of-text token
        none = np.zeros(0, dtype=np.int64)
        self.labels = np.concatenate([none, *(shard.labels for shard in split.shards)])
        if (self.labels == NO_LABEL).any():
            identity, _ = self.documents(int(np.argmax(self.labels == NO_LABEL)))[0]
            raise BessemerError(f"{split.shards[0].path.parent}: document {identity} has no label; build tokens again")

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self, numbers: Ints) -> SampleRows:
        """Return the samples with these numbers as arrays with one row each."""
        tokens = np.full((len(numbers), self._length), self._end_of_text, dtype=np.int64)
        for row, number in zip(tokens, numbers, strict=True):
            end = min(self._offset + int(self.lengths[number]), self._length - self._closed)
            self._split.read(int(self.starts[number]), row[self._offset : end])
        return SampleRows(tokens, self.labels[numbers, None])

    def documents(self, number: int) -> list[tuple[str, int]]:
        """Return the identity of the document of sample `number`, and the position where it begins, 0."""
        start = int(self.starts[number])
        return [(identity, 0) for identity, _ in self._split.documents(start, start + 1)]

    def samples_in(self, start: int, end: int) -> Ints:
        """Return the number of the sample whose document starts at token `start` of the split's concatenated documents."""
        return np.searchsorted(self.starts, [start])


# The samples of one source and split, by number. Their `num_tokens` counts tokens without padding; a labelled text counts as
# one token.
SampleSource = ConcatenatedSplit | PackedSplit | LabelledTexts


class Loader:
    """A reader of a run's samples in the run's order.

    Rank r of `world` reads the samples r, r + world, ... of each global batch, so the samples of a global batch do not depend
    on the number of processes.

    Args:
        sources: Samples of each source, in the mixture's order.
        mixture: The mixture, which maps each sample of the run to a source and a sequence of it.
        rank: Data-parallel rank of this process.
        world: Number of data-parallel ranks.
        transforms: Functions applied to each batch in turn.
    """

    def __init__(
        self, sources: list[SampleSource], mixture: Mixture, rank: int = 0, world: int = 1,
        transforms: tuple[Callable[[Batch], Batch], ...] = (),
    ) -> None:  # fmt: skip
        self.sources, self.mixture, self.rank, self.world, self.transforms = sources, mixture, rank, world, transforms

    def batch(self, first: int, count: int) -> Batch:
        """Return this rank's part of the global batch of samples [first, first + count) in the run's order."""
        draw = self.mixture.draw(first, count)
        mine = slice(self.rank, None, self.world)
        sources, samples = draw.source[mine], draw.sequence[mine]
        fields: dict[str, Any] = {}
        for number in np.unique(sources).tolist() or [0]:
            here = np.flatnonzero(sources == number)
            rows = self.sources[number].rows(samples[here])._asdict()
            for name, part in ((name, part) for name, part in rows.items() if part is not None):
                if name not in fields:
                    dtype = np.bool_ if part.dtype == np.bool_ else np.int64
                    fields[name] = np.empty((len(sources), *part.shape[1:]), dtype)
                fields[name][here] = part
        batch = Batch(first, source=sources, rank=self.rank, world=self.world, **fields)
        for transform in self.transforms:
            batch = transform(batch)
        return batch

    def documents(self, first: int, count: int) -> list[dict[str, Any]]:
        """Describe samples [first, first + count) in the run's order, for all ranks.

        Returns:
            A dictionary per sample: its number (`sample`), `source`, `sequence` within the source, identities of its
                `documents`, and the `offsets` at which they begin in it.
        """
        draw, rows = self.mixture.draw(first, count), list[dict[str, Any]]()
        for slot, (source, sequence) in enumerate(zip(draw.source.tolist(), draw.sequence.tolist(), strict=True)):
            names, offsets = zip(*self.sources[source].documents(sequence), strict=True)
            row = {"sample": first + slot, "source": self.mixture.names[source], "sequence": sequence}
            rows.append({**row, "documents": list(names), "offsets": list(offsets)})
        return rows


def open_samples(recipe: Recipe, store: TokenStore, name: str, split: str) -> SampleSource:
    """Open the samples of one source and split that a recipe trains on or scores.

    Args:
        recipe: The recipe, which determines the kind of samples.
        store: The tokens.
        name: Name of the source.
        split: "train" or "heldout".
    """
    stored, length = store.split(name, split), recipe.tokens.sequence_length
    if recipe.train.objective == "classify":
        return LabelledTexts(stored, length, store.end_of_text, store.framing)
    if recipe.tokens.packing == "concatenate":
        return ConcatenatedSplit(stored, length)
    return PackedSplit(stored, open_pack(store, recipe, name, split), store.end_of_text)


def open_loader(
    recipe: Recipe, store: TokenStore, rank: int = 0, world: int = 1, transforms: tuple[Callable[[Batch], Batch], ...] = ()
) -> Loader:  # fmt: skip
    """Open the training samples of a recipe, mixed by the weights of its sources, or by their sizes without weights.

    Args:
        recipe: The recipe.
        store: The tokens.
        rank: Data-parallel rank of this process.
        world: Number of data-parallel ranks.
        transforms: Functions applied to each batch in turn.

    Raises:
        InputError: When a source has no sequence to train on.
    """
    sources: list[SampleSource] = []
    for name in store.sources:
        source = open_samples(recipe, store, name, "train")
        if not len(source) and not isinstance(source, LabelledTexts):
            raise InputError(f"tokens.sequence_length: {name!r} is shorter than one sequence; add text or shorten it")
        sources.append(source)
    sizes = SourceSizes(store.sources, tuple(map(len, sources)), tuple(source.num_tokens for source in sources))
    return Loader(sources, mixture_of(recipe, sizes), rank, world, transforms)


def prefetch(loader: Loader, spans: Iterable[tuple[int, int]], depth: int = 4) -> Iterator[Batch]:
    """Yield this rank's parts of global batches, which a thread reads ahead.

    An error of the thread is raised when the batch that caused it is due. Closing the iterator ends the thread.

    Args:
        loader: The loader.
        spans: First sample and number of samples of each global batch, in order.
        depth: Number of batches to read ahead.
    """
    ahead: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(1, "loader") as thread:
        try:
            for first, count in spans:
                ahead.append(thread.submit(loader.batch, first, count))
                if len(ahead) > depth:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for batch in ahead:
                batch.cancel()
