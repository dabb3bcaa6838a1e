"""ModernBERT: an encoder with rotary positions, GeGLU and windows in two layers of three."""

from __future__ import annotations

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.family import (
    Family,
    Tensors,
    Values,
    heads_fill_the_width,
    one_kv_head_a_query_head,
)
from bessemer.model.huggingface.rope import read_scaling
from bessemer.model.huggingface.settings import Settings
from bessemer.model.huggingface.windows import GLOBAL, WINDOWED, pattern, read_layer_types, write_layer_types

_ONLY_TRAINING = "only training computes with it"


def _read(settings: Settings, values: Values) -> Values:
    tables = settings.table("rope_parameters")
    bases = {}
    for kind, older, base in ((GLOBAL, "global_rope_theta", 160_000.0), (WINDOWED, "local_rope_theta", 10_000.0)):
        table = tables.table(kind)
        if read_scaling(table, values["max_positions"]) is not None:
            raise table.wrong("rope_type", "is not supported for modernbert")
        bases[kind] = table.number("rope_theta", settings.number(older, base))
    types = read_layer_types(settings, values["layers"])
    every = settings.integer("global_attn_every_n_layers", 3)
    if types is None:
        types = [GLOBAL if number % every == 0 else WINDOWED for number in range(values["layers"])]
    return {
        "rope_theta": bases[GLOBAL], "window_rope_theta": bases[WINDOWED], **pattern(types),
        "pooling": {"mean": "mean"}.get(settings.text("classifier_pooling", "cls"), "first"),
    }  # fmt: skip


def _write(config: ModelConfig) -> Values:
    return {
        "global_rope_theta": config.rope_theta,
        "local_rope_theta": config.window_rope_theta or config.rope_theta,
        "global_attn_every_n_layers": config.global_every or config.layers + 1,
        "layer_types": write_layer_types(config),
        "classifier_pooling": "mean" if config.pooling == "mean" else "cls",
    }


def _obstacles(config: ModelConfig) -> list[str]:
    found = one_kv_head_a_query_head(config) + heads_fill_the_width(config)
    if not config.window or config.window % 2:
        found.append(f"window = {config.window} (it must be even)")
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
    },
    defaults={"norm_eps": 1e-5, "window": 128, "tie_embeddings": True},
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
    fixed={
        "hidden_activation": "gelu", "attention_bias": False, "mlp_bias": False, "norm_bias": False,
        "decoder_bias": True, "classifier_bias": False, "classifier_activation": "gelu",
    },
    harmless={
        **dict.fromkeys(("attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout"),
                        "dropout, which only training has"),
        "sparse_prediction": _ONLY_TRAINING,
        "sparse_pred_ignore_index": _ONLY_TRAINING,
        "initializer_cutoff_factor": "initial weights",
        "deterministic_flash_attn": "a choice of kernel",
        "reference_compile": "a choice of kernel",
        "repad_logits_with_grad": "a choice of layout in memory",
        "position_embedding_type": "of an older code, which reads nothing else than rotary positions",
    },
    reads=("rope_parameters", "global_rope_theta", "local_rope_theta", "layer_types", "global_attn_every_n_layers",
           "classifier_pooling"),
    read=_read,
    write=_write,
    obstacles=_obstacles,
    poolings=("first", "mean"),
    token_keys=("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id"),
    examples={
        "ModernBERT": {"kv_heads": 4, "head_dim": 8, "window": 8, "layers": 4},
        "ModernBERT, all layers global": {"kv_heads": 4, "head_dim": 8, "window": 8, "global_every": 1},
        "ModernBERT, classifier": {
            "kv_heads": 4, "head_dim": 8, "window": 8, "layers": 4, "labels": 5, "pooling": "mean",
        },
    },
)  # fmt: skip
