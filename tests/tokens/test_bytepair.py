"""The compiled way against the library that runs a tokenizer.json: the same ids on everything."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
import tiktoken
from tokenizers import Tokenizer as HuggingFaceTokenizer

from bessemer.tokens import bytepair, engine
from bessemer.tokens.patterns import GPT2, GPT4, Split
from tests.tokens.tokenizer_samples import HARD, byte_level, corpus, random_texts, split

DIGITS, SPACES = (0, 1, 3), ("runs", "lines", "indentation", "single")


def theirs(inner: HuggingFaceTokenizer, texts: list[str]) -> list[list[int]]:
    copy = HuggingFaceTokenizer.from_str(inner.to_str())
    copy.encode_special_tokens = True
    return [found.ids for found in copy.encode_batch(texts, add_special_tokens=False)]


def built(inner: HuggingFaceTokenizer) -> engine.Engine:
    description = json.loads(inner.to_str())
    shape = engine.shape_of(description)
    assert shape is not None
    made = engine.build(description, shape)
    assert made is not None
    return made


def ours(made: engine.Engine, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in made.encode([text.encode() for text in texts])]


PATTERNS = [
    Split(*choice)
    for number, choice in enumerate(
        itertools.product(("none", "lower", "any"), (True, False), DIGITS, (True, False), (True, False), SPACES)
    )
    if number % 7 == 0
] + [GPT2, GPT4]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.regex[:40])
def test_every_pattern_gives_the_library_s_ids(pattern: Split) -> None:
    inner = byte_level(split(pattern), 500)
    texts = [*HARD, *random_texts(600)]
    assert ours(built(inner), texts) == theirs(inner, texts)


def test_digits_before_the_pattern() -> None:
    from tokenizers import pre_tokenizers

    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    inner = byte_level(pre_tokenizers.Sequence(steps))
    texts = [*HARD, *random_texts(2000), "a  5  b 12 3", "x٣٣ y"]
    assert ours(built(inner), texts) == theirs(inner, texts)


def test_pieces_of_any_length_are_merged_in_windows() -> None:
    """Longer than two windows of bytepair.WINDOW bytes; the library merges each as a whole."""
    inner = byte_level(split(GPT4))
    draw = random.Random(0)
    texts = [
        "a" * 200_000, "the" * 60_000, " " * 150_000 + "x", "." * 140_000 + "\n\n", "日本" * 30_000,
        "".join(draw.choices("etaoinrs", k=200_000)), "".join(draw.choices("ab", k=150_001)), "1" * 100_000,
    ]  # fmt: skip
    assert ours(built(inner), texts) == theirs(inner, texts)


def test_tokens_longer_than_a_narrow_window_are_merged_in_wide_ones() -> None:
    """A token of 2,048 letters spans two windows: none of them joins the next."""
    lengths = [1 << power for power in range(12)]
    assert lengths[-1] > bytepair.WINDOW
    description = json.loads(byte_level(split(GPT4), 260).to_str())
    names = ["a" * length for length in lengths]
    first = max(description["model"]["vocab"].values()) + 1
    description["model"]["vocab"] |= {name: first + number for number, name in enumerate(names[1:])}
    description["model"]["merges"] = [[name, name] for name in names[:-1]]
    description["model"]["vocab"] = {
        name: number
        for name, number in description["model"]["vocab"].items()
        if len(name) < 2 or name in names or number < 2
    }
    inner = HuggingFaceTokenizer.from_str(json.dumps(description))
    texts = ["a" * 20_000, "a" * (1 << 14) + "b" * 5000 + "a" * 4097, "b" * 3000 + "a" * 100_001]
    found = theirs(inner, texts)
    assert max(found[0]) == inner.token_to_id(names[-1])
    assert ours(built(inner), texts) == found


def test_rare_words_fill_the_memory_of_pieces_and_it_begins_anew() -> None:
    inner = byte_level(split(GPT4))
    made = built(inner)
    draw = random.Random(0)
    rare = " ".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=9)) for _ in range(bytepair.CACHE_SLOTS))
    texts = [corpus()[0], rare, *corpus()[:20], "x" * 63]
    for _ in range(2):
        assert ours(made, texts) == theirs(inner, texts)
    slots = made._local.scratch.slots
    assert 0 < (slots[:, 1] > 0).sum() == made._local.scratch.used[0] <= bytepair.CACHE_SLOTS // 2
    # What is common after it is remembered again: its first piece is among them.
    first = texts[0].encode()[:1]
    assert any(made._local.scratch.bytes[at] == first[0] for at, length, *_ in slots.tolist() if length)


@pytest.mark.long
def test_fifty_megabytes_of_one_letter_cost_linear_time_and_memory() -> None:
    """What is expected follows from the vocabulary: the same run, whatever its length, ends in the same way."""
    made = built(byte_level(split(GPT4)))
    long = made.encode([b"a" * 50_000_000])[0]
    short = made.encode([b"a" * (1 << 20)])[0]
    pieces = {number: piece for piece, number in _pieces(made, b"a").items()}
    assert (
        sum(len(pieces[int(token)]) for token in np.unique(long) for _ in range(int((long == token).sum())))
        == 50_000_000
    )
    assert long[:1000].tolist() == short[:1000].tolist()


def _pieces(made: engine.Engine, letter: bytes) -> dict[bytes, int]:
    found = {}
    for length in range(1, 65):
        ids = made.merge_alone([letter * length])[0]
        if len(ids) == 1:
            found[letter * length] = int(ids[0])
    return found


def test_the_result_does_not_depend_on_what_was_encoded_before() -> None:
    inner = byte_level(split(GPT4))
    texts = [*corpus(), *random_texts(500)]
    warm = built(inner)
    ours(warm, texts)
    assert (
        ours(warm, texts[::-1])
        == [ids for text in texts[::-1] for ids in ours(built(inner), [text])]
        == theirs(inner, texts[::-1])
    )


def test_classes_are_those_of_both_regex_engines() -> None:
    """tiktoken's engine finds the same letters, numbers and spaces as the library's; if an update breaks that, this tells."""
    table = engine.classes()
    every = "".join(map(chr, itertools.chain(*engine.PROBED)))
    codes = np.array([ord(character) for character in every])
    ranks = {bytes([byte]): byte for byte in range(256)}
    for bit, regex in ((1, r"\p{L}"), (2, r"\p{N}"), (4, r"\s")):
        found = tiktoken.Encoding("probe", pat_str=regex, mergeable_ranks=ranks, special_tokens={})
        matched = bytes(found.encode_ordinary(every)).decode()  # what does not match is left out
        assert matched == "".join(map(chr, codes[(table[codes] & bit) > 0]))


def test_what_it_cannot_do_is_left_to_the_library() -> None:
    from tokenizers import normalizers, pre_tokenizers

    def shape(inner: HuggingFaceTokenizer) -> engine.Shape | None:
        return engine.shape_of(json.loads(inner.to_str()))

    inner = byte_level(split(GPT4), 400)
    assert shape(inner) == engine.Shape(GPT4, GPT4.regex)
    inner.normalizer = normalizers.NFC()
    assert shape(inner) is None
    inner.normalizer = normalizers.Prepend(" ")
    assert shape(inner) == engine.Shape(GPT4, GPT4.regex, prefix_space=True)
    inner.add_tokens(["    "])  # not special: found in every text
    assert shape(inner) is None
    assert shape(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True), 400)) is None


def test_whole_tokens_before_merges_only_where_that_changes_nothing() -> None:
    inner = byte_level(split(GPT4))
    described = json.loads(inner.to_str())
    described["model"]["ignore_merges"] = True
    shape = engine.shape_of(described)
    assert shape is not None and engine.build(described, shape) is not None
    described["model"]["merges"] = described["model"]["merges"][1:]  # some token can no longer be reached by merging
    assert engine.build(described, shape) is None
