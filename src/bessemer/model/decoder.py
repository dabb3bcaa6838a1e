"""The decoder: pre-norm blocks of grouped-query attention and SwiGLU with RMSNorm and rotary positions.

One implementation; its options are the ones `transformers` knows as Llama and Qwen3. Weights are kept apart by role
(queries, keys, values, ...), so that each can be sharded, decayed and exported on its own; the forward pass joins
those that share an input into one product.

Shapes: B sequences, T tokens, D width, H query heads, G key/value heads, K width of a head, F hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model.attention import Documents, causal_attention
from bessemer.model.config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), in fp32 whatever the input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query causal self-attention with rotary positions and optional QK-norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.heads, self.kv_heads = config.head_dim, config.heads, config.kv_heads
        self.q = nn.Linear(config.width, config.heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor], documents: Documents | None) -> Tensor:
        # One product instead of three: the input is read once, and its gradient is one product too.
        joined = F.linear(x_BTD, torch.cat([self.q.weight, self.k.weight, self.v.weight]))
        heads_BTHK = joined.unflatten(-1, (-1, self.head_dim))
        q_BTHK, k_BTGK, v_BTGK = heads_BTHK.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        q_BHTK = rotate(self.q_norm(q_BTHK), rotation).transpose(1, 2)
        k_BGTK = rotate(self.k_norm(k_BTGK), rotation).transpose(1, 2)
        attended_BHTK = causal_attention(q_BHTK, k_BGTK, v_BTGK.transpose(1, 2), documents)
        projected: Tensor = self.out(attended_BHTK.transpose(1, 2).flatten(2))
        return projected


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = F.linear(x_BTD, torch.cat([self.gate.weight, self.up.weight])).chunk(2, dim=-1)
        projected: Tensor = self.down(F.silu(gate_BTF) * up_BTF)
        return projected


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor], documents: Documents | None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation, documents)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Decoder(nn.Module):
    """Token ids to hidden states; the output head is applied by who needs logits, since training never holds them all."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor, documents: Documents | None = None) -> Tensor:
        """Hidden states after the last norm, (B, T, D)."""
        x_BTD = self.embedding(tokens_BT)
        if torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        if documents is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        else:
            positions = documents.position_BT
        rotation = rotations(positions, self.config.head_dim, self.config.rope_theta)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotation, documents)
        hidden: Tensor = self.norm(x_BTD)
        return hidden

    def logits(self, tokens_BT: Tensor, documents: Documents | None = None) -> Tensor:
        """Logits of every position, (B, T, V): for evaluation and generation of short texts."""
        return F.linear(self(tokens_BT, documents), self.head.weight)


def rotations(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (Su et al. 2021, section 3.4.2), each (..., T, 1, K/2), in fp32.

    The angles are computed in fp64: in fp32 the angle at position 100,000 is off by 0.004.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles = positions[..., None].double() * theta**-exponents
    return angles.cos().float()[..., None, :], angles.sin().float()[..., None, :]


def rotate(x_BTHK: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + K/2) of each head by their angle: the halves' layout of Llama in `transformers`."""
    cos, sin = (part.to(x_BTHK.dtype) for part in rotation)
    first, second = x_BTHK.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
