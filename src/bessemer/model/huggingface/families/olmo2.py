"""OLMo-2: norms after the sublayers, and over all queries and keys at once."""

from __future__ import annotations

from bessemer.model.config import ModelConfig, RopeScaling
from bessemer.model.huggingface.families import llama
from bessemer.model.huggingface.family import Family, heads_fill_the_width
from bessemer.model.huggingface.rope import KEYS as ROPE_KEYS


def _obstacles(config: ModelConfig) -> list[str]:
    return heads_fill_the_width(config) + llama.obstacles(config)


FAMILY = Family(
    name="olmo2",
    title="OLMo-2",
    summary=("RMSNorm, after the sublayer", "rotary", "SwiGLU", "RMSNorm on all queries and keys at once"),
    architecture="Olmo2ForCausalLM",
    classifier="Olmo2ForSequenceClassification",
    options={"qk_norm": "full", "norm_position": "output"},
    keys={ours: theirs for ours, theirs in llama.NAMES.items() if ours != "head_dim"} | llama.ATTENTION_BIAS,
    defaults={"tie_embeddings": False, "norm_eps": 1e-5, "activation": "silu", "qkv_bias": False},
    tensors=llama.tensors("post_attention_layernorm", "post_feedforward_layernorm"),
    free=("out_bias",),
    dropout={"attention_dropout": "attention"},
    reads=ROPE_KEYS,
    read=llama.read_with_biases,
    write=llama.write,
    obstacles=_obstacles,
    examples={
        "OLMo-2": {"head_dim": 8},
        "OLMo-2, attention biases, yarn": {
            "head_dim": 8,
            "qkv_bias": True,
            "out_bias": True,
            "rope_scaling": RopeScaling("yarn", 4.0, original_length=6),
        },
    },
)
