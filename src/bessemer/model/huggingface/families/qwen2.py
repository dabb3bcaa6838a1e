"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows from some layer on."""

from __future__ import annotations

from bessemer.model.config import RopeScaling
from bessemer.model.huggingface.families import llama, qwen3
from bessemer.model.huggingface.family import Family, one_rope_base
from bessemer.model.huggingface.rope import KEYS as ROPE_KEYS

FAMILY = Family(
    name="qwen2",
    title="Qwen2",
    summary=("RMSNorm, before", "rotary", "SwiGLU", "biases on queries, keys and values"),
    architecture="Qwen2ForCausalLM",
    classifier="Qwen2ForSequenceClassification",
    options={"qk_norm": "none", "qkv_bias": True},
    keys=llama.NAMES,
    defaults={"tie_embeddings": False, "norm_eps": 1e-6, "kv_heads": 32, "activation": "silu"},
    tensors=llama.tensors(),
    dropout={"attention_dropout": "attention"},
    reads=(*ROPE_KEYS, *qwen3.WINDOW_KEYS),
    read=qwen3.read,
    write=qwen3.write,
    obstacles=one_rope_base,
    examples={
        "Qwen2": {"rope_theta": 1e6, "tie_embeddings": True},
        "Qwen2, yarn": {"rope_theta": 1e6, "rope_scaling": RopeScaling("yarn", 4.0, original_length=6)},
        "Qwen2, windows from the third layer on": {"window": 7, "layers": 4, "global_layers": (0, 1)},
        "Qwen2, classifier": {"labels": 5},
    },
)
