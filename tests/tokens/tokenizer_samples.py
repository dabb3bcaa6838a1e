"""Text that is hard for tokenizers, and small trained tokenizers of every kind."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import PreTokenizer

from bessemer.tokens.tokenizer.patterns import GPT2, GPT4

END = "<|endoftext|>"
HARD = (
    "§ §\n\n\n§\t\tx = 1\r\n§don't I'LL we've 'S 's'ſ x'ſt 'Ll'vE§1234567890 ١٢٣٤ Ⅷ² ½§naïve café Straße ﬆ§"
    "日本語のテキスト 中文，標點。 한국어§🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\ufeff 👍🏽§\x00\x01\x7f\x1b[0m\x0b\x0c\x1c\x85§       leading§trailing       §"
    f"text with {END} inside§<|other|> [UNK] [MASK] <s> </s> <0x0A> ▁x ##y§Ω≈ç√∫˜µ≤≥÷ \u2028 \u0085 \u00a0\u3000x§मानक हिन्दी العربية עברית ไทย§"
    "def f(x):\n        return x\n\n\n    y = 2  # z\n§Ünïcödé Å\u030a ﬃ Ⅻ ㎏§\U0001f9ff\U00020000\ue000\u0378"
).split("§")
HARD += ["a" * 300, " " * 700 + "x" + "\n" * 50 + " " * 33, "!" * 400 + "\r\n\r\n" + "?!.,;" * 30]


def random_texts(number: int, seed: int = 0) -> list[str]:
    """Return short texts of characters on which the alternatives of a split pattern compete."""
    draw = random.Random(seed)
    signs = [*"  \n\r\tabSsé日1٣².'ſ\u00a0\u0301🙂\u200d\x00\u2028tmⅧ\x1cD", "LL", "re", "ve"]
    return ["".join(draw.choices(signs, k=draw.randint(0, 30))) for _ in range(number)]


def corpus() -> list[str]:
    """Return text of two kinds to train small tokenizers on."""
    return [Path(__file__).read_text(encoding="utf-8"), Path(random.__file__).read_text(encoding="utf-8"), *HARD]


def byte_level(pre: PreTokenizer, vocabulary: int = 700) -> tokenizers.Tokenizer:
    """Return a byte-level BPE after any pre-tokenizer."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    settings = {"special_tokens": [END, "<|other|>"], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, **settings)
    inner.train_from_iterator(corpus(), trainer)
    return inner


def split(pattern: str) -> PreTokenizer:
    """Return a split pattern followed by the byte-level step, as in a trained tokenizer."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), to_bytes])


def every_kind() -> dict[str, tokenizers.Tokenizer]:
    """Return a modifiable small tokenizer of each published kind."""
    return {name: tokenizers.Tokenizer.from_str(text) for name, text in _trained_kinds().items()}


@cache
def _trained_kinds() -> dict[str, str]:
    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    found = {
        "gpt4": byte_level(split(GPT4)),
        "gpt2": byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
        "roberta": byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "smollm": byte_level(pre_tokenizers.Sequence(digits)),
        "gpt2-split": byte_level(split(GPT2)),
    }
    nfc = byte_level(split(GPT4))
    nfc.normalizer = normalizers.NFC()
    found["nfc"] = nfc
    indents = byte_level(split(GPT4))
    indents.add_tokens(["    ", "\n\n"])  # found in every text before it is split, as in GPT-NeoX
    found["added"] = indents

    llama = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    llama.decoder = decoders.Sequence(list(parts))
    bytes_256 = [f"<0x{byte:02X}>" for byte in range(256)]
    settings = {"special_tokens": ["<unk>", "<s>", "</s>", *bytes_256], "limit_alphabet": 80, "show_progress": False}
    # Words are split in training, as in SentencePiece, but not afterwards, as in the converted file.
    llama.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    llama.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=900, **settings))
    plain = tokenizers.Tokenizer.from_str(_bytes_are_plain(llama.to_str()))
    plain.pre_tokenizer = None
    found["llama"] = plain

    unigram = tokenizers.Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    special = ["</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False)
    unigram.train_from_iterator(corpus(), trainer)
    found["unigram"] = unigram

    bert = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    bert.normalizer = normalizers.BertNormalizer(lowercase=True)
    bert.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bert.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    bert.train_from_iterator(corpus(), trainer)
    found["bert"] = bert
    return {name: one.to_str() for name, one in found.items()}


ENDS = {"llama": "</s>", "unigram": "</s>", "bert": "[SEP]"}


def _bytes_are_plain(text: str) -> str:
    """Make byte tokens part of the vocabulary instead of special tokens, as in converted SentencePiece files."""
    described = json.loads(text)
    described["added_tokens"] = [token for token in described["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(described)
