"""Qwen3, whose block is ModelConfig's defaults; and the windows that it shares with Qwen2."""

from __future__ import annotations

from bessemer.model.config import ModelConfig, RopeScaling
from bessemer.model.huggingface.families import llama
from bessemer.model.huggingface.family import Family, Values, one_attention_bias, one_rope_base
from bessemer.model.huggingface.rope import KEYS as ROPE_KEYS
from bessemer.model.huggingface.settings import Settings
from bessemer.model.huggingface.windows import GLOBAL, WINDOWED, pattern, read_layer_types, write_layer_types

WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def read(settings: Settings, values: Values) -> Values:
    """Rotary positions and windows."""
    return llama.read(settings, values) | _windows(settings, values["layers"])


def _windows(settings: Settings, layers: int) -> Values:
    """The windows: layers from max_window_layers on, unless layer_types says which."""
    used, first = settings.flag("use_sliding_window", False), settings.integer("max_window_layers", 28, least=0)
    has_width = "sliding_window" not in settings or settings.raw("sliding_window") is not None
    width = settings.integer("sliding_window", 4096) if has_width and used else 0
    types = read_layer_types(settings, layers)
    if types is None:
        types = [WINDOWED if width and number >= first else GLOBAL for number in range(layers)]
    if WINDOWED not in types:
        return {"window": 0}
    if not width:
        raise settings.wrong(
            "layer_types", f"has {WINDOWED} layers, but use_sliding_window and sliding_window give no width"
        )
    return {"window": width, **pattern(types)}


def write(config: ModelConfig) -> Values:
    """Rotary positions and windows."""
    written = llama.write(config)
    if config.window:
        written |= {"use_sliding_window": True, "sliding_window": config.window, "max_window_layers": 0,
                    "layer_types": write_layer_types(config)}  # fmt: skip
    return written


def _read(settings: Settings, values: Values) -> Values:
    return read(settings, values) | {"out_bias": values["qkv_bias"]}


def _obstacles(config: ModelConfig) -> list[str]:
    return one_rope_base(config) + one_attention_bias(config)


FAMILY = Family(
    name="qwen3",
    title="Qwen3",
    summary=("RMSNorm, before", "rotary", "SwiGLU", "RMSNorm on queries and keys of each head"),
    architecture="Qwen3ForCausalLM",
    classifier="Qwen3ForSequenceClassification",
    options={},
    keys=llama.NAMES | llama.ATTENTION_BIAS,
    defaults={
        "tie_embeddings": False,
        "norm_eps": 1e-6,
        "kv_heads": 32,
        "head_dim": 128,
        "activation": "silu",
        "qkv_bias": False,
    },
    tensors=llama.tensors(),
    free=("out_bias",),
    dropout={"attention_dropout": "attention"},
    reads=(*ROPE_KEYS, *WINDOW_KEYS),
    read=_read,
    write=write,
    obstacles=_obstacles,
    examples={
        "Qwen3": {"rope_theta": 1e6},
        "Qwen3, tied, wide heads": {"tie_embeddings": True, "head_dim": 24},
        "Qwen3, attention biases, yarn": {
            "qkv_bias": True,
            "out_bias": True,
            "rope_scaling": RopeScaling("yarn", 4.0, original_length=6, truncate=False),
        },
        "Qwen3, sliding window": {"window": 7, "global_every": 2, "layers": 3},
    },
)
