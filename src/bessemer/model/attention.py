"""Attention: one interface over the ways that are fast on each device. No way holds a T x T matrix.

Shapes: B sequences, H query heads, G key/value heads, T tokens, K width of a head; C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bessemer.model.config import dropping_chunk
from bessemer.model.dropout import DropoutMasks
from bessemer.model.elementwise import widened

SOFT_CAP_CHUNK = 128  # queries whose scores are held at one time where no fused kernel knows soft caps
OFFSET_CHUNK = 256  # queries under one mask where some keys come before the first of them: fastest of 64 to 2,048


@dataclass(frozen=True)
class Piece:
    """Queries of one document that are computed together.

    rows: the sequences; queries: which of the tokens at hand; keys: the document, among the tokens of the sequence;
    first: place of the first query in the document.
    """

    rows: slice
    queries: slice
    keys: slice
    first: int = 0


@dataclass(frozen=True)
class Documents:
    """Where documents lie in a batch of packed sequences; attention stays inside them and positions start at 0.

    position_BT: position of each token within its document; spans: (row, start, end) of each document, in order;
    number_BT: number of the document within its row, for masks on the device. On CUDA the spans are left out.
    """

    position_BT: Tensor
    number_BT: Tensor
    spans: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, tokens_BT: Tensor, end_of_text: int) -> Documents:
        """Documents of packed sequences: each ends with its end-of-text token, the last one with the sequence."""
        starts_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        starts_BT[:, 0] = True
        starts_BT[:, 1:] = tokens_BT[:, :-1] == end_of_text
        return cls.beginning_at(starts_BT)

    @classmethod
    def padded(cls, lengths_B: Tensor, length: int) -> Documents:
        """One document a row, of the given length; what pads the row up to `length` tokens is a document of its own."""
        index_T = torch.arange(length, device=lengths_B.device)
        return cls.beginning_at((index_T == 0) | (index_T == lengths_B[:, None]))

    @classmethod
    def beginning_at(cls, starts_BT: Tensor) -> Documents:
        """Documents that begin where it is said; one does at the start of each row."""
        length = starts_BT.shape[1]
        index_T = torch.arange(length, device=starts_BT.device)
        start_BT = torch.where(starts_BT, index_T, 0).cummax(dim=1).values
        if starts_BT.is_cuda:  # masks are made on the device; reading the spans back would make it wait
            return cls(index_T - start_BT, starts_BT.cumsum(dim=1), ())
        rows, firsts = (part.tolist() for part in starts_BT.nonzero(as_tuple=True))
        ends = [
            firsts[number + 1] if number + 1 < len(rows) and rows[number + 1] == row else length
            for number, row in enumerate(rows)
        ]
        spans = tuple(zip(rows, firsts, ends, strict=True))
        return cls(index_T - start_BT, starts_BT.cumsum(dim=1), spans)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What is computed at a time, in the order of the tokens: a document; all rows at once where each is one."""
        batch, length = self.number_BT.shape
        if len(self.spans) == batch:
            return (Piece(slice(0, batch), slice(0, length), slice(0, length)),)
        return tuple(Piece(slice(row, row + 1), slice(start, end), slice(start, end)) for row, start, end in self.spans)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, end) in the sequence of the tokens at hand, in order."""
        return ((0, self.number_BT.shape[1]),)

    @property
    def length(self) -> int:
        """Tokens of a whole sequence."""
        return self.number_BT.shape[1]

    def block_mask(self, sight: Sight) -> Any:
        """FlexAttention's mask: what the sight allows within each document."""
        from torch.nn.attention.flex_attention import create_block_mask

        number_BT = self.number_BT
        batch, length = number_BT.shape

        def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return sight.allows(q, kv) & (number_BT[b, q] == number_BT[b, kv])

        return create_block_mask(within, batch, None, length, length, device=number_BT.device)


