"""The attention sublayer and the attention kernels of each device. None of them holds a T x T matrix.

Parameters and costs are in `sublayers.attention_facts`, and the tokens that each token sees in `attention_scope.py`.

Shapes: B sequences, H query heads, G key/value heads, R = H / G, T tokens, K width of a head, D width; C queries of a
chunk, N keys of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bessemer.model.attention_scope import AttentionScope, AttentionSpec, flex_function
from bessemer.model.config import ModelConfig, dropping_chunk
from bessemer.model.dropout import DropoutMasks
from bessemer.model.kernels import Rotation, heads_first, linear, rotate, runs_fused, split_heads, upcast
from bessemer.model.layers import LinearFunction, RMSNorm, joint_bias, linear_layer
from bessemer.model.sublayers import attention_facts

SOFT_CAP_CHUNK = 128  # queries whose scores are in memory at once when no fused kernel supports soft caps
OFFSET_CHUNK = 256  # queries per mask when some keys come before the first query: fastest of 64 to 2,048

# Maps (queries, keys, values, scope, dropout masks) to the attention output, (B, H, T, K).
AttentionFunction = Callable[[Tensor, Tensor, Tensor, AttentionScope, DropoutMasks | None], Tensor]

# Recomputes a part of the forward pass in the backward pass. A model draws no random numbers (dropout masks are computed from
# keys), so no generator state is saved.
recompute: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def attention(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: AttentionScope, masks: DropoutMasks | None = None
) -> Tensor:
    """Compute softmax attention within each document, over the keys that the scope allows.

    Args:
        q_BHTK: Queries; with context parallelism only some tokens of a sequence, as the scope's documents describe.
        k_BGTK: Keys of all tokens.
        v_BGTK: Values of all tokens.
        scope: The documents, the window and the mask of the batch.
        masks: Dropout masks; their attention rate drops attention weights.

    Returns:
        The weighted values, (B, H, T, K).
    """
    if masks is not None and masks.rates.attention:
        return _with_dropout(q_BHTK, k_BGTK, v_BGTK, scope, masks)
    if scope.block_mask is not None:
        return _flex(q_BHTK, k_BGTK, v_BGTK, scope)
    if scope.documents is not None:
        return _per_document(q_BHTK, k_BGTK, v_BGTK, scope)
    return _one_document(q_BHTK, k_BGTK, v_BGTK, scope.spec)


def _per_document(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: AttentionScope) -> Tensor:
    """Compute attention with one fused call per document.

    On a CPU this is four times as fast as a boolean mask, and the only way that has a backward pass.
    `leave_out_of_compilation` excludes it from compiled blocks, which would be recompiled for the documents of each batch.
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
    """Exclude `_per_document` from compilation; call it before blocks are compiled.

    A decorator would load the compiler, which takes half a second, wherever the model is imported.
    """
    global _per_document
    _per_document = torch.compiler.disable(_per_document)  # type: ignore[no-untyped-call]


def _one_document(
    q_BHCK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, spec: AttentionSpec, first: int = 0, *, is_part: bool = False
) -> Tensor:
    """Return the attention, (B, H, C, K), of queries at positions first, first + 1, ... of one document over its keys.

    The keys start at position 0. `is_part` is True for one of several documents in a sequence, which have any length;
    full sequences use the bf16 kernel only for the lengths at which it is faster.
    """
    count, length = q_BHCK.shape[2], k_BGTK.shape[2]
    if spec.causal and first + count < length:
        length = first + count
        k_BGTK, v_BGTK = k_BGTK[:, :, :length], v_BGTK[:, :, :length]
    narrow = spec.window > 0 and max(spec.back, spec.ahead) < length - 1
    if not narrow and not spec.soft_cap and (first == 0 or not spec.causal):
        if q_BHCK.requires_grad and q_BHCK.dtype == torch.bfloat16 and runs_fused(q_BHCK, k_BGTK, v_BGTK):
            from bessemer.model.fused import Bf16Attention

            if is_part or count in Bf16Attention.LENGTHS:
                return Bf16Attention.apply(q_BHCK, k_BGTK, v_BGTK, spec.causal, spec.scale)  # type: ignore[no-any-return, no-untyped-call]
        return F.scaled_dot_product_attention(
            q_BHCK, k_BGTK, v_BGTK, is_causal=spec.causal, scale=spec.scale,
            enable_gqa=q_BHCK.shape[1] != k_BGTK.shape[1],
        )  # fmt: skip
    chunk = max(SOFT_CAP_CHUNK, spec.window) if narrow else SOFT_CAP_CHUNK if spec.soft_cap else OFFSET_CHUNK
    chunks = enumerate(torch.split(q_BHCK, chunk, dim=2))
    return torch.cat([_chunk(q, k_BGTK, v_BGTK, spec, first + number * chunk) for number, q in chunks], dim=2)


