"""BERT: an encoder with norms after the sums, learned positions and token types."""

from __future__ import annotations

from bessemer.model.config import ALL_BIASES, ModelConfig
from bessemer.model.huggingface.family import (
    Family,
    Tensors,
    heads_fill_the_width,
    no_window,
    one_kv_head_a_query_head,
)

_POOLER = "of the original code; transformers does not read it"


def obstacles(config: ModelConfig) -> list[str]:
    """What BERT's lineage cannot express."""
    return one_kv_head_a_query_head(config) + heads_fill_the_width(config) + no_window(config)


FAMILY = Family(
    name="bert",
    title="BERT",
    summary=("LayerNorm, after the sum", "learned", "GELU", "both sides, biases, tied, a layer before the output"),
    architecture="BertForMaskedLM",
    classifier="BertForSequenceClassification",
    options={
        "qk_norm": "none", "norm": "layer", "norm_position": "residual", "positions": "learned", "gated": False,
        "activation": "gelu", **ALL_BIASES, "causal": False, "embedding_norm": True, "token_types": 2,
        "head_transform": True, "transform_bias": True, "head_bias": True, "norm_eps": 1e-12, "tie_embeddings": True,
    },
    keys={
        "vocabulary": "vocab_size", "layers": "num_hidden_layers", "width": "hidden_size",
        "heads": "num_attention_heads", "mlp_width": "intermediate_size", "max_positions": "max_position_embeddings",
        "norm_eps": "layer_norm_eps", "token_types": "type_vocab_size", "tie_embeddings": "tie_word_embeddings",
        "activation": "hidden_act",
    },
    defaults={"norm_eps": 1e-12, "token_types": 2, "tie_embeddings": True, "activation": "gelu"},
    tensors=Tensors(
        outer=(
            ("bert.embeddings.word_embeddings", "embedding"),
            ("bert.embeddings.position_embeddings", "position_embedding"),
            ("bert.embeddings.token_type_embeddings", "type_embedding"),
            ("bert.embeddings.LayerNorm", "embedding_norm"),
            ("bert.pooler.dense", "classifier.transform.dense"),
            ("classifier", "classifier"),
            ("cls.predictions.transform.dense", "head.transform.dense"),
            ("cls.predictions.transform.LayerNorm", "head.transform.norm"),
            ("cls.predictions.bias", "head.bias"),
            ("cls.predictions.decoder.weight", "head.weight"),
        ),
        prefix="bert.encoder.layer.{}",
        block=(
            ("attention.self.query", "attention.qkv:q"),
            ("attention.self.key", "attention.qkv:k"),
            ("attention.self.value", "attention.qkv:v"),
            ("attention.output.dense", "attention.out"),
            ("attention.output.LayerNorm", "attention_norm"),
            ("intermediate.dense", "mlp.up"),
            ("output.dense", "mlp.down"),
            ("output.LayerNorm", "mlp_norm"),
        ),
        base="bert.",
        unread=("cls.seq_relationship.", "bert.pooler.", "cls.predictions.decoder.bias"),
    ),
    fixed={"is_decoder": False, "add_cross_attention": False},
    dropout={
        "hidden_dropout_prob": "hidden", "attention_probs_dropout_prob": "attention", "classifier_dropout": "classifier",
    },
    harmless={
        **dict.fromkeys(("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
                         "pooler_size_per_head", "pooler_type"), _POOLER),
    },
    obstacles=obstacles,
    poolings=("first",),
    examples={
        "BERT": {"kv_heads": 4, "head_dim": 8},
        "BERT, SiLU, three token types": {"kv_heads": 4, "head_dim": 8, "activation": "silu", "token_types": 3},
        "BERT, classifier": {"kv_heads": 4, "head_dim": 8, "labels": 5, "pooling": "first"},
    },
)  # fmt: skip
