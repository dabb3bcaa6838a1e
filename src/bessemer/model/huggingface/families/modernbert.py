"""ModernBERT: an encoder with rotary positions, GeGLU and windows in two layers of three."""

from __future__ import annotations

from bessemer.model.config import ModelConfig, RopeScaling
from bessemer.model.huggingface.activations import read_activation, write_activation
from bessemer.model.huggingface.family import (
    Family,
    Tensors,
    Values,
    heads_fill_the_width,
    one_attention_bias,
    one_kv_head_a_query_head,
)
from bessemer.model.huggingface.rope import read_by_layer_type, write_by_layer_type
from bessemer.model.huggingface.settings import Settings
from bessemer.model.huggingface.windows import GLOBAL, WINDOWED, pattern, read_layer_types, write_layer_types

_BASES = ("global_rope_theta", "local_rope_theta")
_ONLY_TRAINING = "only training computes with it"


def _read(settings: Settings, values: Values) -> Values:
    if settings.raw("classifier_activation") is not None:
        head = read_activation(settings, "classifier_activation")
    else:
        head = "gelu"
    if head != values["activation"]:
        raise settings.wrong("classifier_activation", "is not supported; only the same as hidden_activation is")
    types = read_layer_types(settings, values["layers"])
    every = settings.integer("global_attn_every_n_layers", 3)
    if types is None:
        types = [GLOBAL if number % every == 0 else WINDOWED for number in range(values["layers"])]
    return {
        **read_by_layer_type(settings, values["max_positions"], _BASES, (160_000.0, 10_000.0)), **pattern(types),
        "out_bias": values["qkv_bias"],
        "pooling": {"mean": "mean"}.get(settings.text("classifier_pooling", "cls"), "first"),
    }  # fmt: skip


def _write(config: ModelConfig) -> Values:
    return {
        **write_by_layer_type(config, _BASES),
        "global_attn_every_n_layers": config.global_every or config.layers + 1,
        "layer_types": write_layer_types(config),
        "classifier_activation": write_activation(config.activation),
        "classifier_pooling": "mean" if config.pooling == "mean" else "cls",
    }


def _obstacles(config: ModelConfig) -> list[str]:
    found = one_kv_head_a_query_head(config) + heads_fill_the_width(config) + one_attention_bias(config)
    if not config.window or config.window % 2:
        found.append(f"window = {config.window} (it must be even)")
    if config.labels and not config.head_bias:
        found.append("head_bias = False in a classifier")
    return found


FAMILY = Family(
    name="modernbert",
    title="ModernBERT",
    summary=("LayerNorm, before", "rotary", "GeGLU", "both sides, windows of 128 in two layers of three, tied"),
    architecture="ModernBertForMaskedLM",
    classifier="ModernBertForSequenceClassification",
    options={
        "qk_norm": "none", "norm": "layer", "norm_bias": False, "activation": "gelu", "causal": False,
        "embedding_norm": True, "first_norm": False, "head_transform": True, "head_bias": True, "window": 128,
        "global_every": 3, "rope_theta": 160_000.0, "window_rope_theta": 10_000.0, "norm_eps": 1e-5,
        "tie_embeddings": True,
    },
    keys={
        "vocabulary": "vocab_size", "layers": "num_hidden_layers", "width": "hidden_size",
        "heads": "num_attention_heads", "mlp_width": "intermediate_size", "max_positions": "max_position_embeddings",
        "norm_eps": "norm_eps", "window": "local_attention", "tie_embeddings": "tie_word_embeddings",
        "activation": "hidden_activation", "qkv_bias": "attention_bias", "mlp_bias": "mlp_bias",
        "norm_bias": "norm_bias", "transform_bias": "classifier_bias", "head_bias": "decoder_bias",
    },
    defaults={
        "norm_eps": 1e-5, "window": 128, "tie_embeddings": True, "activation": "gelu", "qkv_bias": False,
        "mlp_bias": False, "norm_bias": False, "transform_bias": False, "head_bias": True,
    },
    tensors=Tensors(
        outer=(
            ("model.embeddings.tok_embeddings", "embedding"),
            ("model.embeddings.norm", "embedding_norm"),
            ("model.final_norm", "norm"),
            ("head.dense", "head.transform.dense"),
            ("head.norm", "head.transform.norm"),
            ("head.dense", "classifier.transform.dense"),
            ("head.norm", "classifier.transform.norm"),
            ("classifier", "classifier"),
            ("decoder.bias", "head.bias"),
            ("decoder.weight", "head.weight"),
        ),
        prefix="model.layers.{}",
        block=(
            ("attn.Wqkv", "attention.qkv"),
            ("attn.Wo", "attention.out"),
            ("mlp.Wi", "mlp.gate_up"),
            ("mlp.Wo", "mlp.down"),
            ("attn_norm", "attention_norm"),
            ("mlp_norm", "mlp_norm"),
        ),
    ),
    free=("out_bias", "window_rope_scaling"),
    dropout={
        "embedding_dropout": "hidden", "mlp_dropout": "hidden", "attention_dropout": "attention",
        "classifier_dropout": "classifier",
    },
    harmless={
        "sparse_prediction": _ONLY_TRAINING,
        "sparse_pred_ignore_index": _ONLY_TRAINING,
        "initializer_cutoff_factor": "initial weights",
        "deterministic_flash_attn": "a choice of kernel",
        "reference_compile": "a choice of kernel",
        "repad_logits_with_grad": "a choice of layout in memory",
        "position_embedding_type": "of an older code, which reads nothing else than rotary positions",
    },
    reads=("classifier_activation", "rope_parameters", *_BASES, "layer_types", "global_attn_every_n_layers",
           "classifier_pooling"),
    read=_read,
    write=_write,
    obstacles=_obstacles,
    poolings=("first", "mean"),
    token_keys=("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id"),
    examples={
        "ModernBERT": {"kv_heads": 4, "head_dim": 8, "window": 8, "layers": 4},
        "ModernBERT, all layers global": {"kv_heads": 4, "head_dim": 8, "window": 8, "global_every": 1},
        "ModernBERT, biases, yarn in layers without a window": {
            "kv_heads": 4, "head_dim": 8, "window": 8, "layers": 4, "norm_bias": True, "activation": "gelu_tanh",
            "qkv_bias": True, "out_bias": True, "mlp_bias": True, "transform_bias": True, "head_bias": False,
            "rope_scaling": RopeScaling("yarn", 4.0, original_length=6),
        },
        "ModernBERT, classifier": {
            "kv_heads": 4, "head_dim": 8, "window": 8, "layers": 4, "labels": 5, "pooling": "mean",
        },
    },
)  # fmt: skip
