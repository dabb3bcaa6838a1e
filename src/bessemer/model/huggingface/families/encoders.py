"""Encoders: BERT, RoBERTa and ModernBERT."""

from __future__ import annotations

from dataclasses import replace

from bessemer.model.config import ALL_BIASES, RotaryScaling
from bessemer.model.huggingface import rope, rules
from bessemer.model.huggingface.family import Family, Tensors

BERT = Family(
    name="bert", model_type="bert", title="BERT",
    summary=("LayerNorm, after the sum", "learned", "GELU", "both sides, biases, tied, a layer before the output"),
    architecture="BertForMaskedLM", classifier="BertForSequenceClassification",
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
    rules=(rules.NO_GQA, rules.HEADS_FILL_WIDTH, rules.NO_WINDOW, rope.ONE_ROPE_BASE),
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
    harmless=(  # of the original code; transformers does not read them
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
        "pooler_type",
    ),
    poolings=("first",),
    examples={
        "BERT": {"kv_heads": 4, "head_dim": 8},
        "BERT, SiLU, three token types": {"kv_heads": 4, "head_dim": 8, "activation": "silu", "token_types": 3},
        "BERT, classifier": {"kv_heads": 4, "head_dim": 8, "labels": 5, "pooling": "first"},
    },
)  # fmt: skip

ROBERTA = replace(
    BERT, name="roberta", model_type="roberta", title="RoBERTa",
    summary=(
        "LayerNorm, after the sum", "learned, after the padding token's", "GELU",
        "both sides, biases, tied, a layer before the output",
    ),
    architecture="RobertaForMaskedLM", classifier="RobertaForSequenceClassification",
    options=BERT.options | {"position_padding": 0, "token_types": 1},
    rules=(*BERT.rules, rules.PADDED_POSITIONS, rules.EXACT_GELU_HEAD),
    tensors=replace(
        BERT.tensors,
        outer=(
            ("roberta.embeddings.word_embeddings", "embedding"),
            ("roberta.embeddings.position_embeddings", "position_embedding"),
            ("roberta.embeddings.token_type_embeddings", "type_embedding"),
            ("roberta.embeddings.LayerNorm", "embedding_norm"),
            ("classifier.dense", "classifier.transform.dense"),
            ("classifier.out_proj", "classifier"),
            ("lm_head.dense", "head.transform.dense"),
            ("lm_head.layer_norm", "head.transform.norm"),
            ("lm_head.bias", "head.bias"),
            ("lm_head.decoder.weight", "head.weight"),
        ),
        prefix="roberta.encoder.layer.{}",
        base="roberta.",
        unread=("roberta.pooler.", "lm_head.decoder.bias"),
    ),
    harmless=(),
    token_keys=("bos_token_id", "eos_token_id"),
    examples={
        "RoBERTa": {"kv_heads": 4, "head_dim": 8, "position_padding": 1},
        "RoBERTa, padding within the text": {"kv_heads": 4, "head_dim": 8, "position_padding": 5},
        "RoBERTa, classifier": {"kv_heads": 4, "head_dim": 8, "position_padding": 1, "labels": 5, "pooling": "first"},
    },
)  # fmt: skip

MODERNBERT = Family(
    name="modernbert", model_type="modernbert", title="ModernBERT",
    summary=("LayerNorm, before", "rotary", "GeGLU", "both sides, windows of 128 in two layers of three, tied"),
    architecture="ModernBertForMaskedLM", classifier="ModernBertForSequenceClassification",
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
    rules=(
        rules.NO_GQA, rules.HEADS_FILL_WIDTH, rules.ATTENTION_BIAS, rules.HEAD_ACTIVATION, rules.MODERNBERT_WINDOWS,
        rope.rope_by_layer_type(("global_rope_theta", "local_rope_theta"), (160_000.0, 10_000.0)), rules.CLASSIFIER_POOLING,
    ),
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
            ("attn.Wqkv", "attention.qkv"), ("attn.Wo", "attention.out"), ("mlp.Wi", "mlp.gate_up"),
            ("mlp.Wo", "mlp.down"), ("attn_norm", "attention_norm"), ("mlp_norm", "mlp_norm"),
        ),
    ),
    dropout={
        "embedding_dropout": "hidden", "mlp_dropout": "hidden", "attention_dropout": "attention",
        "classifier_dropout": "classifier",
    },
    harmless=(
        "sparse_prediction", "sparse_pred_ignore_index",  # only training computes with them
        "initializer_cutoff_factor", "deterministic_flash_attn", "reference_compile", "repad_logits_with_grad",
        "position_embedding_type",  # of an older code, which reads nothing else than rotary positions
    ),
    poolings=("first", "mean"),
    token_keys=("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id"),
    examples={
        "ModernBERT": {"kv_heads": 4, "head_dim": 8, "window": 8, "layers": 4},
        "ModernBERT, all layers global": {"kv_heads": 4, "head_dim": 8, "window": 8, "global_every": 1},
        "ModernBERT, biases, yarn in layers without a window": {
            "kv_heads": 4, "head_dim": 8, "window": 8, "layers": 4, "norm_bias": True, "activation": "gelu_tanh",
            "qkv_bias": True, "out_bias": True, "mlp_bias": True, "transform_bias": True, "head_bias": False,
            "rope_scaling": RotaryScaling("yarn", 4.0, original_length=6),
        },
        "ModernBERT, classifier": {
            "kv_heads": 4, "head_dim": 8, "window": 8, "layers": 4, "labels": 5, "pooling": "mean",
        },
    },
)  # fmt: skip
