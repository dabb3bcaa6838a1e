"""Decoders: Llama and its lineage, Gemma and GPT-2."""

from __future__ import annotations

from dataclasses import replace

from bessemer.model.config import ALL_BIASES, RotaryScaling
from bessemer.model.huggingface import rope, rules
from bessemer.model.huggingface.family import Family, Tensors

_KEYS = {
    "vocabulary": "vocab_size", "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp_width": "intermediate_size",
    "max_positions": "max_position_embeddings", "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}  # fmt: skip
_KEYS_WITHOUT_HEAD_DIM = {ours: theirs for ours, theirs in _KEYS.items() if ours != "head_dim"}
_BIAS_KEY = {"qkv_bias": "attention_bias"}
_YARN = RotaryScaling("yarn", 4.0, original_length=6)
_LONGROPE = RotaryScaling(
    "longrope", 3.0, original_length=8, short_factor=(1.0, 1.1, 1.2, 1.3), long_factor=(1.0, 2.0, 3.0, 4.0)
)
_TENSORS = Tensors(
    outer=(("model.embed_tokens", "embedding"), ("model.norm", "norm"), ("score", "classifier"), ("lm_head", "head")),
    prefix="model.layers.{}",
    block=(
        ("self_attn.q_proj", "attention.qkv:q"),
        ("self_attn.k_proj", "attention.qkv:k"),
        ("self_attn.v_proj", "attention.qkv:v"),
        ("self_attn.o_proj", "attention.out"),
        ("self_attn.q_norm", "attention.q_norm"),
        ("self_attn.k_norm", "attention.k_norm"),
        ("mlp.gate_proj", "mlp.gate_up:gate"),
        ("mlp.up_proj", "mlp.gate_up:up"),
        ("mlp.down_proj", "mlp.down"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "mlp_norm"),
    ),
)

LLAMA = Family(
    name="llama", model_type="llama", title="Llama",
    summary=("RMSNorm, before", "rotary", "SwiGLU", ""),
    architecture="LlamaForCausalLM", classifier="LlamaForSequenceClassification",
    options={"qk_norm": "none"},
    keys={**_KEYS, **_BIAS_KEY, "mlp_bias": "mlp_bias"},
    defaults={"tie_embeddings": False, "norm_eps": 1e-6, "activation": "silu", "qkv_bias": False, "mlp_bias": False},
    rules=(rules.NO_WINDOW, rope.same_rope(), rules.ATTENTION_BIAS),
    tensors=_TENSORS,
    dropout={"attention_dropout": "attention"},
    harmless=("pretraining_tp",),  # cuts matmuls into pieces whose sum is the same
    examples={
        "Llama 2": {"kv_heads": 4},
        "Llama 3": {"rope_theta": 500_000.0, "norm_eps": 1e-5, "rope_scaling": RotaryScaling("llama3", 8.0, 1.0, 4.0, 8)},
        "Llama, positions stretched linearly": {"rope_scaling": RotaryScaling("linear", 4.0)},
        "Llama, dynamic positions": {"rope_scaling": RotaryScaling("dynamic", 3.0, original_length=8), "sequence_length": 24},
        "Llama, yarn": {"rope_scaling": RotaryScaling(
            "yarn", 3.0, original_length=8, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.5
        )},
        "Llama, longrope": {"head_dim": 8, "rope_scaling": _LONGROPE},
        "Llama, biases, ReLU squared": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "activation": "relu2"},
        "Llama, tied, one key/value head": {"tie_embeddings": True, "kv_heads": 1},
        "Llama, classifier": {"labels": 5},
    },
)  # fmt: skip
_CHILD = replace(LLAMA, harmless=(), keys=_KEYS)

MISTRAL = replace(
    _CHILD, name="mistral", model_type="mistral", title="Mistral",
    summary=("RMSNorm, before", "rotary", "SwiGLU", "the same window in every layer, or none"),
    architecture="MistralForCausalLM", classifier="MistralForSequenceClassification",
    defaults={"tie_embeddings": False, "norm_eps": 1e-6, "kv_heads": 8, "activation": "silu"},
    rules=(rules.same_window(4096), rope.same_rope()),
    examples={
        "Mistral": {"window": 7, "layers": 3},
        "Mistral, no window, wide heads": {"head_dim": 24},
        "Mistral, classifier": {"window": 7, "labels": 5},
    },
)  # fmt: skip

