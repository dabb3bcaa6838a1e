"""Held-out samples in a fixed order, with the bytes of text of their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bessemer.recipe import Recipe
from bessemer.tokens.loader import ConcatenatedSplit, LabelledTexts, SampleSource, open_samples
from bessemer.tokens.shards import TokenStore


@dataclass(frozen=True)
class HeldOut:
    """Held-out text of one source as sequences without overlap.

    Attributes:
        source: Name of the source.
        inputs: Token ids, (sequences, sequence_length).
        targets: Token ids, (sequences, sequence_length), or classes, (sequences, 1); -1 for padding and end-of-text.
        bytes: Bytes of text of each sequence's counted targets, (sequences,); 0 where the tokens do not account for the
            text.
        starts: For packed documents, True where a segment or the padding begins, (sequences, sequence_length); else
            None.
    """

    source: str
    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    starts: npt.NDArray[np.bool_] | None = None

    @property
    def num_targets(self) -> int:
        """Number of targets that count in the loss."""
        return int((self.targets >= 0).sum())


def held_out_samples(recipe: Recipe, store: TokenStore, max_tokens: int | None = None) -> list[HeldOut]:
    """Return every source's held-out text as samples of the kind that the run trains on.

    Every token is a target once, except the first of each source when documents are concatenated. End-of-text and
    padding count neither in the loss nor in the bytes. The targets of a classifier are the labels.

    Args:
        recipe: The recipe of the run.
        store: Its tokens.
        max_tokens: Number of tokens to take, evenly spread over each source (default: all).
    """
    length = recipe.tokens.sequence_length
    if recipe.train.objective != "classify" and recipe.tokens.packing == "concatenate":
        return held_out(store, length, max_tokens)
    return _parts(store, [open_samples(recipe, store, name, "heldout") for name in store.sources], length, max_tokens)


def held_out(store: TokenStore, sequence_length: int, max_tokens: int | None = None) -> list[HeldOut]:
    """Cut the concatenated held-out documents of each source into samples, the last padded with end-of-text tokens.

    With `max_tokens`, take samples that are spread evenly over each source and have at most that many tokens in total.
    """
    splits = (store.split(name, "heldout") for name in store.sources)
    sources = [ConcatenatedSplit(split, sequence_length, store.end_of_text) for split in splits]
    return _parts(store, sources, sequence_length, max_tokens)


def _parts(store: TokenStore, sources: Sequence[SampleSource], length: int, max_tokens: int | None) -> list[HeldOut]:
    total = sum(length * len(one) if isinstance(one, LabelledTexts) else one.num_tokens for one in sources)
    parts = []
    for name, source in zip(store.sources, sources, strict=True):
        if not len(source):
            continue
        inputs, targets, starts, _ = source.rows(_spread(len(source), max_tokens, total))
        inputs, targets = inputs.astype(np.int64), targets.astype(np.int64)
        if isinstance(source, LabelledTexts):
            num_bytes = store.token_bytes[inputs]
        else:
            num_bytes = np.where(targets >= 0, store.token_bytes[targets], 0)
            targets = np.where(num_bytes > 0, targets, -1)
            # The bytes of a document's first token include the prefix that the tokenizer adds to the text.
            num_bytes -= len(store.text_prefix) * ((num_bytes > 0) & (inputs == store.end_of_text))
            num_bytes *= store.counts_bytes
        parts.append(HeldOut(name, inputs, targets, num_bytes.sum(axis=1), starts))
    return parts


def whole_texts(recipe: Recipe, store: TokenStore, count: int = 2) -> npt.NDArray[np.int64]:
    """Return a few labelled held-out texts without padding, (texts, tokens), all cut to the length of the shortest."""
    tokens = np.concatenate([part.inputs[:count] for part in held_out_samples(recipe, store)])[:count]
    lengths = 1 + (tokens[:, 1:] != store.end_of_text).sum(axis=1) + len(store.framing.after[-1:])
    return tokens[:, : int(lengths.min())]


def _spread(count: int, max_tokens: int | None, total: int) -> npt.NDArray[np.int64]:
    """Return evenly spaced indices of the `count` samples of one source.

    With this spacing in all sources, of `total` tokens, about `max_tokens` tokens are selected. None selects all.
    """
    share = 1.0 if max_tokens is None else min(max_tokens / max(total, 1), 1.0)
    return np.unique(np.linspace(0, count - 1, max(int(count * share), 1)).astype(np.int64))