@dataclass(frozen=True)
class Sight:
    """What a token's attention sees.

    causal: only itself and what came before; window: that many tokens, itself included (causal), or half as many to
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


@dataclass(frozen=True)
class Scope:
    """What attention sees in one batch: made once for all the layers of a forward pass that see the same.

    block_mask: FlexAttention's mask on CUDA, where a mask is needed; it skips the blocks between documents and outside
    the window.
    """

    sight: Sight
    documents: Documents | None
    block_mask: Any

    @classmethod
    def each(
        cls, sights: Collection[Sight], documents: Documents | None, length: int, device: torch.device
    ) -> dict[Sight, Scope]:
        """The scopes of a batch, see `of`. Sights that differ in their scale share a mask."""
        made: dict[Sight, Scope] = {}
        for sight in sights:
            plain = replace(sight, scale=None)
            if plain not in made:
                made[plain] = cls.of(plain, documents, length, device)
            made[sight] = replace(made[plain], sight=sight)
        return made

    @classmethod
    def of(cls, sight: Sight, documents: Documents | None, length: int, device: torch.device) -> Scope:
        """The scope of a batch of `length` tokens a row on `device`."""
        needs_mask = device.type == "cuda" and (documents is not None or sight.window or sight.soft_cap)
        if not needs_mask:
            return cls(sight, documents, None)
        if documents is not None:
            return cls(sight, documents, documents.block_mask(sight))
        return cls(sight, documents, _block_mask(sight, length, device))


def attention(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: Scope, masks: DropoutMasks | None = None
) -> Tensor:
    """Softmax attention within each document, over what the scope's sight allows. Returns (B, H, T, K).

    The scope's documents may say that the queries are only some of a sequence's tokens; keys and values are of all.
    masks: which attention weights are dropped.
    """
    if masks is not None and masks.rates.attention:
        return _dropping(q_BHTK, k_BGTK, v_BGTK, scope, masks)
    if scope.block_mask is not None:
        return _flex(q_BHTK, k_BGTK, v_BGTK, scope)
    if scope.documents is not None:
        by_document: Tensor = _per_document(q_BHTK, k_BGTK, v_BGTK, scope)
        return by_document
    return _whole(q_BHTK, k_BGTK, v_BGTK, scope.sight)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _per_document(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: Scope) -> Tensor:
    """One fused call a document: on a CPU four times as fast as a boolean mask, and the only way with a backward.

    Left out of compiled blocks, which would be compiled anew for each batch's documents.
    """
    assert scope.documents is not None
    pieces = scope.documents.pieces
    parts = [
        _over(
            q_BHTK[piece.rows, :, piece.queries],
            k_BGTK[piece.rows, :, piece.keys],
            v_BGTK[piece.rows, :, piece.keys],
            scope.sight,
            piece.first,
        )
        for piece in pieces
    ]
    batch, heads, length, head_dim = q_BHTK.shape
    if len(parts[0]) == batch:
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
    joined = torch.cat([part[0] for part in parts], dim=1)
    return joined.view(heads, batch, length, head_dim).transpose(0, 1)


def cached_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, sight: Sight) -> Tensor:
    """Attention of the last tokens over all keys, for generation: q has as many tokens as are new."""
    new, length = q_BHTK.shape[2], k_BGTK.shape[2]
    if new == length:
        return _whole(q_BHTK, k_BGTK, v_BGTK, sight)
    index = torch.arange(length, device=q_BHTK.device)
    allowed = sight.allows(index[length - new :, None], index)
    return _masked(q_BHTK, k_BGTK, v_BGTK, allowed, sight)


def _whole(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, sight: Sight) -> Tensor:
    """Attention over sequences that are one document each."""
    return _over(q_BHTK, k_BGTK, v_BGTK, sight, 0)


def _over(q_BHCK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, sight: Sight, first: int) -> Tensor:
    """Attention of queries at first, first + 1, ... over the keys of one document, which are at 0, 1, ..."""
    count, length = q_BHCK.shape[2], k_BGTK.shape[2]
    if sight.causal and first + count < length:
        length = first + count
        k_BGTK, v_BGTK = k_BGTK[:, :, :length], v_BGTK[:, :, :length]
    narrow = sight.window > 0 and max(sight.back, sight.ahead) < length - 1
    if not narrow and not sight.soft_cap and (first == 0 or not sight.causal):
        grouped = q_BHCK.shape[1] != k_BGTK.shape[1]
        return F.scaled_dot_product_attention(
            q_BHCK, k_BGTK, v_BGTK, is_causal=sight.causal, scale=sight.scale, enable_gqa=grouped
        )
    chunk = SOFT_CAP_CHUNK if sight.soft_cap or narrow else OFFSET_CHUNK
    if narrow:
        chunk = max(sight.window, chunk)
    parts = [
        _chunk(q_BHCK[:, :, start : start + chunk], k_BGTK, v_BGTK, sight, first + start)
        for start in range(0, count, chunk)
    ]
    return torch.cat(parts, dim=2)


def _chunk(q_BHCK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, sight: Sight, start: int) -> Tensor:
    """Attention of the queries at start, start + 1, ... over the keys that any of them may see."""
    end, length = start + q_BHCK.shape[2], k_BGTK.shape[2]
    first = max(start - sight.back, 0) if sight.window else 0
    last = min(end + sight.ahead, length) if sight.window or sight.causal else length
    index = torch.arange(length, device=q_BHCK.device)
    allowed = sight.allows(index[start:end, None], index[first:last])
    return _masked(q_BHCK, k_BGTK[:, :, first:last], v_BGTK[:, :, first:last], allowed, sight)


def _masked(q_BHCK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, allowed_CT: Tensor, sight: Sight) -> Tensor:
    """Attention under a mask. With a soft cap the scores are recomputed in the backward pass, never kept."""
    grouped = q_BHCK.shape[1] != k_BGTK.shape[1]
    if not sight.soft_cap:
        return F.scaled_dot_product_attention(
            q_BHCK, k_BGTK, v_BGTK, attn_mask=allowed_CT, scale=sight.scale, enable_gqa=grouped
        )
    capped: Tensor = checkpoint(  # type: ignore[no-untyped-call]
        _soft_capped, q_BHCK, k_BGTK, v_BGTK, allowed_CT, sight, use_reentrant=False, preserve_rng_state=False
    )
    return capped


def _soft_capped(q_BHCK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, allowed_CT: Tensor, sight: Sight) -> Tensor:
    v_BHTK = v_BGTK.repeat_interleave(q_BHCK.shape[1] // k_BGTK.shape[1], dim=1)
    return _weights(q_BHCK, k_BGTK, allowed_CT, sight) @ v_BHTK


def _dropping(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: Scope, masks: DropoutMasks) -> Tensor:
    """Attention with weights dropped after the softmax, which no fused kernel does by masks that one gives it.

    Some queries at a time, whose scores are recomputed in the backward pass, never kept.
    """
    sight, documents, length = scope.sight, scope.documents, k_BGTK.shape[2]
    chunk = dropping_chunk(q_BHTK.shape[0], q_BHTK.shape[1], length)
    parts, here = [], 0
    for low, high in ((0, length),) if documents is None else documents.ranges:
        for start in range(low, high, chunk):
            end = min(start + chunk, high)
            first = max(start - sight.back, 0) if sight.window else 0
            last = min(end + sight.ahead, length) if sight.window or sight.causal else length
            queries, keys = slice(here + start - low, here + end - low), slice(first, last)
            part: Tensor = checkpoint(  # type: ignore[no-untyped-call]
                _dropped_chunk, q_BHTK[:, :, queries], k_BGTK[:, :, keys], v_BGTK[:, :, keys], scope, masks, queries,
                start, first, use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
            parts.append(part)
        here += high - low
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def _dropped_chunk(
    q_BHCK: Tensor, k_BGNK: Tensor, v_BGNK: Tensor, scope: Scope, masks: DropoutMasks, queries: slice, start: int,
    first: int,
) -> Tensor:  # fmt: skip
    """Attention of the queries at start, start + 1, ... of the sequence over the keys at first, first + 1, ...; queries: the
    same among the tokens at hand."""
    end, last, sight = start + q_BHCK.shape[2], first + k_BGNK.shape[2], scope.sight
    index = torch.arange(max(end, last), device=q_BHCK.device)
    allowed = sight.allows(index[start:end, None], index[first:last])
    if scope.documents is not None:
        number_BT = scope.documents.number_BT
        allowed = allowed & (number_BT[:, None, start:end, None] == number_BT[:, None, None, first:last])
    p_BHCN = _weights(q_BHCK, k_BGNK, allowed, sight)
    repeats = q_BHCK.shape[1] // v_BGNK.shape[1]
    return masks.attention(p_BHCN, queries, first) @ v_BGNK.repeat_interleave(repeats, dim=1)


def _weights(q_BHCK: Tensor, k_BGNK: Tensor, allowed: Tensor, sight: Sight) -> Tensor:
    """The attention weights themselves, (B, H, C, N): the softmax of the scores, in fp32 (fp64 for fp64) inside."""
    k_BHNK = k_BGNK.repeat_interleave(q_BHCK.shape[1] // k_BGNK.shape[1], dim=1)
    scale = q_BHCK.shape[-1] ** -0.5 if sight.scale is None else sight.scale
    scores = q_BHCK @ k_BHNK.transpose(2, 3) * scale
    if sight.soft_cap:
        scores = torch.tanh(scores / sight.soft_cap) * sight.soft_cap
    return widened(scores.masked_fill(~allowed, -torch.inf)).softmax(dim=-1).to(q_BHCK.dtype)


def _flex(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: Scope) -> Tensor:
    cap = scope.sight.soft_cap

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    attended: Tensor = _compiled_flex(q_BHTK.device.type)(
        q_BHTK, k_BGTK, v_BGTK, score_mod=capped if cap else None, block_mask=scope.block_mask,
        scale=scope.sight.scale, enable_gqa=q_BHTK.shape[1] != k_BGTK.shape[1],
    )  # fmt: skip
    return attended


def _block_mask(sight: Sight, length: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, q, kv: sight.allows(q, kv), None, None, length, length, device=device)


@lru_cache(maxsize=2)
def _compiled_flex(device: str) -> Any:
    """FlexAttention is a kernel only when compiled; uncompiled it is the slow reference, which a CPU gets."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device == "cuda" else flex_attention