QWEN2 = replace(
    _CHILD, name="qwen2", model_type="qwen2", title="Qwen2",
    summary=("RMSNorm, before", "rotary", "SwiGLU", "biases on queries, keys and values"),
    architecture="Qwen2ForCausalLM", classifier="Qwen2ForSequenceClassification",
    options={"qk_norm": "none", "qkv_bias": True},
    defaults={"tie_embeddings": False, "norm_eps": 1e-6, "kv_heads": 32, "activation": "silu"},
    rules=(rope.same_rope(), rules.QWEN_WINDOWS),
    examples={
        "Qwen2": {"rope_theta": 1e6, "tie_embeddings": True},
        "Qwen2, yarn": {"rope_theta": 1e6, "rope_scaling": _YARN},
        "Qwen2, windows from the third layer on": {"window": 7, "layers": 4, "global_layers": (0, 1)},
        "Qwen2, classifier": {"labels": 5},
    },
)  # fmt: skip

QWEN3 = replace(  # whose block is ModelConfig's defaults
    _CHILD, name="qwen3", model_type="qwen3", title="Qwen3",
    summary=("RMSNorm, before", "rotary", "SwiGLU", "RMSNorm on queries and keys of each head"),
    architecture="Qwen3ForCausalLM", classifier="Qwen3ForSequenceClassification",
    options={},
    keys=_KEYS | _BIAS_KEY,
    defaults=QWEN2.defaults | {"head_dim": 128, "qkv_bias": False},
    rules=(rope.same_rope(), rules.QWEN_WINDOWS, rules.ATTENTION_BIAS),
    examples={
        "Qwen3": {"rope_theta": 1e6},
        "Qwen3, tied, wide heads": {"tie_embeddings": True, "head_dim": 24},
        "Qwen3, attention biases, yarn": {
            "qkv_bias": True, "out_bias": True, "rope_scaling": replace(_YARN, truncate=False),
        },
        "Qwen3, sliding window": {"window": 7, "global_every": 2, "layers": 3},
    },
)  # fmt: skip

SMOLLM3 = replace(
    _CHILD, name="smollm3", model_type="smollm3", title="SmolLM3",
    summary=("RMSNorm, before", "rotary in three layers of four", "SwiGLU", "tied"),
    architecture="SmolLM3ForCausalLM", classifier="SmolLM3ForSequenceClassification",
    options={"qk_norm": "none", "unrotated_every": 4, "rope_theta": 2_000_000.0, "tie_embeddings": True},
    keys=LLAMA.keys,
    defaults=LLAMA.defaults | {"tie_embeddings": True, "kv_heads": 4},
    rules=(rules.NO_ROPE_LAYERS, rope.same_rope(2_000_000.0), rules.SMOLLM_WINDOWS, rules.ATTENTION_BIAS),
    examples={
        "SmolLM3": {"layers": 4},
        "SmolLM3, layers without rotary positions by number, yarn, biases": {
            "layers": 3, "unrotated_every": 0, "unrotated_layers": (0, 1), "mlp_bias": True, "qkv_bias": True,
            "out_bias": True, "rope_scaling": _YARN,
        },
        "SmolLM3, windows in the layers without": {"layers": 4, "unrotated_every": 2, "window": 7, "global_every": 2},
        "SmolLM3, classifier": {"unrotated_every": 2, "labels": 5},
    },
)  # fmt: skip

PHI3 = replace(
    _CHILD, name="phi3", model_type="phi3", title="Phi-3",
    summary=("RMSNorm, before", "rotary", "SwiGLU", "the same window in every layer, or none; longrope"),
    architecture="Phi3ForCausalLM", classifier="Phi3ForSequenceClassification",
    options={"qk_norm": "none", "norm_eps": 1e-5},
    keys=_KEYS_WITHOUT_HEAD_DIM,
    defaults={"tie_embeddings": False, "norm_eps": 1e-5, "activation": "silu"},
    rules=(rope.PHI_ROPE, rules.same_window(0), rope.ONE_ROPE_BASE, rules.HEADS_FILL_WIDTH, rope.ONLY_LONGROPE),
    tensors=replace(_TENSORS, block=(
        ("self_attn.qkv_proj", "attention.qkv"),
        ("self_attn.o_proj", "attention.out"),
        ("mlp.gate_up_proj", "mlp.gate_up"),
        ("mlp.down_proj", "mlp.down"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "mlp_norm"),
    )),
    dropout={"attention_dropout": "attention", "resid_pdrop": "hidden", "embd_pdrop": "hidden"},
    examples={
        "Phi-3": {"head_dim": 8, "window": 7},
        "Phi-3, half of each head rotated": {"head_dim": 8, "rotary_fraction": 0.5},
        "Phi-3, longrope beyond its first length": {"head_dim": 8, "rope_scaling": _LONGROPE},
        "Phi-3, longrope, attention factor, partly rotated": {
            "head_dim": 8, "rotary_fraction": 0.5, "rope_scaling": RotaryScaling(
                "longrope", 2.0, original_length=12, attention_factor=1.3, short_factor=(1.0, 1.1), long_factor=(2.0, 3.0)
            ),
        },
        "Phi-3, classifier": {"head_dim": 8, "labels": 5},
    },
)  # fmt: skip

