"""Attention: one interface over the kernels that are fast on each device. None holds a T x T matrix.

Shapes: B sequences, H query heads, G key/value heads, T tokens, K width of a head; C queries of a chunk, N keys of a chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bessemer.model.config import ModelConfig, dropping_chunk
from bessemer.model.dropout import DropoutMasks
from bessemer.model.kernels import runs_bf16, upcast

SOFT_CAP_CHUNK = 128  # queries whose scores are in memory at one time where no fused kernel knows soft caps
OFFSET_CHUNK = 256  # queries under one mask where some keys come before the first of them: fastest of 64 to 2,048
MAX_LOGITS = 1 << 25  # scores measured at a time, if 16 queries fit: 128 MiB
LOGIT_CHUNK = 64  # queries on a CPU, whose cache then holds their scores: twice as fast as 256


# Recompute a part of the forward pass in the backward pass. A model draws no random numbers (dropout's masks are a function of
# keys), so no generator state is saved.
recompute: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


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
        from torch.nn.attention.flex_attention import create_block_mask

        document_BT = self.document_BT
        batch, length = document_BT.shape

        def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return spec.allows(q, kv) & (document_BT[b, q] == document_BT[b, kv])

        return create_block_mask(within, batch, None, length, length, device=document_BT.device)


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
        from torch.nn.attention.flex_attention import create_block_mask

        mask = create_block_mask(lambda b, h, q, kv: spec.allows(q, kv), None, None, length, length, device=device)
        return cls(spec, None, mask)

    def chunks(self, length: int, size: int) -> Iterator[tuple[slice, int, slice]]:
        """The local queries, at most `size` at a time: their slice, the place of the first in the sequence of `length` tokens,
        and the slice of the keys that any of them sees."""
        here = 0
        for low, high in ((0, length),) if self.documents is None else self.documents.ranges:
            for start in range(low, high, size):
                end = min(start + size, high)
                yield slice(here + start - low, here + end - low), start, slice(*self.spec.keys_of(start, end, length))
            here += high - low


def attention(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: AttentionScope, masks: DropoutMasks | None = None
) -> Tensor:
    """Softmax attention within each document, over what the scope's spec allows. Returns (B, H, T, K).

    The scope's documents may say that the queries are only some of a sequence's tokens; keys and values are of all.
    masks: which attention weights are dropped.
    """
    if masks is not None and masks.rates.attention:
        return _with_dropout(q_BHTK, k_BGTK, v_BGTK, scope, masks)
    if scope.block_mask is not None:
        return _flex(q_BHTK, k_BGTK, v_BGTK, scope)
    if scope.documents is not None:
        return _per_document(q_BHTK, k_BGTK, v_BGTK, scope)
    return _one_document(q_BHTK, k_BGTK, v_BGTK, scope.spec)


def cached_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of new tokens over all cached keys, for generation: the queries are the last tokens of the sequence."""
    new, length = q_BHTK.shape[2], k_BGTK.shape[2]
    if new == length:
        return _one_document(q_BHTK, k_BGTK, v_BGTK, spec)
    index = torch.arange(length, device=q_BHTK.device)
    return _masked(q_BHTK, k_BGTK, v_BGTK, spec.allows(index[length - new :, None], index), spec)


def _per_document(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: AttentionScope) -> Tensor:
    """One fused call a document: on a CPU four times as fast as a boolean mask, and the only way with a backward.

    `leave_out_of_compilation`: compiled blocks would be compiled anew for each batch's documents.
    """
    assert scope.documents is not None
    blocks = scope.documents.query_blocks
    parts = [
        _one_document(
            q_BHTK[block.rows, :, block.queries], k_BGTK[block.rows, :, block.keys], v_BGTK[block.rows, :, block.keys],
            scope.spec, block.first, is_part=len(blocks) > 1,
        )
        for block in blocks
    ]  # fmt: skip
    batch, heads, length, head_dim = q_BHTK.shape
    if len(parts[0]) == batch:
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
    joined = torch.cat([part[0] for part in parts], dim=1)
    return joined.view(heads, batch, length, head_dim).transpose(0, 1)


def leave_out_of_compilation() -> None:
    """Before blocks are compiled. As a decorator it would load the compiler, half a second, wherever the model is imported."""
    global _per_document
    _per_document = torch.compiler.disable(_per_document)  # type: ignore[no-untyped-call]


