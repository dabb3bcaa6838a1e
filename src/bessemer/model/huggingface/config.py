"""A model's configuration in the Hugging Face layout (`config.json`), read and written; no torch.

Both ways go through the same table of names. What a family cannot say is an error, never left out.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from bessemer.errors import InputError
from bessemer.model.config import FAMILIES, ModelConfig, RopeScaling

ARCHITECTURES = {
    "qwen3": ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    "llama": ("LlamaForCausalLM", "LlamaForSequenceClassification"),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2ForSequenceClassification"),
    "gpt2": ("GPT2LMHeadModel", "GPT2ForSequenceClassification"),
    "bert": ("BertForMaskedLM", "BertForSequenceClassification"),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
}

_LLAMA_NAMES = {
    "vocabulary": "vocab_size", "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp_width": "intermediate_size",
    "max_positions": "max_position_embeddings", "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings",
}  # fmt: skip
_NAMES: dict[str, dict[str, str]] = {
    "qwen3": _LLAMA_NAMES,
    "llama": _LLAMA_NAMES,
    "olmo2": {ours: theirs for ours, theirs in _LLAMA_NAMES.items() if ours != "head_dim"},
    "gpt2": {
        "vocabulary": "vocab_size", "layers": "n_layer", "width": "n_embd", "heads": "n_head", "mlp_width": "n_inner",
        "max_positions": "n_positions", "norm_eps": "layer_norm_epsilon", "tie_embeddings": "tie_word_embeddings",
    },
    "bert": {
        "vocabulary": "vocab_size", "layers": "num_hidden_layers", "width": "hidden_size",
        "heads": "num_attention_heads", "mlp_width": "intermediate_size", "max_positions": "max_position_embeddings",
        "norm_eps": "layer_norm_eps", "token_types": "type_vocab_size", "tie_embeddings": "tie_word_embeddings",
    },
    "modernbert": {
        "vocabulary": "vocab_size", "layers": "num_hidden_layers", "width": "hidden_size",
        "heads": "num_attention_heads", "mlp_width": "intermediate_size", "max_positions": "max_position_embeddings",
        "norm_eps": "norm_eps", "window": "local_attention", "tie_embeddings": "tie_word_embeddings",
    },
}  # fmt: skip
# Values of theirs that our block has no option for: a folder that says otherwise is refused. Written on export.
_FIXED: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0},
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0},
    "olmo2": {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0},
    "gpt2": {
        "activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    "bert": {"hidden_act": "gelu", "is_decoder": False, "add_cross_attention": False},
    "modernbert": {
        "hidden_activation": "gelu", "attention_bias": False, "mlp_bias": False, "norm_bias": False,
        "decoder_bias": True, "classifier_bias": False, "classifier_activation": "gelu",
    },
}  # fmt: skip
# Dropout is not trained with here, so an export says 0; a folder may say otherwise, since a forward pass has none.
_NO_DROPOUT: dict[str, tuple[str, ...]] = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}
_DEFAULTS: dict[str, dict[str, Any]] = {  # of transformers, for keys a config.json may leave out
    "llama": {"tie_embeddings": False, "norm_eps": 1e-6},
    "qwen3": {"tie_embeddings": False, "norm_eps": 1e-6},
    "olmo2": {"tie_embeddings": False, "norm_eps": 1e-5},
    "gpt2": {"norm_eps": 1e-5, "tie_embeddings": True},
    "bert": {"norm_eps": 1e-12, "token_types": 2, "tie_embeddings": True},
    "modernbert": {"norm_eps": 1e-5, "window": 128, "tie_embeddings": True},
}
_SET_BY_DIMENSIONS = (
    "vocabulary", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "sequence_length", "max_positions",
    "norm_eps", "tie_embeddings", "rope_theta", "window_rope_theta", "rope_scaling", "window", "global_every", "labels",
    "pooling", "token_types",
)  # fmt: skip


def family_of(config: ModelConfig) -> str:
    """The family whose options a configuration has. Raises InputError, with what stands in the way, when none has."""
    obstacles = {}
    for family, options in FAMILIES.items():
        standard = {field.name: field.default for field in fields(ModelConfig)} | options
        obstacles[family] = [
            f"{field.name} = {getattr(config, field.name)}"
            for field in fields(ModelConfig)
            if field.name not in _SET_BY_DIMENSIONS and getattr(config, field.name) != standard[field.name]
        ] + list(_dimension_obstacles(family, config))
        if not obstacles[family]:
            return family
    family, reasons = min(obstacles.items(), key=lambda item: len(item[1]))
    raise InputError(
        f"model: no family of transformers has this block; the nearest is {family}, which has no {' and no '.join(reasons)}"
    )


def _dimension_obstacles(family: str, config: ModelConfig) -> list[str]:
    found = []
    if family in ("gpt2", "bert", "modernbert") and config.kv_heads != config.heads:
        found.append(f"kv_heads = {config.kv_heads} of {config.heads} heads")
    if family in ("gpt2", "bert", "modernbert", "olmo2") and config.heads * config.head_dim != config.width:
        found.append(f"head_dim = {config.head_dim} other than width / heads")
    if family not in ("qwen3", "modernbert") and config.window:
        found.append(f"window = {config.window}")
    if family != "modernbert" and config.window_rope_theta is not None:
        found.append(f"window_rope_theta = {config.window_rope_theta}")
    if family == "modernbert" and (not config.window or config.window % 2):
        found.append(f"window = {config.window} (it must be even)")
    poolings = {"bert": ("first",), "modernbert": ("first", "mean")}.get(family, ("last",))
    if config.labels and config.pooling not in poolings:
        found.append(f"pooling = {config.pooling}")
    return found


def to_hugging_face(config: ModelConfig, end_of_text: int) -> dict[str, Any]:
    """The config.json of a configuration. Raises InputError when no family of transformers has this block."""
    family = family_of(config)
    values = config.to_dict() | {"max_positions": config.positions_length}
    written: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family][1 if config.labels else 0]],
        "model_type": family,
        **{theirs: values[ours] for ours, theirs in _NAMES[family].items()},
        **_FIXED[family],
        **dict.fromkeys(_NO_DROPOUT.get(family, ()), 0.0),
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": end_of_text,
        "dtype": "float32",
        "torch_dtype": "float32",  # the same, for transformers before 4.56
    }
    if config.causal:
        written["use_cache"] = True
    if config.labels:
        written |= {"id2label": {str(n): f"LABEL_{n}" for n in range(config.labels)},
                    "label2id": {f"LABEL_{n}": n for n in range(config.labels)}}  # fmt: skip
    if family == "modernbert":
        written |= {
            "global_rope_theta": config.rope_theta,
            "local_rope_theta": config.window_rope_theta or config.rope_theta,
            "global_attn_every_n_layers": config.global_every or config.layers + 1,
            "layer_types": _layer_types(config),
            "cls_token_id": end_of_text, "sep_token_id": end_of_text,
            "classifier_pooling": "mean" if config.pooling == "mean" else "cls",
        }  # fmt: skip
    elif config.positions == "rotary":
        written |= {"rope_theta": config.rope_theta, "rope_scaling": _scaling_to(config.rope_scaling)}
    if family == "qwen3" and config.window:
        written |= {"use_sliding_window": True, "sliding_window": config.window, "max_window_layers": 0,
                    "layer_types": _layer_types(config)}  # fmt: skip
    return written


def _layer_types(config: ModelConfig) -> list[str]:
    return ["sliding_attention" if config.window_of(n) else "full_attention" for n in range(config.layers)]


def _scaling_to(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency,
        "high_freq_factor": scaling.high_frequency,
        "original_max_position_embeddings": scaling.original_length,
    }


def read_config(folder: Path) -> tuple[str, ModelConfig]:
    """Family and configuration of a folder in the Hugging Face layout. Raises InputError on what is not supported."""
    path = folder / "config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: not there; `hf:` needs a folder in the Hugging Face layout") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    family = given.get("model_type")
    if family not in FAMILIES:
        raise InputError(f"{path}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    for key, wanted in _FIXED[family].items():
        if given.get(key, wanted) != wanted and not key.endswith("dropout"):
            raise InputError(f"{path}: {key} = {given[key]!r} is not supported; only {wanted!r} is")
    values: dict[str, Any] = dict(FAMILIES[family]) | _DEFAULTS[family]
    for ours, theirs in _NAMES[family].items():
        if given.get(theirs) is not None:
            values[ours] = given[theirs]
    missing = [
        _NAMES[family][key] for key in ("vocabulary", "layers", "width", "heads", "max_positions") if key not in values
    ]
    if missing:
        raise InputError(f"{path}: {missing[0]} is missing")
    if values["width"] % values["heads"] and "head_dim" not in values:
        raise InputError(f"{path}: num_attention_heads {values['heads']} does not divide hidden_size {values['width']}")
    values.setdefault("kv_heads", values["heads"])
    if values["heads"] % values["kv_heads"]:
        raise InputError(f"{path}: num_key_value_heads {values['kv_heads']} does not divide {values['heads']} heads")
    values.setdefault("head_dim", values["width"] // values["heads"])
    values.setdefault("mlp_width", 4 * values["width"])
    values |= _positions_from(path, family, given, values)
    architecture = (given.get("architectures") or [""])[0]
    if architecture == ARCHITECTURES[family][1]:
        values["labels"] = len(given.get("id2label") or {}) or int(given.get("num_labels", 2))
        values["pooling"] = "last" if values.get("causal", True) else "first"
        if family == "modernbert" and given.get("classifier_pooling") == "mean":
            values["pooling"] = "mean"
    return family, ModelConfig(sequence_length=values["max_positions"], **values)


def recipe_keys(folder: Path) -> dict[str, Any]:
    """What a folder's config.json says, as keys of the recipe's [model] table."""
    family, config = read_config(folder)
    keys = (
        "vocabulary", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "max_positions", "qk_norm",
        "tie_embeddings", "window", "global_every", "rope_theta", "window_rope_theta", "rope_scaling", "norm_eps",
    )  # fmt: skip
    values = config.to_dict()
    return {"family": family, **{key: values[key] for key in keys}}


def _positions_from(path: Path, family: str, given: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Rotary bases, their scaling, and windows."""
    found: dict[str, Any] = {}
    parameters = given.get("rope_parameters") or {}
    if family == "modernbert":
        whole, local = (parameters.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
        for part in (whole, local):
            if part.get("rope_type", "default") != "default":
                raise InputError(f"{path}: rope_type {part['rope_type']!r} is not supported for modernbert")
        found["rope_theta"] = float(whole.get("rope_theta") or given.get("global_rope_theta") or 160_000.0)
        found["window_rope_theta"] = float(local.get("rope_theta") or given.get("local_rope_theta") or 10_000.0)
    elif family not in ("gpt2", "bert"):
        found["rope_theta"] = float(parameters.get("rope_theta") or given.get("rope_theta") or 10_000.0)
        found["rope_scaling"] = _scaling_from(path, parameters or given.get("rope_scaling") or {})
    types = given.get("layer_types")
    if family == "modernbert" and types is None:
        found["global_every"] = int(given.get("global_attn_every_n_layers", 3))
    elif types and "sliding_attention" in types:
        if family not in ("qwen3", "modernbert"):
            raise InputError(f"{path}: sliding_attention layers are not supported for {family}")
        if family == "qwen3":
            found["window"] = int(given["sliding_window"])
        whole_layers = [n for n, kind in enumerate(types) if kind == "full_attention"]
        every = next((n for n in whole_layers if n > 0), len(types)) if whole_layers else 0
        if whole_layers != (list(range(0, len(types), every)) if every else []):
            raise InputError(
                f"{path}: layer_types has no period; only one full_attention layer in every N is supported"
            )
        found["global_every"] = every
    elif family == "qwen3" and given.get("use_sliding_window"):
        raise InputError(f"{path}: use_sliding_window needs layer_types, which say where the windows are")
    return found


def _scaling_from(path: Path, given: dict[str, Any]) -> RopeScaling | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(given["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(given["factor"]),
            float(given["low_freq_factor"]),
            float(given["high_freq_factor"]),
            int(given["original_max_position_embeddings"]),
        )
    raise InputError(f"{path}: rope_type {kind!r} is not supported; supported: default, linear, llama3")
