"""The tokens that attention sees: causality, windows and documents.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """The part of a layer's attention that does not depend on the batch.

    Attributes:
        causal: True if a token sees only itself and earlier tokens.
        window: Number of tokens seen, including the token itself (causal), or half of it on each side (bidirectional); 0
            for no limit.
        soft_cap: Replaces scores by soft_cap * tanh(score / soft_cap) (Gemma 2, Gemma Team 2024, section 2.4); 0 for none.
        scale: Factor on the scores, applied first; None for 1 / sqrt(K).
    """

    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    scale: float | None = None

    @property
    def back(self) -> int:
        """Number of tokens seen before the token itself, if there is a window."""
        return self.window - 1 if self.causal else self.window // 2

    @property
    def ahead(self) -> int:
        """Number of tokens seen after the token itself, if there is a window."""
        return 0 if self.causal else self.window // 2

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Return True where positions `query` see positions `key`; the two tensors broadcast."""
        allowed = query >= key if self.causal else torch.ones_like(query - key, dtype=torch.bool)
        return allowed & (query - key <= self.back) & (key - query <= self.ahead) if self.window else allowed

    def keys_of(self, start: int, end: int, length: int) -> tuple[int, int]:
        """Return the range [first, end) of the `length` keys that any of the queries start, ..., end - 1 sees."""
        first = max(start - self.back, 0) if self.window else 0
        return first, min(end + self.ahead, length) if self.window or self.causal else length

    def scale_of(self, q_BHTK: Tensor) -> float:
        """Return the factor on the attention scores of these queries."""
        return float(q_BHTK.shape[-1] ** -0.5) if self.scale is None else self.scale


@dataclass(frozen=True)
class QueryBlock:
    """Queries of one document that are computed together, over the keys and values of that document.

    Attributes:
        rows: Slice of the sequences of the batch that have this block: one, or all if each sequence is one document.
        queries: Slice of the queries among the tokens on this context-parallel rank.
        keys: Slice of the document within its sequence.
        first: Position of the first query in the document.
    """

    rows: slice
    queries: slice
    keys: slice
    first: int = 0


@dataclass(frozen=True)
class Documents:
    """The documents in a batch of packed sequences; attention stays inside them and their positions start at 0.

    Attributes:
        position_BT: Position of each token within its document.
        document_BT: Number of the document within its row, for masks on the device.
        spans: (row, start, end) of each document, in order; empty on CUDA.
    """

    position_BT: Tensor
    document_BT: Tensor
    spans: tuple[tuple[int, int, int], ...]

    @classmethod
    def from_tokens(cls, tokens_BT: Tensor, end_of_text: int) -> Documents:
        """Build from packed sequences whose documents end with an end-of-text token or with the sequence."""
        starts_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        starts_BT[:, 0] = True
        starts_BT[:, 1:] = tokens_BT[:, :-1] == end_of_text
        return cls.from_starts(starts_BT)

    @classmethod
    def padded(cls, lengths_B: Tensor, length: int) -> Documents:
        """Build with one document of the given length per row; the padding up to `length` tokens is a separate document."""
        index_T = torch.arange(length, device=lengths_B.device)
        return cls.from_starts((index_T == 0) | (index_T == lengths_B[:, None]))

    @classmethod
    def from_starts(cls, starts_BT: Tensor) -> Documents:
        """Build with documents that start where `starts_BT` is True, which it must be at the start of each row."""
        length = starts_BT.shape[1]
        index_T = torch.arange(length, device=starts_BT.device)
        position_BT = index_T - torch.where(starts_BT, index_T, 0).cummax(dim=1).values
        document_BT = starts_BT.cumsum(dim=1)
        if starts_BT.is_cuda:  # masks are built on the device, and reading the spans back would synchronise with it
            return cls(position_BT, document_BT, ())
        starts = starts_BT.nonzero().tolist()
        ends = [start if row == last else length for (last, _), (row, start) in pairwise(starts)]
        spans = tuple((row, start, end) for (row, start), end in zip(starts, [*ends, length], strict=True))
        return cls(position_BT, document_BT, spans)

    @property
    def query_blocks(self) -> tuple[QueryBlock, ...]:
        """The blocks of queries in token order: one document each, or all rows at once if each row is one document."""
        batch, length = self.document_BT.shape
        if len(self.spans) == batch:
            return (QueryBlock(slice(0, batch), slice(0, length), slice(0, length)),)
        spans = ((row, slice(start, end)) for row, start, end in self.spans)
        return tuple(QueryBlock(slice(row, row + 1), span, span) for row, span in spans)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The (start, end) of each contiguous range of the sequence that this rank holds; without context parallelism, one."""
        return ((0, self.length),)

    @property
    def length(self) -> int:
        """Number of tokens in a full sequence."""
        return self.document_BT.shape[1]

    def block_mask(self, spec: AttentionSpec) -> Any:
        """Return FlexAttention's mask: the keys that the spec allows within each document."""
        document_BT = self.document_BT
        batch, length = document_BT.shape

        def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return spec.allows(q, kv) & (document_BT[b, q] == document_BT[b, kv])

        return make_block_mask(within, batch, length, length, document_BT.device)


