import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from bessemer.tokens.tokenizer import Tokenizer, description
from bessemer.tokens.tokenizer.description import WordEdges
from tests.tokens.tokenizer_samples import HARD, every_kind


@pytest.fixture(scope="module")
def kinds() -> dict[str, HuggingFaceTokenizer]:
    return every_kind()


def described(inner: HuggingFaceTokenizer) -> dict:
    return json.loads(inner.to_str())


def of(inner: HuggingFaceTokenizer) -> list[bytes]:
    special = {number for number, token in inner.get_added_tokens_decoder().items() if token.special}
    return description.token_byte_values(described(inner), inner.get_vocab(), special)


@pytest.mark.parametrize("name", ["gpt4", "gpt2", "smollm", "gpt2-split", "added", "llama"])
def test_the_pieces_of_a_text_are_the_text(kinds: dict[str, HuggingFaceTokenizer], name: str) -> None:
    inner = kinds[name]
    found, prefix = of(inner), description.prefix_of(described(inner))
    inner.encode_special_tokens = True
    for text in HARD:
        joined = b"".join(found[token] for token in inner.encode(text, add_special_tokens=False).ids)
        said = text.replace("▁", " ") if prefix else text  # in such a vocabulary the mark is a space
        assert joined == (prefix + said.encode() if text else b"")


def test_kinds_and_what_they_change(kinds: dict[str, HuggingFaceTokenizer]) -> None:
    named = {name: description.kind_of(described(inner)) for name, inner in kinds.items()}
    assert named == {
        **dict.fromkeys(("gpt4", "gpt2", "roberta", "smollm", "gpt2-split", "nfc", "added"), "byte-level"),
        "llama": "bpe", "unigram": "unigram", "bert": "wordpiece",
    }  # fmt: skip
    changed = {"gpt4": [], "nfc": ["nfc"], "llama": ["prepend", "replace"], "unigram": ["nfkc", "replace"]}
    assert {name: description.changes(described(kinds[name])) for name in changed} == changed
    assert {name: description.prefix_of(described(inner)) for name, inner in kinds.items()} == {
        **dict.fromkeys(kinds, b""), "roberta": b" ", "llama": b" ", "unigram": b" "
    }  # fmt: skip


def test_words_of_real_text_are_runs_of_letters_and_digits() -> None:
    """On text of ASCII, word starts lie exactly where a regular expression over the characters puts them."""
    text = Path(pytest.__file__).read_text(encoding="utf-8")
    tokenizer = Tokenizer.train([text], 400, "<|endoftext|>")
    sample = "".join(character for character in text if character.isascii())[:4000]
    ids = np.array(tokenizer.encode(sample))
    pieces = tokenizer.token_byte_values()
    starts = WordEdges.of(pieces).starts(ids)
    ends = np.cumsum([len(pieces[token]) for token in ids])
    inside = {
        place for found in re.finditer(r"[A-Za-z0-9]+", sample) for place in range(found.start() + 1, found.end())
    }
    for start, first in zip([0, *ends[:-1]], starts, strict=True):
        assert first == (start not in inside)
