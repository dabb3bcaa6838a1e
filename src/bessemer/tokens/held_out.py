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
        bytes: Bytes of text of the targets of each sequence, (sequences,); 0 if the tokenizer is not lossless, so that
            bits per byte are undefined. For a classifier, bytes of the inputs.
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
        """Number of targets in the loss: those that are not -1."""
        return int((self.targets >= 0).sum())


def held_out_samples(recipe: Recipe, store: TokenStore, max_tokens: int | None = None) -> list[HeldOut]:
    """Return the held-out text of every source as samples of the kind that the run trains on.

    Without `max_tokens`, every token is a target once, except the first of each source when documents are concatenated.
    End-of-text and padding have target -1 and no bytes. The targets of a classifier are the labels.

    Args:
        recipe: The recipe of the run.
        store: Its tokens.
        max_tokens: Approximate number of tokens to take, in samples evenly spread over each source (default: all).
    """
    length = recipe.tokens.sequence_length
    if recipe.train.objective != "classify" and recipe.tokens.packing == "concatenate":
        return held_out(store, length, max_tokens)
    return _parts(store, [open_samples(recipe, store, name, "heldout") for name in store.sources], length, max_tokens)


def held_out(store: TokenStore, sequence_length: int, max_tokens: int | None = None) -> list[HeldOut]:
    """Cut the concatenated held-out documents of each source into samples, the last padded with end-of-text tokens.

    With `max_tokens`, return only about as many tokens, in samples that are evenly spread over each source.
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
    """Return the ids of the first `count` held-out texts of a classifier, (texts, tokens), cut to the shortest of them."""
    tokens = np.concatenate([part.inputs[:count] for part in held_out_samples(recipe, store)])[:count]
    lengths = 1 + (tokens[:, 1:] != store.end_of_text).sum(axis=1) + len(store.framing.after[-1:])
    return tokens[:, : int(lengths.min())]


def _spread(count: int, max_tokens: int | None, total: int) -> npt.NDArray[np.int64]:
    """Return evenly spaced indices of samples of one source, which has `count` samples.

    The share of samples selected is `max_tokens / total`, where `total` is the number of tokens of all sources, so that about
    `max_tokens` tokens are selected overall. None selects all.
    """
    share = 1.0 if max_tokens is None else min(max_tokens / max(total, 1), 1.0)
    return np.unique(np.linspace(0, count - 1, max(int(count * share), 1)).astype(np.int64))
