"""The tokenizer: split patterns, ids equal to `transformers` for each encoding library, and the bytes of tokens."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HuggingFaceTokenizer

from bessemer.common.errors import InputError
from bessemer.tokens.tokenizer import Tokenizer, description
from bessemer.tokens.tokenizer import tokenizer as module
from bessemer.tokens.tokenizer.description import WordEdges
from bessemer.tokens.tokenizer.patterns import GPT2, GPT4, pattern_of
from tests.tokens.tokenizer_samples import END, ENDS, HARD, byte_level, corpus, every_kind, random_texts, split


def test_split_patterns_equal_the_published_ones() -> None:
    # openai/tiktoken, tiktoken_ext/openai_public.py and meta-llama/llama3, llama/tokenizer.py
    llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    assert pattern_of("llama3", None, "runs") == pattern_of("gpt4", None, "runs") == llama3
    assert pattern_of("gpt2", None, "runs") == gpt2
    assert (llama3, gpt2) == (GPT4, GPT2)


@pytest.mark.parametrize(
    ("pattern", "digits", "white_space", "text", "pieces"),
    [
        ("gpt4", None, "runs", "in 1234567 ways", ["in", " ", "123", "456", "7", " ways"]),
        ("gpt4", "single", "runs", "in 1234567 ways", ["in", " ", *"1234567", " ways"]),
        ("gpt4", "runs", "runs", "in 1234567 ways", ["in", " ", "1234567", " ways"]),
        ("gpt2", None, "runs", "in 1234567 ways", ["in", " 1234567", " ways"]),
        ("gpt2", "groups-of-three", "runs", "in 1234567 ways", ["in", " 123", "456", "7", " ways"]),
        ("gpt4", None, "runs", "a:\n        return  x", ["a", ":\n", "       ", " return", " ", " x"]),
        ("gpt4", None, "indentation", "a\n        return  x", ["a", "\n        ", "return", " ", " x"]),
        ("gpt4", None, "single", "a\n        return  x", ["a", "\n", *" " * 7, " return", " ", " x"]),
    ],
)
def test_digits_and_white_space_are_split_as_configured(
    pattern: str, digits: str | None, white_space: str, text: str, pieces: list[str]
) -> None:
    splitter = pre_tokenizers.Split(Regex(pattern_of(pattern, digits, white_space)), "isolated")
    assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == pieces


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = Path(__file__).read_text(encoding="utf-8")
    return Tokenizer.train([text, Path(pytest.__file__).read_text(encoding="utf-8")], 420, END)


def test_a_vocabulary_that_the_text_cannot_support_is_an_error() -> None:
    with pytest.raises(InputError, match="tokenizer.vocabulary: 5000"):
        Tokenizer.train(["a short text"], 5000, END)


def test_tokenizers_are_loaded_from_files_and_folders(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json())
    loaded = Tokenizer.load(path, END)
    assert loaded.sha256 == tokenizer.sha256 and loaded.mask_token is None
    for end, mask in (("<eos>", None), (END, "<|mask|>")):
        with pytest.raises(InputError, match=rf"tokenizer.*{mask or end!r}".replace("|", r"\|")):
            Tokenizer.load(path, end, mask)
    path.write_text("{}")
    with pytest.raises(InputError, match="tokenizer.json"):
        Tokenizer.load(path, END)
    with pytest.raises(InputError, match="tokenizer.path"):
        Tokenizer.load(tmp_path / "none.json", END)


def test_a_mask_token_is_special_and_never_comes_from_text() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    tokenizer = Tokenizer.train([text], 420, END, "<|mask|>")
    assert (tokenizer.end_of_text, tokenizer.mask_token, tokenizer.vocabulary) == (0, 1, 420)
    assert tokenizer.token_bytes()[[0, 1]].tolist() == [0, 0]
    assert Tokenizer.from_json(tokenizer.to_json(), END, "<|mask|>").mask_token == 1
    for one in (tokenizer, tokenizer.accelerate([text])):
        assert 1 not in one.encode("a <|mask|> b")
        assert tokenizer.decode(one.encode("a <|mask|> b")) == "a <|mask|> b"
    with pytest.raises(InputError, match="tokenizer.vocabulary: 257.* 258 "):
        Tokenizer.train([text], 257, END, "<|mask|>")


def test_invalid_text_is_an_error(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_marked):
        with pytest.raises(InputError, match="'caf'.*UTF-8"):
            encode("caf\udce9")


TEXTS = [*HARD, *random_texts(1500)]
BY_GIGATOKEN = {"gpt4", "gpt2", "gpt2-split", "roberta", "llama"}
PATTERNS = [
    pattern_of(*choice)
    for choice in itertools.product(
        ("gpt4", "gpt2"), ("runs", "single", "groups-of-three"), ("runs", "indentation", "single")
    )
]


@pytest.fixture
def kinds() -> dict[str, HuggingFaceTokenizer]:
    return every_kind()


def theirs(path: Path, texts: list[str]) -> list[list[int]]:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    return [fast(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] for text in texts]


@pytest.mark.parametrize(
    "name", ["gpt4", "gpt2", "roberta", "smollm", "gpt2-split", "nfc", "added", "llama", "unigram", "bert"]
)
def test_ids_equal_those_of_transformers(kinds: dict[str, HuggingFaceTokenizer], name: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    kinds[name].save(str(path))
    tokenizer = Tokenizer.load(path, ENDS.get(name, END))
    # transformers turns text into special tokens with Unigram, whatever the settings
    texts = [text for text in TEXTS if name != "unigram" or not tokenizer.special_in(text)]
    wanted = theirs(path, texts)
    faster = tokenizer.accelerate(corpus())
    assert faster.encoder_name == ("gigatoken" if name in BY_GIGATOKEN else "tokenizers") and len(texts) > 1500
    for by in (tokenizer, faster):
        end = [tokenizer.end_of_text]
        assert [ids.tolist() for ids in by.encode_batch(texts)] == [ids + end for ids in wanted]
        assert [by.encode(text) for text in texts[:10]] == wanted[:10]


def odd(model: Any, special: list[str], **parts: Any) -> HuggingFaceTokenizer:
    made = HuggingFaceTokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.add_special_tokens(special)
    return made


def odd_kinds() -> dict[str, HuggingFaceTokenizer]:
    """Tokenizers whose model contains the names of special tokens, or produces them from other text."""
    special = ["<unk>", "</s>", "<pad>"]
    words = {name: number for number, name in enumerate([*special, "a", "b", "<", "/", "s", ">", "##s", "##a", "x"])}
    parts = {name: number for number, name in enumerate([*special, *"abx</s>", "</", "</s", " "])}
    merges = [("<", "/"), ("</", "s"), ("</s", ">")]
    spaces, lower = {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()}, {"normalizer": normalizers.Lowercase()}
    whole = odd(models.BPE(parts, [], unk_token="<unk>", ignore_merges=True), special, **spaces)
    whole.add_tokens(["<b>"])
    scored = models.Unigram([(name, -float(number)) for name, number in parts.items()], unk_id=0, byte_fallback=False)
    around = processors.TemplateProcessing("<pad> $A </s>", special_tokens=[("<pad>", 2), ("</s>", 1)])
    compatible = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return {
        "WordLevel": odd(models.WordLevel(words, unk_token="<unk>"), special, **spaces, **lower),
        "WordPiece": odd(models.WordPiece(words, unk_token="<unk>"), special, **spaces, **lower),
        "end of text that is no added token": odd(models.WordLevel(words, unk_token="<unk>"), [], **spaces),
        "merges make it": odd(models.BPE(parts, merges, unk_token="<unk>"), special),
        "whole words, with an added token": whole,
        "tokens around texts": odd(scored, special[1:2], normalizer=compatible, post_processor=around),
    }


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


def test_different_ids_of_the_second_library_are_detected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer of the second library is damaged: a missing merge affects one token's text only."""
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


