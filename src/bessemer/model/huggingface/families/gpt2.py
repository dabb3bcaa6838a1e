"""GPT-2: LayerNorm, learned positions, biases, one key/value head for each query head."""

from __future__ import annotations

from bessemer.model.config import ALL_BIASES, ModelConfig
from bessemer.model.huggingface.family import (
    Family,
    Tensors,
    Values,
    heads_fill_the_width,
    no_window,
    one_kv_head_a_query_head,
)
from bessemer.model.huggingface.settings import Settings

_SUMMARY = "belongs to a head for choosing among answers, which is not read"


def _obstacles(config: ModelConfig) -> list[str]:
    scales = [f"query_scalar = {config.query_scalar}"] if config.query_scalar not in (0, 1) else []
    return one_kv_head_a_query_head(config) + heads_fill_the_width(config) + no_window(config) + scales


def _read(settings: Settings, values: Values) -> Values:
    return {"query_scalar": 0 if settings.flag("scale_attn_weights", True) else 1}


def _write(config: ModelConfig) -> Values:
    return {"scale_attn_weights": not config.query_scalar}


FAMILY = Family(
    name="gpt2",
    title="GPT-2",
    summary=("LayerNorm, before", "learned", "GELU", "biases, tied"),
    architecture="GPT2LMHeadModel",
    classifier="GPT2ForSequenceClassification",
    options={
        "qk_norm": "none", "norm": "layer", "positions": "learned", "gated": False, "activation": "gelu_tanh",
        **ALL_BIASES, "norm_eps": 1e-5, "tie_embeddings": True,
    },
    keys={
        "vocabulary": "vocab_size", "layers": "n_layer", "width": "n_embd", "heads": "n_head", "mlp_width": "n_inner",
        "max_positions": "n_positions", "norm_eps": "layer_norm_epsilon", "tie_embeddings": "tie_word_embeddings",
        "activation": "activation_function", "inverse_layer_scale": "scale_attn_by_inverse_layer_idx",
    },
    defaults={
        "mlp_width": None, "norm_eps": 1e-5, "tie_embeddings": True, "activation": "gelu_tanh", "inverse_layer_scale": False,
    },
    tensors=Tensors(
        outer=(
            ("transformer.wte", "embedding"),
            ("transformer.wpe", "position_embedding"),
            ("transformer.ln_f", "norm"),
            ("score", "classifier"),
            ("lm_head", "head"),
        ),
        prefix="transformer.h.{}",
        block=(
            ("attn.c_attn", "attention.qkv"),
            ("attn.c_proj", "attention.out"),
            ("mlp.c_fc", "mlp.up"),
            ("mlp.c_proj", "mlp.down"),
            ("ln_1", "attention_norm"),
            ("ln_2", "mlp_norm"),
        ),
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        base="transformer.",
    ),
    free=("query_scalar",),
    reads=("scale_attn_weights",),
    read=_read,
    write=_write,
    fixed={"add_cross_attention": False},
    dropout={
        "resid_pdrop": "hidden", "embd_pdrop": "hidden", "attn_pdrop": "attention", "summary_first_dropout": "classifier",
    },
    harmless={
        "n_ctx": "an older name of n_positions, which transformers reads",
        "reorder_and_upcast_attn": "the order and precision of the same products",
        **dict.fromkeys(("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"), _SUMMARY),
    },
    obstacles=_obstacles,
    examples={
        "GPT-2": {"kv_heads": 4, "head_dim": 8},
        "GPT-2, scores divided by the layer, ReLU": {
            "kv_heads": 4, "head_dim": 8, "inverse_layer_scale": True, "activation": "relu", "layers": 3,
        },
        "GPT-2, scores as they are": {"kv_heads": 4, "head_dim": 8, "query_scalar": 1, "activation": "gelu"},
        "GPT-2, classifier": {"kv_heads": 4, "head_dim": 8, "labels": 5},
    },
)  # fmt: skip
