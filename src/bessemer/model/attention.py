"""Attention: one interface over the ways that are fast on each device. No way holds a T x T matrix.

Shapes: B sequences, H query heads, G key/value heads, T tokens, K width of a head; C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SOFT_CAP_CHUNK = 128  # queries whose scores are held at one time where no fused kernel knows soft caps


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


@dataclass(frozen=True)
class Sight:
    """What a token's attention sees.

    causal: only itself and what came before; window: that many tokens, itself included (causal), or half as many to
    each side (bidirectional); 0: no limit; soft_cap: scores are soft_cap * tanh(score / soft_cap) (Gemma 2, Gemma Team
    2024, section 2.4); 0: as they are.
    """

    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0

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
    def of(cls, sight: Sight, documents: Documents | None, length: int, device: torch.device) -> Scope:
        """The scope of a batch of `length` tokens a row on `device`."""
        needs_mask = device.type == "cuda" and (documents is not None or sight.window or sight.soft_cap)
        return cls(sight, documents, _block_mask(sight, documents, length, device) if needs_mask else None)


def attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: Scope) -> Tensor:
    """Softmax attention within each document, over what the scope's sight allows. Returns (B, H, T, K)."""
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
    spans = scope.documents.spans
    if len(spans) == q_BHTK.shape[0]:
        return _whole(q_BHTK, k_BGTK, v_BGTK, scope.sight)
    parts = [
        _whole(
            q_BHTK[row : row + 1, :, start:end],
            k_BGTK[row : row + 1, :, start:end],
            v_BGTK[row : row + 1, :, start:end],
            scope.sight,
        )[0]
        for row, start, end in spans
    ]
    batch, heads, length, head_dim = q_BHTK.shape
    return torch.cat(parts, dim=1).view(heads, batch, length, head_dim).transpose(0, 1)


def cached_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, sight: Sight) -> Tensor:
    """Attention of the last tokens over all keys, for generation: q has as many tokens as are new."""
    new, length = q_BHTK.shape[2], k_BGTK.shape[2]
    if new == length:
        return _whole(q_BHTK, k_BGTK, v_BGTK, sight)
    index = torch.arange(length, device=q_BHTK.device)
    allowed = sight.allows(index[length - new :, None], index)
    return _masked(q_BHTK, k_BGTK, v_BGTK, allowed, sight.soft_cap)


def _whole(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, sight: Sight) -> Tensor:
    """Attention over sequences that are one document each."""
    length = q_BHTK.shape[2]
    narrow = sight.window > 0 and max(sight.back, sight.ahead) < length - 1
    if not narrow and not sight.soft_cap:
        grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
        return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=sight.causal, enable_gqa=grouped)
    chunk = max(sight.window, SOFT_CAP_CHUNK) if narrow else SOFT_CAP_CHUNK
    parts = [
        _chunk(q_BHTK, k_BGTK, v_BGTK, sight, start, min(start + chunk, length)) for start in range(0, length, chunk)
    ]
    return torch.cat(parts, dim=2)


def _chunk(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, sight: Sight, start: int, end: int) -> Tensor:
    """Attention of the queries start..end over the keys that any of them may see."""
    length = k_BGTK.shape[2]
    first = max(start - sight.back, 0) if sight.window else 0
    last = min(end + sight.ahead, length) if sight.window or sight.causal else length
    index = torch.arange(length, device=q_BHTK.device)
    allowed = sight.allows(index[start:end, None], index[first:last])
    queries, keys, values = q_BHTK[:, :, start:end], k_BGTK[:, :, first:last], v_BGTK[:, :, first:last]
    return _masked(queries, keys, values, allowed, sight.soft_cap)


def _masked(q_BHCK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, allowed_CT: Tensor, soft_cap: float) -> Tensor:
    """Attention under a mask. With a soft cap the scores are recomputed in the backward pass, never kept."""
    grouped = q_BHCK.shape[1] != k_BGTK.shape[1]
    if not soft_cap:
        return F.scaled_dot_product_attention(q_BHCK, k_BGTK, v_BGTK, attn_mask=allowed_CT, enable_gqa=grouped)
    capped: Tensor = checkpoint(  # type: ignore[no-untyped-call]
        _soft_capped, q_BHCK, k_BGTK, v_BGTK, allowed_CT, soft_cap, use_reentrant=False, preserve_rng_state=False
    )
    return capped


def _soft_capped(q_BHCK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, allowed_CT: Tensor, soft_cap: float) -> Tensor:
    repeats = q_BHCK.shape[1] // k_BGTK.shape[1]
    k_BHTK, v_BHTK = (x.repeat_interleave(repeats, dim=1) for x in (k_BGTK, v_BGTK))
    scores = q_BHCK @ k_BHTK.transpose(2, 3) * q_BHCK.shape[-1] ** -0.5
    scores = torch.tanh(scores / soft_cap) * soft_cap
    return scores.masked_fill(~allowed_CT, -torch.inf).softmax(dim=-1) @ v_BHTK


def _flex(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: Scope) -> Tensor:
    cap = scope.sight.soft_cap

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    attended: Tensor = _compiled_flex(q_BHTK.device.type)(
        q_BHTK, k_BGTK, v_BGTK, score_mod=capped if cap else None, block_mask=scope.block_mask,
        enable_gqa=q_BHTK.shape[1] != k_BGTK.shape[1],
    )  # fmt: skip
    return attended


def _block_mask(sight: Sight, documents: Documents | None, length: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    if documents is None:
        return create_block_mask(lambda b, h, q, kv: sight.allows(q, kv), None, None, length, length, device=device)
    number_BT = documents.number_BT

    def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return sight.allows(q, kv) & (number_BT[b, q] == number_BT[b, kv])

    return create_block_mask(within, len(number_BT), None, length, length, device=device)


@lru_cache(maxsize=2)
def _compiled_flex(device: str) -> Any:
    """FlexAttention is a kernel only when compiled; uncompiled it is the slow reference, which a CPU gets."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device == "cuda" else flex_attention