def test_saved_truncation_and_padding_are_ignored_and_dropout_is_an_error(
    kinds: dict[str, HuggingFaceTokenizer], tmp_path: Path
) -> None:
    kinds["bert"].enable_truncation(8)
    kinds["bert"].enable_padding(length=32)
    kinds["bert"].save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json", "[SEP]")
    text = "one two three four five six seven eight nine ten " * 3
    ids = tokenizer.encode(text)
    assert [ids] == theirs(tmp_path / "tokenizer.json", [text]) and len(ids) > 8
    assert [len(one) for one in tokenizer.encode_batch(["one", text])] == [
        len(tokenizer.encode("one")) + 1,
        len(ids) + 1,
    ]
    kinds["gpt4"].model.dropout = 0.1
    kinds["gpt4"].save(str(tmp_path / "other.json"))
    with pytest.raises(InputError, match="tokenizer.path: .*model.dropout"):
        Tokenizer.load(tmp_path / "other.json", END)


def described(inner: HuggingFaceTokenizer) -> dict:
    return json.loads(inner.to_str())


def of(inner: HuggingFaceTokenizer) -> list[bytes]:
    special = {number for number, token in inner.get_added_tokens_decoder().items() if token.special}
    return description.token_byte_values(described(inner), inner.get_vocab(), special)