@dataclass(frozen=True)
class AttentionScope:
    """The tokens that attention sees in one batch, shared by all layers of a forward pass with the same spec.

    Attributes:
        spec: The part that does not depend on the batch.
        documents: The documents of the batch; None if each sequence is one document.
        block_mask: FlexAttention's mask on CUDA if a mask is needed; it skips the blocks between documents and outside the
            window.
    """

    spec: AttentionSpec
    documents: Documents | None
    block_mask: Any

    @classmethod
    def build(cls, spec: AttentionSpec, documents: Documents | None, length: int, device: torch.device) -> Self:
        """Return the scope of a batch with `length` tokens per row on `device`."""
        if device.type != "cuda" or not (documents is not None or spec.window or spec.soft_cap):
            return cls(spec, documents, None)
        if documents is not None:
            return cls(spec, documents, documents.block_mask(spec))
        return cls(spec, None, _mask_of_spec(spec, length, device))

    def allows(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """Return a bool mask that is True where these queries of the sequence see these keys.

        Its shape is (C, N), or (B, 1, C, N) with several documents per sequence, for C queries and N keys.
        """
        index = torch.arange(max(queries.stop, keys.stop), device=device)
        allowed = self.spec.allows(index[queries, None], index[keys])
        if self.documents is None:
            return allowed
        document_BT = self.documents.document_BT
        return allowed & (document_BT[:, None, queries, None] == document_BT[:, None, None, keys])

    def chunks(self, length: int, size: int) -> Iterator[tuple[slice, int, slice]]:
        """Yield this rank's queries in chunks of at most `size`, with the keys that any of them sees.

        Each item is (slice of the queries among the tokens on this context-parallel rank, position of the first query
        in the sequence of `length` tokens, slice of the keys in the sequence).
        """
        done = 0
        for low, high in ((0, length),) if self.documents is None else self.documents.ranges:
            for start in range(low, high, size):
                end = min(start + size, high)
                yield slice(done + start - low, done + end - low), start, slice(*self.spec.keys_of(start, end, length))
            done += high - low


@lru_cache(maxsize=4)
def flex_function(name: str, device: str) -> Any:
    """Return a function of torch.nn.attention.flex_attention by name, compiled on CUDA and uncompiled (slow) on a CPU.

    Compilation is needed on CUDA: without it FlexAttention computes all scores instead of using a fused kernel, and
    building a block mask allocates a tensor of all queries x keys.
    """
    from torch.nn.attention import flex_attention

    function = getattr(flex_attention, name)
    return torch.compile(function) if device == "cuda" else function


def make_block_mask(allows: Any, batch: int | None, queries: int, keys: int, device: torch.device) -> Any:
    """Return FlexAttention's BlockMask for this number of queries and keys.

    `allows` maps (b, h, q, kv) to True where a query sees a key. A `batch` of None uses the same mask for all rows.
    """
    return flex_function("create_block_mask", device.type)(allows, batch, None, queries, keys, device=device)


@lru_cache(maxsize=16)
def _mask_of_spec(spec: AttentionSpec, length: int, device: torch.device) -> Any:
    """Return the BlockMask of rows of `length` tokens without documents, which is the same in each batch."""
    return make_block_mask(lambda b, h, q, kv: spec.allows(q, kv), None, length, length, device)
