"""Configurations of the models in the published measurements: Megatron's GPT, Llama, MPT."""

from __future__ import annotations

from typing import Any

from bessemer.model.config import ModelConfig

ALL_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
# LLM Foundry's MPT: hidden size, heads, layers (scripts/train/yamls/pretrain/mpt-*.yaml). All have 50,368 ids, learned positions,
# no biases, tied embeddings.
MPT = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip
# Llama 3: hidden size, layers, heads and MLP width. All have 8 KV heads and 128,256 ids.
LLAMA3 = {
    "8": (4096, 32, 32, 14336),
    "70": (8192, 80, 64, 28672),
    "405": (16384, 126, 128, 53248),
}


def llama3(size: str, sequence: int, layers: int | None = None) -> ModelConfig:
    """Return Llama 3 of a size (Grattafiori et al. 2024, table 3)."""
    hidden, deep, heads, ffn = LLAMA3[size]
    return llama(hidden, layers or deep, heads, 8, ffn, sequence, 128256)


def gpt(hidden: int, layers: int, heads: int, sequence: int, vocabulary: int, **more: Any) -> ModelConfig:
    """Return Megatron's GPT: LayerNorm, biases, learned positions, an MLP of 4 widths, tied embeddings."""
    settings: dict[str, Any] = {
        "norm": "layer", **ALL_BIASES, "positions": "learned", "activation": "gelu_tanh", "gated": False,
        "tie_embeddings": True, "qk_norm": "none",
        "kv_heads": heads, "mlp_width": 4 * hidden, "head_dim": hidden // heads,
    }  # fmt: skip
    return ModelConfig(
        vocabulary=vocabulary, layers=layers, width=hidden, heads=heads, sequence_length=sequence, **(settings | more)
    )  # fmt: skip


def llama(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, sequence: int, vocabulary: int, tied: bool = False
) -> ModelConfig:
    """Return a model with Llama's blocks."""
    return ModelConfig(
        vocabulary=vocabulary, layers=layers, width=hidden, heads=heads, kv_heads=kv_heads, head_dim=hidden // heads,
        mlp_width=ffn, sequence_length=sequence, tie_embeddings=tied, qk_norm="none",
    )  # fmt: skip


def of_size(parameters: float, sequence: int, vocabulary: int = 32000) -> ModelConfig:
    """Return a Llama of about `parameters`: heads of 128, 12 W^2 per block, one layer per 128 of width (as 7B: 32 for 4,096)."""
    width = max(round((parameters * 128 / 12) ** (1 / 3) / 128), 4) * 128
    layers = max(round((parameters - 2 * vocabulary * width) / (12 * width**2)), 1)
    return llama(width, layers, width // 128, width // 128, width * 8 // 3, sequence, vocabulary)


def padded(vocabulary: int, tensor: int) -> int:
    """Return the rows of Megatron's embedding: a multiple of 128 for each tensor rank."""
    return -(-vocabulary // (128 * tensor)) * 128 * tensor


def megatron_flops(batch: int, model: ModelConfig, recompute: bool) -> float:
    """Return the FLOPs of a step by the formula of Narayanan et al. 2021, section 5.1 (attention not halved)."""
    h, layers, s = model.width, model.layers, model.sequence_length
    matmuls = (96 if recompute else 72) * batch * s * layers * h**2
    return matmuls * (1 + s / (6 * h) + model.vocabulary / ((16 if recompute else 12) * layers * h))
