"""SmolLM3: Llama of which every fourth layer has no rotary positions."""

from __future__ import annotations

from bessemer.model.config import ModelConfig, RopeScaling
from bessemer.model.huggingface.families import llama
from bessemer.model.huggingface.family import Family, Values, one_attention_bias, one_rope_base
from bessemer.model.huggingface.rope import KEYS as ROPE_KEYS
from bessemer.model.huggingface.rope import read_rotary
from bessemer.model.huggingface.settings import Settings
from bessemer.model.huggingface.windows import GLOBAL, WINDOWED, pattern, read_layer_types, write_layer_types


def _read(settings: Settings, values: Values) -> Values:
    layers = values["layers"]
    rotated, every = settings.integers("no_rope_layers"), settings.integer("no_rope_layer_interval", 4)
    if not rotated:
        rotated = [int((number + 1) % every != 0) for number in range(layers)]
    if len(rotated) < layers:
        raise settings.wrong("no_rope_layers", f"has {len(rotated)} entries for {layers} layers")
    without = tuple(number for number in range(layers) if not rotated[number])
    regular = without and without == tuple(range(without[0], layers, without[0] + 1))
    return {
        **read_rotary(settings, values["max_positions"], 2_000_000.0), "out_bias": values["qkv_bias"],
        "unrotated_every": without[0] + 1 if regular else 0, "unrotated_layers": () if regular else without,
        **_windows(settings, layers, without),
    }  # fmt: skip


def _windows(settings: Settings, layers: int, without: tuple[int, ...]) -> Values:
    """Windows, where there are any: in the layers without rotary positions, unless layer_types says where."""
    width = 0 if settings.raw("sliding_window") is None else settings.integer("sliding_window")
    if not width or not settings.flag("use_sliding_window", False):
        return {"window": 0}
    types = read_layer_types(settings, layers)
    if types is None:
        types = [WINDOWED if number in without else GLOBAL for number in range(layers)]
    return {"window": width, **pattern(types)} if WINDOWED in types else {"window": 0}


def _write(config: ModelConfig) -> Values:
    layers = range(config.layers)
    written = llama.write(config) | {
        "no_rope_layers": [int(config.rope_of(number) is not None) for number in layers],
        "no_rope_layer_interval": config.unrotated_every or config.layers + 1,
        "layer_types": write_layer_types(config), "use_sliding_window": config.window > 0,
    }  # fmt: skip
    return written | ({"sliding_window": config.window} if config.window else {})


def _obstacles(config: ModelConfig) -> list[str]:
    return one_rope_base(config) + one_attention_bias(config)


FAMILY = Family(
    name="smollm3",
    title="SmolLM3",
    summary=("RMSNorm, before", "rotary in three layers of four", "SwiGLU", "tied"),
    architecture="SmolLM3ForCausalLM",
    classifier="SmolLM3ForSequenceClassification",
    options={"qk_norm": "none", "unrotated_every": 4, "rope_theta": 2_000_000.0, "tie_embeddings": True},
    keys=llama.FAMILY.keys,
    defaults={
        "tie_embeddings": True, "norm_eps": 1e-6, "kv_heads": 4, "activation": "silu", "qkv_bias": False, "mlp_bias": False,
    },
    tensors=llama.tensors(),
    dropout={"attention_dropout": "attention"},
    free=("out_bias", "unrotated_every", "unrotated_layers"),
    reads=(*ROPE_KEYS, "no_rope_layers", "no_rope_layer_interval", "layer_types", "use_sliding_window", "sliding_window",
           "max_window_layers"),
    read=_read,
    write=_write,
    obstacles=_obstacles,
    examples={
        "SmolLM3": {"layers": 4},
        "SmolLM3, layers without rotary positions by number, yarn, biases": {
            "layers": 3, "unrotated_every": 0, "unrotated_layers": (0, 1), "mlp_bias": True, "qkv_bias": True, "out_bias": True,
            "rope_scaling": RopeScaling("yarn", 4.0, original_length=6),
        },
        "SmolLM3, windows in the layers without": {"layers": 4, "unrotated_every": 2, "window": 7, "global_every": 2},
        "SmolLM3, classifier": {"unrotated_every": 2, "labels": 5},
    },
)  # fmt: skip
