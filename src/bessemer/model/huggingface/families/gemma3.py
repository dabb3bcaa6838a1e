"""Gemma 3, its text models: Gemma 2's block with QK-norm, and rotary positions of two kinds."""

from __future__ import annotations

from bessemer.model.config import ModelConfig, RopeScaling
from bessemer.model.huggingface.families import gemma2
from bessemer.model.huggingface.family import Family, Values, one_attention_bias
from bessemer.model.huggingface.rope import read_by_layer_type, read_scaling, write_by_layer_type, write_scaling
from bessemer.model.huggingface.settings import Settings

_BASES = ("rope_theta", "rope_local_base_freq")


def _read(settings: Settings, values: Values) -> Values:
    rope = read_by_layer_type(settings, values["max_positions"], _BASES, (1_000_000.0, 10_000.0))
    older = settings.table("rope_scaling")
    if list(older):
        if rope["rope_scaling"] is not None:
            raise settings.wrong("rope_scaling", "stands beside rope_parameters; remove one of them")
        rope["rope_scaling"] = read_scaling(older, values["max_positions"])
    every = settings.integer("sliding_window_pattern", 6)
    return {
        **rope, **gemma2.read_windows(settings, values["layers"], every), **gemma2.read_scalar(values),
        "out_bias": values["qkv_bias"], "logit_soft_cap": gemma2.read_cap(settings, "final_logit_softcapping", 0.0),
    }  # fmt: skip


def _write(config: ModelConfig) -> Values:
    rope = write_by_layer_type(config, _BASES)
    if config.window_rope_scaling is None:  # as every version of transformers reads it
        rope |= {"rope_parameters": None, "rope_scaling": write_scaling(config.rope_scaling)}
    return {
        **{key: value for key, value in rope.items() if value is not None}, **gemma2.write_windows(config),
        **gemma2.write_scalar(config), "final_logit_softcapping": config.logit_soft_cap or None, "attn_logit_softcapping": None,
    }  # fmt: skip


FAMILY = Family(
    name="gemma3",
    model_type="gemma3_text",
    title="Gemma 3 (text)",
    summary=(
        "RMSNorm, before and after the sublayer", "rotary, of two bases", "GeGLU (tanh)",
        "windows of 1,024 in five layers of six, QK-norm, embeddings times the root of the width, tied",
    ),
    architecture="Gemma3ForCausalLM",
    classifier="Gemma3TextForSequenceClassification",
    options=gemma2.OPTIONS | {
        "qk_norm": "head", "window": 1024, "global_every": 6, "global_last": True, "rope_theta": 1_000_000.0,
        "window_rope_theta": 10_000.0,
    },
    keys=gemma2.NAMES,
    defaults=gemma2.DEFAULTS,
    tensors=gemma2.TENSORS,
    fixed={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    dropout={"attention_dropout": "attention"},
    free=("out_bias", "logit_soft_cap", "window_rope_scaling"),
    reads=("rope_parameters", "rope_scaling", *_BASES, *gemma2.WINDOW_KEYS, "sliding_window_pattern",
           "_sliding_window_pattern", "final_logit_softcapping"),
    read=_read,
    write=_write,
    obstacles=one_attention_bias,
    examples={
        "Gemma 3": {"window": 7, "global_every": 3, "layers": 4, "query_scalar": 24},
        "Gemma 3, layers without a window stretched": {
            "window": 7, "global_every": 2, "layers": 3, "rope_scaling": RopeScaling("linear", 8.0), "logit_soft_cap": 3.0,
        },
        "Gemma 3, both kinds of layers stretched": {
            "window": 7, "global_layers": (0, 1), "global_every": 0, "global_last": False, "layers": 3,
            "rope_scaling": RopeScaling("yarn", 4.0, original_length=6), "window_rope_scaling": RopeScaling("linear", 2.0),
        },
        "Gemma 3, classifier": {"window": 7, "global_every": 2, "labels": 5},
    },
)  # fmt: skip
