"""Which tokens attention sees: causality, windows and documents.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer's attention computes, whatever the batch.

    causal: a token sees itself and earlier ones; window: that many tokens, itself included (causal), or half as many to
    each side (bidirectional); 0: no limit; soft_cap: scores are soft_cap * tanh(score / soft_cap) (Gemma 2, Gemma Team
    2024, section 2.4); 0: as they are; scale: scores are multiplied by it first; None: by 1 / sqrt(K).
    """

    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    scale: float | None = None

    @property
    def back(self) -> int:
        """Tokens seen before the own one, when the window limits them."""
        return self.window - 1 if self.causal else self.window // 2

    @property
    def ahead(self) -> int:
        """Tokens seen after the own one, when the window limits them."""
        return 0 if self.causal else self.window // 2

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether positions `query` see positions `key` (broadcast)."""
        allowed = query >= key if self.causal else torch.ones_like(query - key, dtype=torch.bool)
        return allowed & (query - key <= self.back) & (key - query <= self.ahead) if self.window else allowed

    def keys_of(self, start: int, end: int, length: int) -> tuple[int, int]:
        """The range of keys, of `length`, that any of the queries start, ..., end - 1 sees."""
        first = max(start - self.back, 0) if self.window else 0
        return first, min(end + self.ahead, length) if self.window or self.causal else length

    def scale_of(self, q_BHTK: Tensor) -> float:
        """What the scores of queries are multiplied by."""
        return float(q_BHTK.shape[-1] ** -0.5) if self.scale is None else self.scale


@dataclass(frozen=True)
class QueryBlock:
    """Queries of one document that are computed together.

    rows: the sequences; queries: slice of the local tokens; keys: slice of the sequence that is the document;
    first: position of the first query in the document.
    """

    rows: slice
    queries: slice
    keys: slice
    first: int = 0


@dataclass(frozen=True)
class Documents:
    """Where documents lie in a batch of packed sequences; attention stays inside them and positions start at 0.

    position_BT: position of each token within its document; document_BT: number of the document within its row, for masks
    on the device; spans: (row, start, end) of each document, in order; left out on CUDA.
    """

    position_BT: Tensor
    document_BT: Tensor
    spans: tuple[tuple[int, int, int], ...]

    @classmethod
    def from_tokens(cls, tokens_BT: Tensor, end_of_text: int) -> Documents:
        """Documents of packed sequences: each ends with its end-of-text token, the last one with the sequence."""
        starts_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        starts_BT[:, 0] = True
        starts_BT[:, 1:] = tokens_BT[:, :-1] == end_of_text
        return cls.from_starts(starts_BT)

    @classmethod
    def padded(cls, lengths_B: Tensor, length: int) -> Documents:
        """One document a row, of the given length; what pads the row up to `length` tokens is a document of its own."""
        index_T = torch.arange(length, device=lengths_B.device)
        return cls.from_starts((index_T == 0) | (index_T == lengths_B[:, None]))

    @classmethod
    def from_starts(cls, starts_BT: Tensor) -> Documents:
        """Documents that begin where `starts_BT` is true, as it is at the start of each row."""
        length = starts_BT.shape[1]
        index_T = torch.arange(length, device=starts_BT.device)
        position_BT = index_T - torch.where(starts_BT, index_T, 0).cummax(dim=1).values
        document_BT = starts_BT.cumsum(dim=1)
        if starts_BT.is_cuda:  # masks are made on the device; reading the spans back would make it wait
            return cls(position_BT, document_BT, ())
        starts = starts_BT.nonzero().tolist()
        ends = [start if row == last else length for (last, _), (row, start) in pairwise(starts)]
        spans = tuple((row, start, end) for (row, start), end in zip(starts, [*ends, length], strict=True))
        return cls(position_BT, document_BT, spans)

    @property
    def query_blocks(self) -> tuple[QueryBlock, ...]:
        """Blocks to attend one after another, in token order: a document each, or all rows at once where each is one document."""
        batch, length = self.document_BT.shape
        if len(self.spans) == batch:
            return (QueryBlock(slice(0, batch), slice(0, length), slice(0, length)),)
        spans = ((row, slice(start, end)) for row, start, end in self.spans)
        return tuple(QueryBlock(slice(row, row + 1), span, span) for row, span in spans)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, end) in the sequence of each run of local tokens, in order."""
        return ((0, self.length),)

    @property
    def length(self) -> int:
        """Tokens of a whole sequence."""
        return self.document_BT.shape[1]

    def block_mask(self, spec: AttentionSpec) -> Any:
        """FlexAttention's mask: what the spec allows within each document."""
        document_BT = self.document_BT
        batch, length = document_BT.shape

        def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return spec.allows(q, kv) & (document_BT[b, q] == document_BT[b, kv])

        return make_block_mask(within, batch, length, length, document_BT.device)


