"""Attention: one interface over the ways that are fast on each device. No way holds a T x T matrix in fp32.

Shapes: B sequences, H query heads, G key/value heads, T tokens, K width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Where documents lie in a batch of packed sequences; attention stays inside them and positions start at 0.

    position_BT: position of each token within its document; spans: (row, start, end) of each document, in order;
    number_BT: number of the document within its row, for masks on the device.
    """

    position_BT: Tensor
    number_BT: Tensor
    spans: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, tokens_BT: Tensor, end_of_text: int) -> Documents:
        """Documents of packed sequences: each ends with its end-of-text token, the last one with the sequence."""
        length = tokens_BT.shape[1]
        starts_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        starts_BT[:, 0] = True
        starts_BT[:, 1:] = tokens_BT[:, :-1] == end_of_text
        index_T = torch.arange(length, device=tokens_BT.device)
        start_BT = torch.where(starts_BT, index_T, 0).cummax(dim=1).values
        rows, firsts = (part.tolist() for part in starts_BT.nonzero(as_tuple=True))
        ends = [
            firsts[number + 1] if number + 1 < len(rows) and rows[number + 1] == row else length
            for number, row in enumerate(rows)
        ]
        spans = tuple(zip(rows, firsts, ends, strict=True))
        return cls(index_T - start_BT, starts_BT.cumsum(dim=1), spans)


def causal_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, documents: Documents | None) -> Tensor:
    """Softmax attention over earlier tokens (of the same document). Returns (B, H, T, K)."""
    if documents is None:
        return _fused(q_BHTK, k_BGTK, v_BGTK)
    if q_BHTK.device.type == "cuda":
        return _flex(q_BHTK, k_BGTK, v_BGTK, documents)
    return _per_document(q_BHTK, k_BGTK, v_BGTK, documents)


def _fused(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
    return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=grouped)


def _per_document(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, documents: Documents) -> Tensor:
    """One fused call a document: on a CPU four times as fast as a boolean mask, and the only way with a backward."""
    if len(documents.spans) == q_BHTK.shape[0]:
        return _fused(q_BHTK, k_BGTK, v_BGTK)
    parts = [
        _fused(*(x[row : row + 1, :, start:end] for x in (q_BHTK, k_BGTK, v_BGTK)))[0]
        for row, start, end in documents.spans
    ]
    batch, heads, length, head_dim = q_BHTK.shape
    return torch.cat(parts, dim=1).view(heads, batch, length, head_dim).transpose(0, 1)


def _flex(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, documents: Documents) -> Tensor:
    """FlexAttention with a block mask: skips the blocks between documents."""
    from torch.nn.attention.flex_attention import create_block_mask

    number_BT = documents.number_BT
    batch, length = number_BT.shape

    def same_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (number_BT[b, q] == number_BT[b, kv])

    mask = create_block_mask(same_document, batch, None, length, length, device=number_BT.device)
    grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
    attended: Tensor = _compiled_flex(q_BHTK.device.type)(q_BHTK, k_BGTK, v_BGTK, block_mask=mask, enable_gqa=grouped)
    return attended


@lru_cache(maxsize=2)
def _compiled_flex(device: str) -> Any:
    """FlexAttention is a kernel only when compiled; uncompiled it is the slow reference, which a CPU gets."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device == "cuda" else flex_attention