@pytest.mark.parametrize("name", ["gpt4", "gpt2", "smollm", "gpt2-split", "added", "llama"])
def test_the_bytes_of_the_tokens_join_to_the_text(kinds: dict[str, HuggingFaceTokenizer], name: str) -> None:
    inner = kinds[name]
    found, prefix = of(inner), description.prefix_of(described(inner))
    inner.encode_special_tokens = True
    for text in HARD:
        joined = b"".join(found[token] for token in inner.encode(text, add_special_tokens=False).ids)
        said = text.replace("▁", " ") if prefix else text  # in this vocabulary the mark is a space
        assert joined == (prefix + said.encode() if text else b"")


def test_tokenizer_kinds_are_described(kinds: dict[str, HuggingFaceTokenizer]) -> None:
    named = {name: description.kind_of(described(inner)) for name, inner in kinds.items()}
    others = {"llama": "bpe", "unigram": "unigram", "bert": "wordpiece"}
    assert named == {**dict.fromkeys(kinds, "byte-level"), **others}
    changed = {"gpt4": [], "nfc": ["nfc"], "llama": ["prepend", "replace"], "unigram": ["nfkc", "replace"]}
    assert {name: description.changes(described(kinds[name])) for name in changed} == changed
    prefixes = {name: description.prefix_of(described(inner)) for name, inner in kinds.items()}
    assert prefixes == {**dict.fromkeys(kinds, b""), **dict.fromkeys(("roberta", "llama", "unigram"), b" ")}


def test_words_of_real_text_are_runs_of_letters_and_digits() -> None:
    """Words of ASCII text start exactly where a regular expression over the characters finds them."""
    text = Path(pytest.__file__).read_text(encoding="utf-8")
    tokenizer = Tokenizer.train([text], 400, "<|endoftext|>")
    sample = "".join(character for character in text if character.isascii())[:4000]
    ids = np.array(tokenizer.encode(sample))
    pieces = tokenizer.token_byte_values()
    starts = WordEdges.from_pieces(pieces).starts(ids)
    ends = np.cumsum([len(pieces[token]) for token in ids])
    inside = {
        place for found in re.finditer(r"[A-Za-z0-9]+", sample) for place in range(found.start() + 1, found.end())
    }
    for start, first in zip([0, *ends[:-1]], starts, strict=True):
        assert first == (start not in inside)
