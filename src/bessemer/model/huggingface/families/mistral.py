"""Mistral: Llama whose every layer may have a window."""

from __future__ import annotations

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.families import llama
from bessemer.model.huggingface.family import Family, Values, one_rope_base
from bessemer.model.huggingface.rope import KEYS as ROPE_KEYS
from bessemer.model.huggingface.settings import Settings


def _read(settings: Settings, values: Values) -> Values:
    window = settings.integer("sliding_window", 4096) if _has_window(settings) else 0
    return llama.read(settings, values) | {"window": window}


def _has_window(settings: Settings) -> bool:
    return "sliding_window" not in settings or settings.raw("sliding_window") is not None


def _write(config: ModelConfig) -> Values:
    return llama.write(config) | {"sliding_window": config.window or None}


def obstacles(config: ModelConfig) -> list[str]:
    """What a family with the same window in every layer cannot express."""
    some = config.window and any(not config.window_of(layer) for layer in range(config.layers))
    return (["layers without a window beside those with one"] if some else []) + one_rope_base(config)


FAMILY = Family(
    name="mistral",
    title="Mistral",
    summary=("RMSNorm, before", "rotary", "SwiGLU", "the same window in every layer, or none"),
    architecture="MistralForCausalLM",
    classifier="MistralForSequenceClassification",
    options={"qk_norm": "none"},
    keys=llama.NAMES,
    defaults={"tie_embeddings": False, "norm_eps": 1e-6, "kv_heads": 8, "activation": "silu"},
    tensors=llama.tensors(),
    dropout={"attention_dropout": "attention"},
    reads=(*ROPE_KEYS, "sliding_window"),
    read=_read,
    write=_write,
    obstacles=obstacles,
    examples={
        "Mistral": {"window": 7, "layers": 3},
        "Mistral, no window, wide heads": {"head_dim": 24},
        "Mistral, classifier": {"window": 7, "labels": 5},
    },
)