def _one_document(
    q_BHCK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, spec: AttentionSpec, first: int = 0, *, is_part: bool = False
) -> Tensor:
    """Attention of queries at first, first + 1, ... over the keys of one document, which are at 0, 1, ...; is_part: of several,
    of any length."""
    count, length = q_BHCK.shape[2], k_BGTK.shape[2]
    if spec.causal and first + count < length:
        length = first + count
        k_BGTK, v_BGTK = k_BGTK[:, :, :length], v_BGTK[:, :, :length]
    narrow = spec.window > 0 and max(spec.back, spec.ahead) < length - 1
    if not narrow and not spec.soft_cap and (first == 0 or not spec.causal):
        if q_BHCK.requires_grad and runs_bf16(q_BHCK, k_BGTK, v_BGTK):
            from bessemer.model.bf16 import NarrowAttention

            if is_part or count in NarrowAttention.LENGTHS:
                return NarrowAttention.apply(q_BHCK, k_BGTK, v_BGTK, spec.causal, spec.scale)  # type: ignore[no-any-return, no-untyped-call]
        return F.scaled_dot_product_attention(
            q_BHCK, k_BGTK, v_BGTK, is_causal=spec.causal, scale=spec.scale,
            enable_gqa=q_BHCK.shape[1] != k_BGTK.shape[1],
        )  # fmt: skip
    chunk = SOFT_CAP_CHUNK if spec.soft_cap or narrow else OFFSET_CHUNK
    if narrow:
        chunk = max(spec.window, chunk)
    chunks = enumerate(torch.split(q_BHCK, chunk, dim=2))
    return torch.cat([_chunk(q, k_BGTK, v_BGTK, spec, first + number * chunk) for number, q in chunks], dim=2)


def _chunk(q_BHCK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, spec: AttentionSpec, start: int) -> Tensor:
    """Attention of the queries at start, start + 1, ... over the keys that any of them may see."""
    end, length = start + q_BHCK.shape[2], k_BGTK.shape[2]
    first, last = spec.keys_of(start, end, length)
    index = torch.arange(length, device=q_BHCK.device)
    allowed_CN = spec.allows(index[start:end, None], index[first:last])
    return _masked(q_BHCK, k_BGTK[:, :, first:last], v_BGTK[:, :, first:last], allowed_CN, spec)