@dataclass(frozen=True)
class AttentionScope:
    """What attention sees in one batch: made once for all the layers of a forward pass that see the same.

    block_mask: FlexAttention's mask on CUDA, where a mask is needed; it skips the blocks between documents and outside
    the window.
    """

    spec: AttentionSpec
    documents: Documents | None
    block_mask: Any

    @classmethod
    def each(
        cls, specs: Collection[AttentionSpec], documents: Documents | None, length: int, device: torch.device
    ) -> dict[AttentionSpec, AttentionScope]:
        """The scopes of a batch, see `of`. Specs that differ in their scale share a mask."""
        unscaled = {spec: replace(spec, scale=None) for spec in specs}
        scopes = {plain: cls.of(plain, documents, length, device) for plain in dict.fromkeys(unscaled.values())}
        return {spec: replace(scopes[plain], spec=spec) for spec, plain in unscaled.items()}

    @classmethod
    def of(cls, spec: AttentionSpec, documents: Documents | None, length: int, device: torch.device) -> AttentionScope:
        """The scope of a batch of `length` tokens a row on `device`."""
        if device.type != "cuda" or not (documents is not None or spec.window or spec.soft_cap):
            return cls(spec, documents, None)
        if documents is not None:
            return cls(spec, documents, documents.block_mask(spec))
        return cls(spec, None, _mask_of_spec(spec, length, device))

    def allows(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """Whether these queries of the sequence see these keys: (C, N), or (B, 1, C, N) within documents."""
        index = torch.arange(max(queries.stop, keys.stop), device=device)
        allowed = self.spec.allows(index[queries, None], index[keys])
        if self.documents is None:
            return allowed
        document_BT = self.documents.document_BT
        return allowed & (document_BT[:, None, queries, None] == document_BT[:, None, None, keys])

    def chunks(self, length: int, size: int) -> Iterator[tuple[slice, int, slice]]:
        """The local queries, at most `size` at a time: their slice, the place of the first in the sequence of `length` tokens,
        and the slice of the keys that any of them sees."""
        here = 0
        for low, high in ((0, length),) if self.documents is None else self.documents.ranges:
            for start in range(low, high, size):
                end = min(start + size, high)
                yield slice(here + start - low, here + end - low), start, slice(*self.spec.keys_of(start, end, length))
            here += high - low


@lru_cache(maxsize=4)
def flex_function(name: str, device: str) -> Any:
    """Return a function of FlexAttention, compiled on CUDA: only then attention is a kernel, and a block mask made without one of
    all queries and keys. A CPU gets the slow reference."""
    from torch.nn.attention import flex_attention

    function = getattr(flex_attention, name)
    return torch.compile(function) if device == "cuda" else function


def make_block_mask(allows: Any, batch: int | None, queries: int, keys: int, device: torch.device) -> Any:
    """Return FlexAttention's mask. allows: (b, h, q, kv) to whether a query sees a key; batch: None for all rows the same."""
    return flex_function("create_block_mask", device.type)(allows, batch, None, queries, keys, device=device)


@lru_cache(maxsize=16)
def _mask_of_spec(spec: AttentionSpec, length: int, device: torch.device) -> Any:
    """Return the mask of rows without documents, which is the same in each batch."""
    return make_block_mask(lambda b, h, q, kv: spec.allows(q, kv), None, length, length, device)
