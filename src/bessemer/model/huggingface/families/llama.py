"""Llama, and what every decoder of its lineage shares: names of settings and tensors."""

from __future__ import annotations

from bessemer.model.config import ModelConfig, RopeScaling
from bessemer.model.huggingface.family import Family, Tensors, Values, no_window, one_attention_bias
from bessemer.model.huggingface.rope import KEYS as ROPE_KEYS
from bessemer.model.huggingface.rope import read_rotary, write_rotary
from bessemer.model.huggingface.settings import Settings

NAMES = {
    "vocabulary": "vocab_size", "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp_width": "intermediate_size",
    "max_positions": "max_position_embeddings", "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}  # fmt: skip
ATTENTION_BIAS = {"qkv_bias": "attention_bias"}  # and out_bias, see `read_with_biases`


def tensors(attention_norm: str = "input_layernorm", mlp_norm: str = "post_attention_layernorm") -> Tensors:
    """The tensors of Llama's lineage; the arguments name a block's two norms."""
    return Tensors(
        outer=(
            ("model.embed_tokens", "embedding"),
            ("model.norm", "norm"),
            ("score", "classifier"),
            ("lm_head", "head"),
        ),
        prefix="model.layers.{}",
        block=(
            ("self_attn.q_proj", "attention.qkv:q"),
            ("self_attn.k_proj", "attention.qkv:k"),
            ("self_attn.v_proj", "attention.qkv:v"),
            ("self_attn.o_proj", "attention.out"),
            ("self_attn.q_norm", "attention.q_norm"),
            ("self_attn.k_norm", "attention.k_norm"),
            ("mlp.gate_proj", "mlp.gate_up:gate"),
            ("mlp.up_proj", "mlp.gate_up:up"),
            ("mlp.down_proj", "mlp.down"),
            (attention_norm, "attention_norm"),
            (mlp_norm, "mlp_norm"),
        ),
    )


def read(settings: Settings, values: Values) -> Values:
    """Rotary positions."""
    return read_rotary(settings, values["max_positions"])


def write(config: ModelConfig) -> Values:
    """Rotary positions."""
    return write_rotary(config)


def read_with_biases(settings: Settings, values: Values) -> Values:
    """Rotary positions, and the biases of attention under one key."""
    return read(settings, values) | {"out_bias": values["qkv_bias"]}


def obstacles(config: ModelConfig) -> list[str]:
    """What Llama cannot express."""
    return no_window(config) + one_attention_bias(config)


FAMILY = Family(
    name="llama",
    title="Llama",
    summary=("RMSNorm, before", "rotary", "SwiGLU", ""),
    architecture="LlamaForCausalLM",
    classifier="LlamaForSequenceClassification",
    options={"qk_norm": "none"},
    keys={**NAMES, **ATTENTION_BIAS, "mlp_bias": "mlp_bias"},
    defaults={"tie_embeddings": False, "norm_eps": 1e-6, "activation": "silu", "qkv_bias": False, "mlp_bias": False},
    tensors=tensors(),
    free=("out_bias",),
    dropout={"attention_dropout": "attention"},
    harmless={"pretraining_tp": "cuts products into pieces whose sum is the same"},
    reads=ROPE_KEYS,
    read=read_with_biases,
    write=write,
    obstacles=obstacles,
    examples={
        "Llama 2": {"kv_heads": 4},
        "Llama 3": {"rope_theta": 500_000.0, "norm_eps": 1e-5, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8)},
        "Llama, positions stretched linearly": {"rope_scaling": RopeScaling("linear", 4.0)},
        "Llama, dynamic positions": {
            "rope_scaling": RopeScaling("dynamic", 3.0, original_length=8),
            "sequence_length": 24,
        },
        "Llama, yarn": {
            "rope_scaling": RopeScaling("yarn", 3.0, original_length=8, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.5)
        },
        "Llama, longrope": {
            "head_dim": 8,
            "rope_scaling": RopeScaling(
                "longrope", 3.0, original_length=8, short_factor=(1.0, 1.1, 1.2, 1.3), long_factor=(1.0, 2.0, 3.0, 4.0)
            ),
        },
        "Llama, biases, ReLU squared": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "activation": "relu2"},
        "Llama, tied, one key/value head": {"tie_embeddings": True, "kv_heads": 1},
        "Llama, classifier": {"labels": 5},
    },
)