OLMO2 = replace(
    _CHILD, name="olmo2", model_type="olmo2", title="OLMo-2",
    summary=("RMSNorm, after the sublayer", "rotary", "SwiGLU", "RMSNorm on all queries and keys at once"),
    architecture="Olmo2ForCausalLM", classifier="Olmo2ForSequenceClassification",
    options={"qk_norm": "full", "norm_position": "output"},
    keys=_KEYS_WITHOUT_HEAD_DIM | _BIAS_KEY,
    defaults={"tie_embeddings": False, "norm_eps": 1e-5, "activation": "silu", "qkv_bias": False},
    rules=(rules.HEADS_FILL_WIDTH, rules.NO_WINDOW, rope.same_rope(), rules.ATTENTION_BIAS),
    tensors=replace(_TENSORS, block=(
        *_TENSORS.block[:-2],
        ("post_attention_layernorm", "attention_norm"),
        ("post_feedforward_layernorm", "mlp_norm"),
    )),
    examples={
        "OLMo-2": {"head_dim": 8},
        "OLMo-2, attention biases, yarn": {"head_dim": 8, "qkv_bias": True, "out_bias": True, "rope_scaling": _YARN},
    },
)  # fmt: skip

_GEMMA_OPTIONS: rules.Values = {
    "qk_norm": "none", "norm_position": "both", "zero_centred_norm": True, "activation": "gelu_tanh",
    "scale_embedding": True, "tie_embeddings": True,
}  # fmt: skip
GEMMA2 = replace(
    _CHILD, name="gemma2", model_type="gemma2", title="Gemma 2",
    summary=(
        "RMSNorm, before and after the sublayer", "rotary", "GeGLU (tanh)",
        "windows of 4,096 in every other layer, soft caps, embeddings times the root of the width, tied",
    ),
    architecture="Gemma2ForCausalLM", classifier="Gemma2ForSequenceClassification",
    options=_GEMMA_OPTIONS | {
        "window": 4096, "global_every": 2, "global_last": True, "attention_soft_cap": 50.0, "logit_soft_cap": 30.0,
    },
    keys=_KEYS | _BIAS_KEY | {"activation": "hidden_activation", "query_scalar": "query_pre_attn_scalar"},
    defaults={
        "tie_embeddings": True, "norm_eps": 1e-6, "head_dim": 256, "kv_heads": 4, "activation": "gelu_tanh",
        "qkv_bias": False, "query_scalar": 256,
    },
    rules=(
        rules.ATTENTION_BIAS, rope.same_rope(), rules.gemma_windows(2), rules.QUERY_SCALAR,
        rules.soft_cap("attention_soft_cap", "attn_logit_softcapping", 50.0),
        rules.soft_cap("logit_soft_cap", "final_logit_softcapping", 30.0),
    ),
    tensors=replace(_TENSORS, block=(
        *_TENSORS.block[:-1],
        ("pre_feedforward_layernorm", "mlp_norm"),
        ("post_attention_layernorm", "attention_output_norm"),
        ("post_feedforward_layernorm", "mlp_output_norm"),
    )),
    fixed={"use_bidirectional_attention": None},
    harmless=("hidden_act",),  # of older versions; hidden_activation is what is computed with
    examples={
        "Gemma 2": {"window": 7, "attention_soft_cap": 2.0, "logit_soft_cap": 3.0, "query_scalar": 24, "layers": 4},
        "Gemma 2, no soft caps, biases": {
            "window": 7, "attention_soft_cap": 0.0, "logit_soft_cap": 0.0, "qkv_bias": True, "out_bias": True, "kv_heads": 1,
        },
        "Gemma 2, classifier": {"window": 7, "attention_soft_cap": 2.0, "labels": 5},
    },
)  # fmt: skip

