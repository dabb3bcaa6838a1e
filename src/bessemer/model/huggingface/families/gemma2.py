"""Gemma 2: norms at both ends of a sublayer, a window in every other layer, soft caps; and what Gemma 3 shares with it."""

from __future__ import annotations

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.families import llama
from bessemer.model.huggingface.family import Family, Tensors, Values, one_attention_bias, one_rope_base
from bessemer.model.huggingface.rope import KEYS as ROPE_KEYS
from bessemer.model.huggingface.settings import Settings
from bessemer.model.huggingface.windows import GLOBAL, WINDOWED, pattern, read_layer_types, write_layer_types

OPTIONS: Values = {
    "qk_norm": "none", "norm_position": "both", "zero_centred_norm": True, "activation": "gelu_tanh",
    "scale_embedding": True, "tie_embeddings": True, "window": 4096,
}  # fmt: skip
NAMES = (
    llama.NAMES | llama.ATTENTION_BIAS | {"activation": "hidden_activation", "query_scalar": "query_pre_attn_scalar"}
)
DEFAULTS: Values = {
    "tie_embeddings": True, "norm_eps": 1e-6, "head_dim": 256, "kv_heads": 4, "activation": "gelu_tanh", "qkv_bias": False,
    "query_scalar": 256,
}  # fmt: skip
_LLAMA = llama.tensors(mlp_norm="pre_feedforward_layernorm")
TENSORS = Tensors(
    outer=_LLAMA.outer,
    prefix=_LLAMA.prefix,
    block=(
        *_LLAMA.block,
        ("post_attention_layernorm", "attention_output_norm"),
        ("post_feedforward_layernorm", "mlp_output_norm"),
    ),
)
WINDOW_KEYS = ("sliding_window", "layer_types")


def read_windows(settings: Settings, layers: int, every: int) -> Values:
    """The windows: in all layers but each `every`-th, unless layer_types says where."""
    types = read_layer_types(settings, layers)
    if types is None:
        types = [WINDOWED if (number + 1) % every else GLOBAL for number in range(layers)]
    if WINDOWED not in types:
        return {"window": 0}
    if "sliding_window" in settings and settings.raw("sliding_window") is None:
        raise settings.wrong("sliding_window", f"gives no width, but layer_types has {WINDOWED} layers")
    return {"window": settings.integer("sliding_window", 4096), **pattern(types)}


def write_windows(config: ModelConfig) -> Values:
    """The inverse."""
    return {"sliding_window": config.window or 4096, "layer_types": write_layer_types(config)}


def read_cap(settings: Settings, key: str, default: float) -> float:
    """A soft cap; null: none."""
    return 0.0 if key in settings and settings.raw(key) is None else settings.number(key, default)


def read_scalar(values: Values) -> Values:
    """query_scalar, of which 0 says that it is the width of a head."""
    return {"query_scalar": 0 if values["query_scalar"] == values["head_dim"] else values["query_scalar"]}


def write_scalar(config: ModelConfig) -> Values:
    """The inverse."""
    return {"query_pre_attn_scalar": config.query_scalar or config.head_dim}


def _read(settings: Settings, values: Values) -> Values:
    return {
        **llama.read_with_biases(settings, values), **read_windows(settings, values["layers"], 2), **read_scalar(values),
        "attention_soft_cap": read_cap(settings, "attn_logit_softcapping", 50.0),
        "logit_soft_cap": read_cap(settings, "final_logit_softcapping", 30.0),
    }  # fmt: skip


def _write(config: ModelConfig) -> Values:
    return {
        **llama.write(config), **write_windows(config), **write_scalar(config),
        "attn_logit_softcapping": config.attention_soft_cap or None,
        "final_logit_softcapping": config.logit_soft_cap or None,
    }  # fmt: skip


def _obstacles(config: ModelConfig) -> list[str]:
    return one_attention_bias(config) + one_rope_base(config)


FAMILY = Family(
    name="gemma2",
    title="Gemma 2",
    summary=(
        "RMSNorm, before and after the sublayer", "rotary", "GeGLU (tanh)",
        "windows of 4,096 in every other layer, soft caps, embeddings times the root of the width, tied",
    ),
    architecture="Gemma2ForCausalLM",
    classifier="Gemma2ForSequenceClassification",
    options=OPTIONS | {
        "global_every": 2, "global_last": True, "attention_soft_cap": 50.0, "logit_soft_cap": 30.0,
    },
    keys=NAMES,
    defaults=DEFAULTS,
    tensors=TENSORS,
    fixed={"use_bidirectional_attention": None},
    harmless={"hidden_act": "of older versions; hidden_activation is what is computed with"},
    dropout={"attention_dropout": "attention"},
    free=("out_bias", "attention_soft_cap", "logit_soft_cap"),
    reads=(*ROPE_KEYS, *WINDOW_KEYS, "attn_logit_softcapping", "final_logit_softcapping"),
    read=_read,
    write=_write,
    obstacles=_obstacles,
    examples={
        "Gemma 2": {"window": 7, "attention_soft_cap": 2.0, "logit_soft_cap": 3.0, "query_scalar": 24, "layers": 4},
        "Gemma 2, no soft caps, biases": {
            "window": 7, "attention_soft_cap": 0.0, "logit_soft_cap": 0.0, "qkv_bias": True, "out_bias": True, "kv_heads": 1,
        },
        "Gemma 2, classifier": {"window": 7, "attention_soft_cap": 2.0, "labels": 5},
    },
)  # fmt: skip