def _chunk(q_BHCK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, spec: AttentionSpec, start: int) -> Tensor:
    """Compute attention of the queries at start, start + 1, ... over the keys that any of them sees, by a mask.

    With a soft cap, the backward pass recomputes the scores instead of storing them.
    """
    end, length = start + q_BHCK.shape[2], k_BGTK.shape[2]
    first, last = spec.keys_of(start, end, length)
    index = torch.arange(length, device=q_BHCK.device)
    allowed_CN = spec.allows(index[start:end, None], index[first:last])
    k_BGNK, v_BGNK = k_BGTK[:, :, first:last], v_BGTK[:, :, first:last]
    if not spec.soft_cap:
        return F.scaled_dot_product_attention(
            q_BHCK, k_BGNK, v_BGNK, attn_mask=allowed_CN, scale=spec.scale, enable_gqa=q_BHCK.shape[1] != k_BGNK.shape[1]
        )  # fmt: skip
    return recompute(_by_scores, q_BHCK, k_BGNK, v_BGNK, allowed_CN, spec)  # type: ignore[no-any-return]


def _with_dropout(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: AttentionScope, masks: DropoutMasks) -> Tensor:
    """Compute attention with dropout on the weights after the softmax, which no fused kernel supports with these masks.

    It handles one chunk of queries at a time, whose scores the backward pass recomputes instead of storing them.
    """

    def attend(q_BHCK: Tensor, k_BGNK: Tensor, v_BGNK: Tensor, queries: slice, start: int, keys: slice) -> Tensor:
        allowed = scope.allows(slice(start, start + q_BHCK.shape[2]), keys, q_BHCK.device)
        drop = partial(masks.attention, queries=queries, first=keys.start)
        return _by_scores(q_BHCK, k_BGNK, v_BGNK, allowed, scope.spec, drop)

    length, parts = k_BGTK.shape[2], []
    for queries, start, keys in scope.chunks(length, dropping_chunk(q_BHTK.shape[0], q_BHTK.shape[1], length)):
        slices = q_BHTK[:, :, queries], k_BGTK[:, :, keys], v_BGTK[:, :, keys]
        parts.append(recompute(attend, *slices, queries, start, keys))
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def _by_scores(
    q_BHCK: Tensor, k_BGNK: Tensor, v_BGNK: Tensor, allowed: Tensor, spec: AttentionSpec,
    drop: Callable[[Tensor], Tensor] = lambda p_BHCN: p_BHCN,
) -> Tensor:  # fmt: skip
    """Compute attention without a fused kernel: scores, their softmax in fp32 (fp64 for fp64), and the weighted values.

    `allowed` is a bool mask that broadcasts to (B, H, C, N), True where a query sees a key. `drop` applies dropout to
    the attention weights.
    """
    k_BHNK, v_BHNK = (x.repeat_interleave(q_BHCK.shape[1] // k_BGNK.shape[1], dim=1) for x in (k_BGNK, v_BGNK))
    scores = q_BHCK @ k_BHNK.transpose(2, 3) * spec.scale_of(q_BHCK)
    if spec.soft_cap:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    return drop(upcast(scores.masked_fill(~allowed, -torch.inf)).softmax(dim=-1).to(q_BHCK.dtype)) @ v_BHNK


def _flex(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: AttentionScope) -> Tensor:
    cap = scope.spec.soft_cap

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return flex_function("flex_attention", q_BHTK.device.type)(  # type: ignore[no-any-return]
        q_BHTK, k_BGTK, v_BGTK, score_mod=capped if cap else None, block_mask=scope.block_mask,
        scale=scope.spec.scale, enable_gqa=q_BHTK.shape[1] != k_BGTK.shape[1],
    )  # fmt: skip


class LayerKVCache:
    """The keys and values of one layer of a causal model, for a batch of sequences of equal length.

    The memory is allocated once. `length` is the number of tokens in the cache.
    """

    def __init__(self, config: ModelConfig, batch: int, device: torch.device, dtype: torch.dtype) -> None:
        assert config.causal, "an encoder cannot cache keys and values, since each token changes all hidden states"
        shape = (batch, config.kv_heads, config.positions_length, config.head_dim)
        self._keys, self._values = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        self.length = 0

    def append(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, and return those of all tokens so far, (B, G, length, K) each."""
        end = self.length + k_BGTK.shape[2]
        self._keys[:, :, self.length : end] = k_BGTK
        self._values[:, :, self.length : end] = v_BGTK
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class Attention(nn.Module):
    """Grouped-query self-attention.

    `qkv` is (G, R + 2, K, D): for each key/value head, the R query heads that share it, its key and its value. A shard
    along the first dimension has complete heads. `qkv_bias` is (G, R + 2, K).
    """

    project: LinearFunction = staticmethod(linear)
    attend: AttentionFunction = staticmethod(attention)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.facts = facts = attention_facts(config)
        self.queries = config.heads // config.kv_heads
        self.qkv = nn.Parameter(torch.empty(facts.shapes["attention.qkv"]))
        self.qkv_bias = joint_bias(facts, "attention.qkv")
        self.out = linear_layer(facts, "attention.out")
        self.norm_all_heads, self.norm_eps = config.qk_norm == "full", config.norm_eps
        self.q_norm, self.k_norm = (
            nn.Identity() if config.qk_norm == "none" else RMSNorm(shape[0], config.norm_eps, config.zero_centred_norm)
            for shape in (facts.shapes.get(f"attention.{name}.weight", (None,)) for name in ("q_norm", "k_norm"))
        )

    def forward(
        self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor] | None, scope: AttentionScope, cache: LayerKVCache | None = None,
        masks: DropoutMasks | None = None,
    ) -> Tensor:  # fmt: skip
        q_BHTK, k_BGTK, v_BGTK = self.queries_keys_values(x_BTD, rotation)
        if cache is None:
            attended_BHTK = self.attend(q_BHTK, k_BGTK, v_BGTK, scope, masks)
        else:
            keys, values = cache.append(k_BGTK, v_BGTK)
            attended_BHTK = _one_document(q_BHTK, keys, values, scope.spec, keys.shape[2] - q_BHTK.shape[2])
        return self.project(attended_BHTK.transpose(1, 2).flatten(2), self.out.weight, self.out.bias)

    def queries_keys_values(self, x_BTD: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, T, K), keys and values (B, G, T, K), with queries and keys normalised and rotated."""
        bias = None if self.qkv_bias is None else self.qkv_bias.flatten()
        joined_BTGRK = self.project(x_BTD, self.qkv.flatten(0, 2), bias).unflatten(-1, self.qkv.shape[:3])  # type: ignore[no-untyped-call]
        if not self.norm_all_heads:
            norms = tuple(norm.scale(joined_BTGRK) for norm in (self.q_norm, self.k_norm) if isinstance(norm, RMSNorm))
            if (heads := split_heads(joined_BTGRK, rotation, norms, self.norm_eps)) is not None:
                return heads
        q_BTGRK, k_BTGK, v_BTGK = joined_BTGRK.split([self.queries, 1, 1], dim=-2)
        q_BTHK, k_BTGK, v_BTGK = q_BTGRK.flatten(2, 3), k_BTGK.squeeze(-2), v_BTGK.squeeze(-2)
        if self.norm_all_heads:
            q_BTHK = self.q_norm(q_BTHK.flatten(2)).view(q_BTHK.shape)
            k_BTGK = self.k_norm(k_BTGK.flatten(2)).view(k_BTGK.shape)
        else:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        if rotation is not None:
            q_BTHK, k_BTGK = rotate(q_BTHK, rotation), rotate(k_BTGK, rotation)
        return q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), heads_first(v_BTGK)
