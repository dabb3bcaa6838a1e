"""The held-out sequences, in a fixed order, and how many bytes of text each target stands for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bessemer.tokens.shards import TokenStore


@dataclass(frozen=True)
class HeldOut:
    """Held-out text of one source as sequences without overlap.

    tokens: (sequences, sequence_length + 1) ids; valid: (sequences, sequence_length) whether a target counts: real
    text, not padding and not an end-of-text token; bytes: (sequences,) bytes of text of the targets that count, 0 where
    the tokenizer's tokens do not account for the text.
    targets: where they are something else than the next token; tokens are then the inputs alone. starts: for packed
    documents, (sequences, sequence_length) whether a piece of one, or the padding, begins there.
    """

    source: str
    tokens: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]
    bytes: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64] | None = None
    starts: npt.NDArray[np.bool_] | None = None

    @property
    def inputs(self) -> npt.NDArray[np.int64]:
        """(sequences, sequence_length) ids that the model reads."""
        return self.tokens if self.targets is not None else self.tokens[:, :-1]

    @property
    def wanted(self) -> npt.NDArray[np.int64]:
        """What it should predict, -1 where nothing counts."""
        wanted = self.targets if self.targets is not None else self.tokens[:, 1:]
        return np.where(self.valid, wanted, -1)


def held_out(store: TokenStore, sequence_length: int, max_tokens: int | None = None) -> list[HeldOut]:
    """Every source's held-out sequences; with `max_tokens`, an even part of each, so that all sources are seen.

    Every token but the first of a source is a target once. The last sequence is padded with end-of-text tokens,
    which count neither as loss nor as bytes.
    """
    splits = {name: store.split(name, "heldout") for name in store.sources}
    total = sum(split.num_tokens for split in splits.values())
    share = 1.0 if max_tokens is None else min(max_tokens / max(total, 1), 1.0)
    token_bytes, prefix, parts = store.token_bytes, len(store.text_prefix), []
    for name, split in splits.items():
        if split.num_tokens < 2:
            continue
        count = -(-(split.num_tokens - 1) // sequence_length)
        chosen = np.unique(np.linspace(0, count - 1, max(int(count * share), 1)).astype(np.int64))
        tokens = np.full((len(chosen), sequence_length + 1), store.end_of_text, dtype=np.int64)
        for row, sequence in enumerate(chosen):
            start = int(sequence) * sequence_length
            split.read(start, tokens[row, : min(sequence_length + 1, split.num_tokens - start)])
        target_bytes = token_bytes[tokens[:, 1:]]
        valid = target_bytes > 0
        if prefix:  # which a document's first token stands for beside its text
            target_bytes = target_bytes - prefix * (valid & (tokens[:, :-1] == store.end_of_text))
        text_bytes = target_bytes.sum(axis=1) * store.counts_bytes
        parts.append(HeldOut(name, tokens, valid, text_bytes))
    return parts
