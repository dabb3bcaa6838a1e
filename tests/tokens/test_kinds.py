"""Tokenizers of every kind: the ids of `transformers` on every text, by each library that encodes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors

from bessemer.common.errors import InputError
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer import tokenizer as module
from bessemer.tokens.tokenizer.patterns import pattern_of
from tests.tokens.tokenizer_samples import END, ENDS, HARD, byte_level, corpus, every_kind, random_texts, split

transformers = pytest.importorskip("transformers")
TEXTS = [*HARD, *random_texts(1500)]
BY_GIGATOKEN = {"gpt4", "gpt2", "gpt2-split", "roberta", "llama"}
PATTERNS = [
    pattern_of(*choice)
    for choice in itertools.product(
        ("gpt4", "gpt2"), ("runs", "single", "groups-of-three"), ("runs", "indentation", "single")
    )
]


@pytest.fixture(scope="module")
def kinds() -> dict[str, HuggingFaceTokenizer]:
    return every_kind()


def theirs(path: Path, texts: list[str]) -> list[list[int]]:
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    return [fast(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] for text in texts]


@pytest.mark.parametrize(
    "name", ["gpt4", "gpt2", "roberta", "smollm", "gpt2-split", "nfc", "added", "llama", "unigram", "bert"]
)
def test_the_ids_are_those_of_transformers(kinds: dict[str, HuggingFaceTokenizer], name: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    kinds[name].save(str(path))
    tokenizer = Tokenizer.load(path, ENDS.get(name, END))
    # transformers makes special tokens of text with Unigram, whatever it is asked
    texts = [text for text in TEXTS if name != "unigram" or not tokenizer.special_in(text)]
    wanted = theirs(path, texts)
    faster = tokenizer.accelerate(corpus())
    assert faster.encoder_name == ("gigatoken" if name in BY_GIGATOKEN else "tokenizers") and len(texts) > 1500
    for by in (tokenizer, faster):
        end = [tokenizer.end_of_text]
        assert [ids.tolist() for ids in by.encode_batch(texts)] == [ids + end for ids in wanted]
        assert [by.encode(text) for text in texts[:10]] == wanted[:10]


def odd_kinds() -> dict[str, HuggingFaceTokenizer]:
    """Tokenizers whose model holds the names of special tokens, or makes them of other text."""
    special, end = ["<unk>", "</s>", "<pad>"], ["</s>"]
    words = {name: number for number, name in enumerate([*special, "a", "b", "<", "/", "s", ">", "##s", "##a", "x"])}
    found = {}
    for kind in ("WordLevel", "WordPiece"):
        one = HuggingFaceTokenizer(getattr(models, kind)(words, unk_token="<unk>"))
        one.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        one.normalizer = normalizers.Lowercase()
        one.add_special_tokens(special)
        found[kind] = one
    one = HuggingFaceTokenizer(models.WordLevel(words, unk_token="<unk>"))
    one.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found["end of text that is no added token"] = one
    merges = [("<", "/"), ("</", "s"), ("</s", ">")]
    parts = {
        name: number for number, name in enumerate([*special, "a", "b", "x", "<", "/", "s", ">", "</", "</s", " "])
    }
    one = HuggingFaceTokenizer(models.BPE(parts, merges, unk_token="<unk>"))
    one.add_special_tokens(special)
    found["merges make it"] = one
    one = HuggingFaceTokenizer(models.BPE(parts, [], unk_token="<unk>", ignore_merges=True))
    one.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    one.add_special_tokens(special)
    one.add_tokens(["<b>"])
    found["whole words, with an added token"] = one
    scored = [(name, -float(number)) for name, number in parts.items()]
    one = HuggingFaceTokenizer(models.Unigram(scored, unk_id=0, byte_fallback=False))
    one.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    one.add_special_tokens(end)
    one.post_processor = processors.TemplateProcessing("<pad> $A </s>", special_tokens=[("<pad>", 2), ("</s>", 1)])
    found["Unigram with a normalizer and a token around texts"] = one
    return found


SPELLED = ["{0}", "a {0} b", "a{0}b", "{0}{0}", "{0} {1}", "x {1}", "\n{0}\n", "{2}", "\uff1c/s\uff1e"]


@pytest.mark.parametrize("name", ["gpt4", "nfc", "added", "llama", "unigram", "bert", *odd_kinds()])
def test_no_text_becomes_a_special_token(name: str, tmp_path: Path) -> None:
    inner = {**every_kind(), **odd_kinds()}[name]
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json", ENDS.get(name, END if name in every_kind() else "</s>"))
    names = [*tokenizer.special.values(), "</s>", "<pad>"]
    around = tokenizer.framing
    closed = {*tokenizer.special, tokenizer.end_of_text, *around.before, *around.after} - {tokenizer.unknown_token}
    texts = [form.format(one, one.upper(), other) for form in SPELLED for one, other in itertools.pairwise(names)]
    again = Tokenizer.from_json(tokenizer.to_json(), tokenizer.end_of_text_token)
    for by in (tokenizer, tokenizer.accelerate(["a b"]), again):
        encoded = by.encode_batch(texts)
        assert all(not closed & set(ids[:-1].tolist()) and ids[-1] == tokenizer.end_of_text for ids in encoded)
        assert [by.encode(text) for text in texts] == [ids[:-1].tolist() for ids in encoded]
        assert [by.encode(text) for text in ("a b x", "ab")] == [
            inner.encode(text, add_special_tokens=False).ids for text in ("a b x", "ab")
        ]
    assert tokenizer.special_in(f"a {names[0]}b") == [names[0]] and tokenizer.special_in("a < b") == []
    if tokenizer.id_of("<b>") is not None:  # an added token that is not special is a word
        assert tokenizer.encode("a<b>") == [tokenizer.id_of("a"), tokenizer.id_of("<b>")]


def test_gigatoken_encodes_the_published_patterns() -> None:
    faster = [Tokenizer(byte_level(split(pattern), 500), END).accelerate([*TEXTS, *corpus()]) for pattern in PATTERNS]
    by_gigatoken = {pattern for pattern, one in zip(PATTERNS, faster, strict=True) if one.encoder_name == "gigatoken"}
    assert by_gigatoken == {pattern_of("gpt4"), pattern_of("gpt4", "single"), pattern_of("gpt2")}


def test_other_ids_are_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer of the second library is damaged: a merge is missing, as seen in one token's text alone."""
    tokenizer = Tokenizer(byte_level(split(pattern_of("gpt4"))), END)
    whole = module._for_gigatoken

    def damaged(description: dict[str, Any]) -> dict[str, Any] | None:
        content = whole(description)
        assert content is not None
        content["model"]["merges"].pop()
        return content

    monkeypatch.setattr(module, "_for_gigatoken", damaged)
    assert tokenizer.accelerate([]) is tokenizer
    assert "warning" in capsys.readouterr().err


def test_saved_truncation_and_padding_are_not_applied(kinds: dict[str, HuggingFaceTokenizer], tmp_path: Path) -> None:
    inner = HuggingFaceTokenizer.from_str(kinds["bert"].to_str())
    inner.enable_truncation(8)
    inner.enable_padding(length=32)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json", "[SEP]")
    text = "one two three four five six seven eight nine ten " * 3
    assert [tokenizer.encode(text)] == theirs(tmp_path / "tokenizer.json", [text])
    assert len(tokenizer.encode(text)) > 8
    assert [len(ids) for ids in tokenizer.encode_batch(["one", text])] == [
        len(tokenizer.encode(x)) + 1 for x in ("one", text)
    ]


def test_dropout_is_refused(kinds: dict[str, HuggingFaceTokenizer], tmp_path: Path) -> None:
    inner = HuggingFaceTokenizer.from_str(kinds["gpt4"].to_str())
    inner.model.dropout = 0.1
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="BPE has dropout"):
        Tokenizer.load(tmp_path / "tokenizer.json", END)
