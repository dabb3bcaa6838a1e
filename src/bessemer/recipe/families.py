"""The model families by name: the one list. Each name is a file of model/huggingface/families, which says what it is."""

from __future__ import annotations

from typing import Literal, get_args

FamilyName = Literal[
    "qwen3",
    "qwen2",
    "llama",
    "mistral",
    "smollm3",
    "phi3",
    "gemma2",
    "gemma3",
    "olmo2",
    "gpt2",
    "bert",
    "roberta",
    "modernbert",
]
ENCODERS = ("bert", "roberta", "modernbert")  # attention sees both sides; objective masked
DECODERS = tuple(name for name in get_args(FamilyName) if name not in ENCODERS)
