"""The decoder: pre-norm blocks of grouped-query attention and SwiGLU with RMSNorm and rotary positions.

One implementation; its options are the ones `transformers` knows as Llama and Qwen3. Weights that share an input
are one parameter, whose leading dimensions say what is what, so that it is one product and can still be cut by
head, decayed and exported part by part.

Shapes: B sequences, T tokens, D width, H query heads, G key/value heads, R = H / G, K width of a head, F hidden
width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model.attention import Documents, causal_attention
from bessemer.model.config import ModelConfig
from bessemer.model.elementwise import by_head, rms_norm, rotate, swiglu
from bessemer.model.product import Linear, linear


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), in fp32 whatever the input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query causal self-attention with rotary positions and optional QK-norm.

    `qkv` is (G, R + 2, K, D): for each key/value head the R query heads that share it, its key and its value. One
    product serves all three, and a cut along the first dimension is a cut between heads.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.queries = config.heads // config.kv_heads
        self.qkv = nn.Parameter(torch.empty(config.kv_heads, self.queries + 2, config.head_dim, config.width))
        self.out = Linear(config.heads * config.head_dim, config.width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor], documents: Documents | None) -> Tensor:
        joined_BTGRK = linear(x_BTD, self.qkv.flatten(0, 2)).unflatten(-1, self.qkv.shape[:3])  # type: ignore[no-untyped-call]
        q_BTGRK, k_BTGK, v_BTGK = joined_BTGRK.split([self.queries, 1, 1], dim=-2)
        q_BHTK = rotate(self.q_norm(q_BTGRK.flatten(2, 3)), rotation).transpose(1, 2)
        k_BGTK = rotate(self.k_norm(k_BTGK.squeeze(-2)), rotation).transpose(1, 2)
        attended_BHTK = causal_attention(q_BHTK, k_BGTK, by_head(v_BTGK.squeeze(-2)), documents)
        projected: Tensor = self.out(attended_BHTK.transpose(1, 2).flatten(2))
        return projected


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020). `gate_up` is (2, F, D), so that one product serves both."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, config.mlp_width, config.width))
        self.down = Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        projected: Tensor = self.down(swiglu(linear(x_BTD, self.gate_up.flatten(0, 1))))
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
        after: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return after


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