GEMMA3 = replace(  # its text models
    GEMMA2, name="gemma3", model_type="gemma3_text", title="Gemma 3 (text)",
    summary=(
        "RMSNorm, before and after the sublayer", "rotary, of two bases", "GeGLU (tanh)",
        "windows of 1,024 in five layers of six, QK-norm, embeddings times the root of the width, tied",
    ),
    architecture="Gemma3ForCausalLM", classifier="Gemma3TextForSequenceClassification",
    options=_GEMMA_OPTIONS | {
        "qk_norm": "head", "window": 1024, "global_every": 6, "global_last": True, "rope_theta": 1_000_000.0,
        "window_rope_theta": 10_000.0,
    },
    rules=(
        rules.ATTENTION_BIAS,
        rope.rope_by_layer_type(("rope_theta", "rope_local_base_freq"), (1_000_000.0, 10_000.0), has_rope_scaling=True),
        rules.gemma_windows(6, ("sliding_window_pattern", "_sliding_window_pattern")), rules.QUERY_SCALAR,
        rules.soft_cap("logit_soft_cap", "final_logit_softcapping", 0.0),
    ),
    fixed={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    harmless=(),
    examples={
        "Gemma 3": {"window": 7, "global_every": 3, "layers": 4, "query_scalar": 24},
        "Gemma 3, layers without a window stretched": {
            "window": 7, "global_every": 2, "layers": 3, "rope_scaling": RotaryScaling("linear", 8.0), "logit_soft_cap": 3.0,
        },
        "Gemma 3, both kinds of layers stretched": {
            "window": 7, "global_layers": (0, 1), "global_every": 0, "global_last": False, "layers": 3,
            "rope_scaling": _YARN, "window_rope_scaling": RotaryScaling("linear", 2.0),
        },
        "Gemma 3, classifier": {"window": 7, "global_every": 2, "labels": 5},
    },
)  # fmt: skip

GPT2 = Family(
    name="gpt2", model_type="gpt2", title="GPT-2",
    summary=("LayerNorm, before", "learned", "GELU", "biases, tied"),
    architecture="GPT2LMHeadModel", classifier="GPT2ForSequenceClassification",
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
        "mlp_width": None, "norm_eps": 1e-5, "tie_embeddings": True, "activation": "gelu_tanh",
        "inverse_layer_scale": False,
    },
    rules=(rules.NO_GQA, rules.HEADS_FILL_WIDTH, rules.NO_WINDOW, rope.ONE_ROPE_BASE, rules.SCALE_ATTENTION),
    tensors=Tensors(
        outer=(
            ("transformer.wte", "embedding"), ("transformer.wpe", "position_embedding"), ("transformer.ln_f", "norm"),
            ("score", "classifier"), ("lm_head", "head"),
        ),
        prefix="transformer.h.{}",
        block=(
            ("attn.c_attn", "attention.qkv"), ("attn.c_proj", "attention.out"), ("mlp.c_fc", "mlp.up"),
            ("mlp.c_proj", "mlp.down"), ("ln_1", "attention_norm"), ("ln_2", "mlp_norm"),
        ),
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        base="transformer.",
    ),
    fixed={"add_cross_attention": False},
    dropout={
        "resid_pdrop": "hidden", "embd_pdrop": "hidden", "attn_pdrop": "attention", "summary_first_dropout": "classifier",
    },
    harmless=(
        "n_ctx",  # an older name of n_positions, which transformers reads
        "reorder_and_upcast_attn",  # the order and precision of the same matmuls
        # of a head for choosing among answers, which is not read
        "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    ),
    examples={
        "GPT-2": {"kv_heads": 4, "head_dim": 8},
        "GPT-2, scores divided by the layer, ReLU": {
            "kv_heads": 4, "head_dim": 8, "inverse_layer_scale": True, "activation": "relu", "layers": 3,
        },
        "GPT-2, scores as they are": {"kv_heads": 4, "head_dim": 8, "query_scalar": 1, "activation": "gelu"},
        "GPT-2, classifier": {"kv_heads": 4, "head_dim": 8, "labels": 5},
    },
)  # fmt: skip
