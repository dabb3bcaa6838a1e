"""Batches for training: the batch at any point of the run is a pure function of (seed, samples consumed).

Nothing here has state that a checkpoint would have to keep: after a stop the trainer asks for the batch at the
number of samples it had consumed, and gets the one it would have got.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bessemer.errors import InputError
from bessemer.recipe import Recipe
from bessemer.tokens.mixture import Draw, Mixture
from bessemer.tokens.phases import Holding, mixture_of
from bessemer.tokens.shards import Split, TokenStore


@dataclass(frozen=True)
class Batch:
    """This process's part of one global batch.

    first: number of the first sample of the global batch; tokens: (sequences, sequence_length + 1) ids, inputs and
    targets being all but the last and all but the first; source: (sequences,) number of each sequence's source.
    targets: where they are something else than the next token, (sequences, targets), -1 where there is none; tokens
    are then the inputs alone, (sequences, sequence_length).
    starts: for packed documents, (sequences, sequence_length) whether a piece of one, or the padding, begins there; real:
    (sequences,) positions that are no padding. None: documents end where their end-of-text tokens are, nothing is padded.
    """

    first: int
    tokens: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64] | None = None
    starts: npt.NDArray[np.bool_] | None = None
    real: npt.NDArray[np.int64] | None = None

    @property
    def inputs(self) -> npt.NDArray[np.int64]:
        """(sequences, sequence_length) ids that the model reads."""
        return self.tokens if self.targets is not None else self.tokens[:, :-1]

    def samples(self, rank: int, world: int) -> npt.NDArray[np.int64]:
        """(sequences,) number of each sequence in the run's order, for the part `rank` of `world`."""
        return self.first + rank + world * np.arange(len(self.tokens), dtype=np.int64)

    @property
    def wanted(self) -> npt.NDArray[np.int64]:
        """What it should predict: (sequences, sequence_length), or (sequences, 1) for a class."""
        return self.targets if self.targets is not None else self.tokens[:, 1:]


class Reader(Protocol):
    """What gives the batches of a run. rank, world: the part of each that it gives, see Loader."""

    mixture: Mixture
    rank: int
    world: int

    def batch(self, first: int, count: int) -> Batch:
        """This process's part of the global batch of samples [first, first + count)."""
        ...

    def documents(self, first: int, count: int) -> list[dict[str, object]]:
        """The documents that samples [first, first + count) hold."""
        ...


class Loader:
    """Reads the training sequences of a run in the run's order.

    rank, world: this process takes the slots rank, rank + world, ... of each global batch, so the samples of a
    batch do not depend on how many processes share it.
    """

    def __init__(
        self, store: TokenStore, mixture: Mixture, sequence_length: int, rank: int = 0, world: int = 1
    ) -> None:
        self.mixture, self.sequence_length, self.rank, self.world = mixture, sequence_length, rank, world
        self._splits: list[Split] = [store.split(name, "train") for name in mixture.names]

    @classmethod
    def of(cls, recipe: Recipe, store: TokenStore, rank: int = 0, world: int = 1) -> Loader:
        """The loader of a recipe: weights from its sources, else in proportion to their tokens."""
        length = recipe.tokens.sequence_length
        sequences = tuple(store.split(name, "train").num_sequences(length) for name in store.sources)
        for name, count in zip(store.sources, sequences, strict=True):
            if count == 0:
                raise InputError(f"tokens.sequence_length: {length} is longer than all the text of source {name!r}")
        held = Holding(store.sources, sequences, tuple(count * length for count in sequences))
        return cls(store, mixture_of(recipe, held), length, rank, world)

    def batch(self, first: int, count: int) -> Batch:
        """The part of the global batch of samples [first, first + count) that this process takes."""
        draw = self.mixture.draw(first, count)
        mine = slice(self.rank, None, self.world)
        sources, sequences = draw.source[mine], draw.sequence[mine]
        tokens = np.empty((len(sources), self.sequence_length + 1), dtype=np.int64)
        for number, split in enumerate(self._splits):
            rows = np.flatnonzero(sources == number)
            if len(rows):
                tokens[rows] = split.sequences(sequences[rows], self.sequence_length)
        return Batch(first, tokens, sources)

    def documents(self, first: int, count: int) -> list[dict[str, object]]:
        """The documents that samples [first, first + count) hold: sample, source, sequence and document identities."""
        draw: Draw = self.mixture.draw(first, count)
        length = self.sequence_length
        rows: list[dict[str, object]] = []
        for slot in range(count):
            source, sequence = int(draw.source[slot]), int(draw.sequence[slot])
            identities = self._splits[source].documents(sequence * length, (sequence + 1) * length + 1)
            rows.append(
                {
                    "sample": first + slot,
                    "source": self.mixture.names[source],
                    "sequence": sequence,
                    "documents": identities,
                }
            )
        return rows


def prefetched(loader: Reader, first: int, counts: Iterable[int], depth: int = 4) -> Iterator[Batch]:
    """The next global batches from sample `first` on, read ahead by a thread. counts: the samples of each, in order.

    An error in the thread is raised where the batch is asked for. Closing the iterator ends the thread.
    """
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not closed.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue
        return None

    def read() -> None:
        try:
            start = first
            for count in counts:
                if closed.is_set():
                    return
                put(loader.batch(start, count))
                start += count
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=read, name="loader", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()