def _masked(q_BHCK: Tensor, k_BGNK: Tensor, v_BGNK: Tensor, allowed_CN: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention under a mask. With a soft cap the scores are recomputed in the backward pass, never kept."""
    if not spec.soft_cap:
        return F.scaled_dot_product_attention(
            q_BHCK, k_BGNK, v_BGNK, attn_mask=allowed_CN, scale=spec.scale, enable_gqa=q_BHCK.shape[1] != k_BGNK.shape[1]
        )  # fmt: skip
    return recompute(_soft_capped, q_BHCK, k_BGNK, v_BGNK, allowed_CN, spec)  # type: ignore[no-any-return]


def _soft_capped(q_BHCK: Tensor, k_BGNK: Tensor, v_BGNK: Tensor, allowed_CN: Tensor, spec: AttentionSpec) -> Tensor:
    v_BHNK = v_BGNK.repeat_interleave(q_BHCK.shape[1] // k_BGNK.shape[1], dim=1)
    return _attention_weights(q_BHCK, k_BGNK, allowed_CN, spec) @ v_BHNK


def _with_dropout(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: AttentionScope, masks: DropoutMasks) -> Tensor:
    """Attention with weights dropped after the softmax, by masks that no fused kernel takes.

    Some queries at a time, whose scores are recomputed in the backward pass, never kept.
    """
    length, parts = k_BGTK.shape[2], []
    for queries, start, keys in scope.chunks(length, dropping_chunk(q_BHTK.shape[0], q_BHTK.shape[1], length)):
        taken = q_BHTK[:, :, queries], k_BGTK[:, :, keys], v_BGTK[:, :, keys]
        parts.append(recompute(_dropped_chunk, *taken, scope, masks, queries, start, keys.start))
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def _dropped_chunk(
    q_BHCK: Tensor, k_BGNK: Tensor, v_BGNK: Tensor, scope: AttentionScope, masks: DropoutMasks, queries: slice, start: int,
    first: int,
) -> Tensor:  # fmt: skip
    """Attention of the queries at start, start + 1, ... of the sequence over the keys at first, first + 1, ...; queries: the
    same among the local tokens."""
    end, last = start + q_BHCK.shape[2], first + k_BGNK.shape[2]
    index = torch.arange(max(end, last), device=q_BHCK.device)
    allowed = scope.spec.allows(index[start:end, None], index[first:last])
    if scope.documents is not None:
        document_BT = scope.documents.document_BT
        allowed = allowed & (document_BT[:, None, start:end, None] == document_BT[:, None, None, first:last])
    p_BHCN = _attention_weights(q_BHCK, k_BGNK, allowed, scope.spec)
    repeats = q_BHCK.shape[1] // v_BGNK.shape[1]
    return masks.attention(p_BHCN, queries, first) @ v_BGNK.repeat_interleave(repeats, dim=1)


@torch.no_grad()
def largest_logits(q_BHLK: Tensor, k_BGTK: Tensor, scope: AttentionScope) -> Tensor:
    """The largest score that attention would see in each head, (H,), over a batch: scaled, before a soft cap, in fp32 (fp64 for
    fp64). As in `attention`, the L queries may be some of the T tokens. Some queries at a time, so that memory is bounded."""
    spec, documents, length = scope.spec, scope.documents, k_BGTK.shape[2]
    batch, heads = q_BHLK.shape[:2]
    chunk = min(max(MAX_LOGITS // (batch * heads * length), 16), length if q_BHLK.is_cuda else LOGIT_CHUNK)
    index_T, parts = torch.arange(length, device=q_BHLK.device), []
    with torch.autocast(q_BHLK.device.type, enabled=False):
        q_BGRLK, keys_BGKT = q_BHLK.unflatten(1, (k_BGTK.shape[1], -1)), upcast(k_BGTK).transpose(2, 3)  # type: ignore[no-untyped-call]
        for queries, start, keys in scope.chunks(length, chunk):
            q_BGRCK = upcast(q_BGRLK[:, :, :, queries])
            # Queries that share a key are rows of one matmul, which then needs no copies of the keys.
            flat = q_BGRCK.flatten(2, 3) @ keys_BGKT[..., keys]
            scores_BGRCN = flat.unflatten(2, q_BGRCK.shape[2:4])  # type: ignore[no-untyped-call]
            first, last, end = keys.start, keys.stop, start + q_BGRCK.shape[3]
            if documents is None and not spec.window:  # every query sees all keys before the chunk, or all at once
                first = start if spec.causal else last
            allowed = spec.allows(index_T[start:end, None], index_T[first:last])
            if documents is not None:
                document_BT = documents.document_BT
                allowed = allowed & (document_BT[:, start:end, None] == document_BT[:, None, first:last])
                allowed = allowed[:, None, None]
            if first < last:
                scores_BGRCN[..., first - last :].masked_fill_(~allowed, -torch.inf)
            parts.append(scores_BGRCN.amax(dim=(0, 3, 4)).flatten())
    return torch.stack(parts).amax(dim=0) * spec.scale_of(q_BHLK)


def _attention_weights(q_BHCK: Tensor, k_BGNK: Tensor, allowed: Tensor, spec: AttentionSpec) -> Tensor:
    """The attention weights themselves, (B, H, C, N): the softmax of the scores, in fp32 (fp64 for fp64) inside."""
    k_BHNK = k_BGNK.repeat_interleave(q_BHCK.shape[1] // k_BGNK.shape[1], dim=1)
    scores = q_BHCK @ k_BHNK.transpose(2, 3) * spec.scale_of(q_BHCK)
    if spec.soft_cap:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    return upcast(scores.masked_fill(~allowed, -torch.inf)).softmax(dim=-1).to(q_BHCK.dtype)


def _flex(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: AttentionScope) -> Tensor:
    cap = scope.spec.soft_cap

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return _compiled_flex(q_BHTK.device.type)(  # type: ignore[no-any-return]
        q_BHTK, k_BGTK, v_BGTK, score_mod=capped if cap else None, block_mask=scope.block_mask,
        scale=scope.spec.scale, enable_gqa=q_BHTK.shape[1] != k_BGTK.shape[1],
    )  # fmt: skip


@lru_cache(maxsize=2)
def _compiled_flex(device: str) -> Any:
    """FlexAttention is a kernel only when compiled; uncompiled it is the slow reference, which a CPU gets."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device == "cuda" else flex_attention


class LayerKVCache:
    """Keys and values of one layer, in memory that is allocated once."""

    def __init__(self, batch: int, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        shape = (batch, config.kv_heads, config.positions_length, config.head_dim)
        self._keys, self._values = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        self._length = 0

    def append(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; returns all of them, old and new."""
        end = self._length + k_BGTK.shape[2]
        self._keys[:, :, self._length : end] = k_BGTK
        self._values[:, :, self._length : end] = v_BGTK
        self._length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class Cache:
    """The key/value cache of a causal model over a batch of sequences of equal length. length: tokens so far."""

    def __init__(self, config: ModelConfig, batch: int, device: torch.device, dtype: torch.dtype) -> None:
        assert config.causal, "an encoder's hidden states change with every token that follows: nothing can be kept"
        self.layers = [LayerKVCache(batch, config, device, dtype) for _ in range(config.layers)]
        self.length = 0
