"""A tokenizer.json as llama.cpp has it: tokens, their kinds, merges, and the name of the way text is cut into pieces.

llama.cpp knows each published tokenizer's way of cutting under a name (`tokenizer.ggml.pre`), which other converters find by
a hash of the whole vocabulary, so that they refuse every newly trained one. Here it is found by the way itself: the split
pattern. The regular expressions of each name stand in llama.cpp, src/llama-vocab.cpp, llm_tokenizer_bpe.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bessemer.errors import InputError
from bessemer.tokens.patterns import GPT2, GPT4, Split, pre_tokenization

# Splits whose pieces llama.cpp's pre-tokenizer of that name gives too, compared on texts of every kind in the tests.
PRE: dict[Split, str] = {GPT4: "llama-bpe", replace(GPT4, digits=1): "qwen2", GPT2: "gpt-2"}
PRE_DIGITS_FIRST: dict[Split, str] = {GPT2: "smollm"}  # each digit alone before the split
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType
UNCHANGING = (None, {"type": "NFC"})  # normalizers that leave composed text as it is; llama.cpp applies none


@dataclass(frozen=True)
class Vocabulary:
    """tokens, kinds: one an id; merges: "left right" by rank; pre: llama.cpp's name of the pre-tokenizer."""

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    pre: str


def vocabulary_of(tokenizer_json: Path, rows: int) -> Vocabulary:
    """The vocabulary, filled up with unused tokens to the rows of the embedding.

    Raises InputError, with the reason, for a tokenizer that llama.cpp would encode another way.
    """
    description = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    model, added = description["model"], {token["id"]: token for token in description["added_tokens"]}
    pre = pre_tokenizer(description)
    tokens = {number: token for token, number in model["vocab"].items()}
    tokens |= {number: token["content"] for number, token in added.items()}
    names, kinds = [], []
    for number in range(max(rows, max(tokens) + 1)):
        names.append(tokens.get(number, f"[PAD{number}]"))
        kind = UNUSED if number not in tokens else NORMAL
        if number in added:
            kind = CONTROL if added[number]["special"] else USER_DEFINED
        kinds.append(kind)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return Vocabulary(names, kinds, merges, pre)


def pre_tokenizer(description: dict[str, Any]) -> str:
    """llama.cpp's name for the way a tokenizer.json cuts text. Raises InputError where it has none."""

    def refused(why: str) -> InputError:
        return InputError(f"export --to gguf: the tokenizer {why}; export it with --to hf instead")

    if description["model"].get("type", "BPE") != "BPE" or description["model"].get("byte_fallback"):
        raise refused("is not a byte-level BPE, the only kind that is written to GGUF")
    if description.get("normalizer") not in UNCHANGING:
        kind = description["normalizer"].get("type")
        raise refused(f"changes text before it is cut (normalizer {kind}), which llama.cpp does not")
    # What stands between text and pieces decides; added tokens that are not special are found first by llama.cpp too.
    bare = {**description, "normalizer": None, "added_tokens": [t for t in description["added_tokens"] if t["special"]]}
    found = pre_tokenization(bare)
    if found is None or found.prefix_space:
        raise refused("cuts text in a way for which llama.cpp has no name")
    known = PRE_DIGITS_FIRST if found.digits_first else PRE
    if found.split not in known:
        raise refused(
            "cuts text by a pattern for which llama.cpp has no name; it knows tokenizer.pattern gpt2, and gpt4 or llama3 with "
            'digits "groups-of-three" or "single" and white_space "runs"'
        )
    return known[found.split]
