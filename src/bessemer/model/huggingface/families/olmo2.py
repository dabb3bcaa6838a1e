"""OLMo-2: norms after the sublayers, and over all queries and keys at once."""

from __future__ import annotations

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.families import llama
from bessemer.model.huggingface.family import Family, heads_fill_the_width, no_window
from bessemer.model.huggingface.rope import KEYS as ROPE_KEYS


def _obstacles(config: ModelConfig) -> list[str]:
    return heads_fill_the_width(config) + no_window(config)


FAMILY = Family(
    name="olmo2",
    title="OLMo-2",
    summary=("RMSNorm, after the sublayer", "rotary", "SwiGLU", "RMSNorm on all queries and keys at once"),
    architecture="Olmo2ForCausalLM",
    classifier="Olmo2ForSequenceClassification",
    options={"qk_norm": "full", "norm_position": "output"},
    keys={ours: theirs for ours, theirs in llama.NAMES.items() if ours != "head_dim"},
    defaults={"tie_embeddings": False, "norm_eps": 1e-5},
    tensors=llama.tensors("post_attention_layernorm", "post_feedforward_layernorm"),
    fixed={"hidden_act": "silu", "attention_bias": False},
    dropout=("attention_dropout",),
    reads=ROPE_KEYS,
    read=llama.read,
    write=llama.write,
    obstacles=_obstacles,
    examples={"OLMo-2": {"head_dim": 8}},
)
