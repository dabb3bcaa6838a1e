"""Signatures: what they are made from, and that they behave as random permutations would."""

import random
import re
from math import sqrt

import numpy as np
import pyarrow as pa
import pytest
from corpus_samples import prose
from dedup_samples import SCRIPTS, edited, jaccard

from bessemer.corpus.dedup.kernels import band_keys
from bessemer.corpus.dedup.signatures import _permutations, shingle_set, signatures
from bessemer.corpus.extract import fold
from bessemer.recipe import Dedup

MASK = (1 << 64) - 1


def mixed(value: int) -> int:
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), (33, 1)):
        value = (value ^ (value >> shift)) * factor & MASK
    return value


# a letter of a script without spaces, or a run of others
ALONE = r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u4e00-\u9fff\U00020000-\U000323af"
UNIT = re.compile(rf"[{ALONE}]|[^{ALONE}\s]+")


def by_hand(text: str, settings: Dedup) -> list[int]:
    """The signature in Python's integers."""
    if settings.shingle != "characters":
        length, tokens = settings.shingle_words, []
        for word in text.split() if settings.shingle == "words" else UNIT.findall(text):
            value = 0xCBF29CE484222325
            for byte in word.encode():
                value = (value ^ byte) * 0x100000001B3 & MASK
            tokens.append(mixed(value))
    else:
        length = settings.shingle_characters
        tokens = [mixed(int.from_bytes(character.encode(), "big")) for character in text]
    hashes = []
    for i in range(len(tokens) - length + 1):
        value = 0
        for token in tokens[i : i + length]:
            value = (value * 0x9E3779B97F4A7C15 + token) & MASK
        hashes.append(mixed(value) >> 32)
    factors, addends = _permutations(settings.bands * settings.rows)
    pairs = zip(factors.tolist(), addends.tolist(), strict=True)
    return [min(((a * x + b) & 0xFFFFFFFF for x in hashes), default=0xFFFFFFFF) for a, b in pairs]


@pytest.mark.parametrize("settings", [
    Dedup(bands=3, rows=5), Dedup(shingle_words=1), Dedup(shingle="words"), Dedup(shingle="characters"),
    Dedup(shingle="characters", shingle_characters=3, bands=20, rows=13),
])  # fmt: skip
def test_as_defined(settings: Dedup) -> None:
    texts = ["", "a", "a b c d", "one two three four five", prose(1), "Ünïcode 中文 字 😀 x " * 9, "中" * 30]
    texts += [
        "x漢x字𠀀x" * 9,
        *(f"two words {letters} and {letters[::-1]}" for letters in SCRIPTS.values()),
        "गद्य कविता 한국어 글 αβγ" * 9,
    ]
    texts = [fold(text) for text in texts]
    expected = [by_hand(text, settings) for text in texts]
    assert signatures(texts, settings).tolist() == expected
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        assert signatures(pa.array(["x", *texts], kind)[1:], settings).tolist() == expected


def test_text_with_spaces_has_the_signature_of_its_words() -> None:
    texts = [
        fold(text)
        for text in (prose(1), "Ünïcode größer 😀 x " * 9, "हिन्दी भाषा में लिखा " * 9, "한국어 글은 띄어 쓴다 " * 9)
    ]
    assert signatures(texts, Dedup()).tolist() == signatures(texts, Dedup(shingle="words")).tolist()


def test_shingle_sets_have_the_true_jaccard() -> None:
    draw = random.Random(0)
    words = prose(1, 300).split()
    texts = [" ".join(edited(words, changes, draw)) for changes in (0, 3, 20)] + ["a b a b a b a b a b"]
    buffer = np.empty(10_000, dtype=np.uint64)
    sets = [shingle_set(np.frombuffer(text.encode(), np.uint8), Dedup(), buffer) for text in texts]
    assert len(sets[3]) == 2
    for one in range(4):
        for other in range(4):
            shared = len(np.intersect1d(sets[one], sets[other]))
            share = shared / (len(sets[one]) + len(sets[other]) - shared)
            assert share == pytest.approx(jaccard(texts[one], texts[other]))


@pytest.mark.parametrize("num_words", [60, 600])
def test_agreement_follows_the_binomial_law(num_words: int) -> None:
    """Mean and spread of the estimate, and the share of pairs that meet in a band, are those of random permutations."""
    settings, draw = Dedup(), random.Random(1)
    pairs, truth = [], []
    for seed in range(1500):
        words = [f"{seed}-{i}" for i in range(num_words)]
        other = edited(words, round(num_words * 0.02), draw)
        pairs += [" ".join(words), " ".join(other)]
        truth.append(jaccard(pairs[-2], pairs[-1]))
    signed = signatures(pairs, settings)
    equal = signed[::2] == signed[1::2]
    true = np.array(truth)
    error = equal.mean(axis=1) - true
    spread = np.sqrt(true * (1 - true) / (settings.bands * settings.rows))
    assert abs((error / spread).mean()) < 4 / sqrt(1500)
    assert (error / spread).std() == pytest.approx(1, abs=0.08)
    met = equal.reshape(1500, settings.bands, settings.rows).all(axis=2).any(axis=1)
    chance = 1 - (1 - true**settings.rows) ** settings.bands
    assert abs(met.sum() - chance.sum()) < 4 * sqrt((chance * (1 - chance)).sum())


def test_band_keys_are_equal_where_bands_are() -> None:
    signed = np.random.default_rng(0).integers(0, 3, (200, 6), dtype=np.uint32)
    keys = np.empty((3, 200), dtype=np.uint64)
    band_keys(signed, 2, np.zeros(200, np.uint64), keys)
    for band in range(3):
        names = [tuple(row) for row in signed[:, 2 * band : 2 * band + 2].tolist()]
        assert (
            len(set(names)) == len(set(keys[band].tolist())) == len(set(zip(names, keys[band].tolist(), strict=True)))
        )
    assert not set(keys[0].tolist()) & set(keys[1].tolist())
    salted = np.empty_like(keys)
    band_keys(signed, 2, np.full(200, 1 << 32, np.uint64), salted)
    assert not set(salted.ravel().tolist()) & set(keys.ravel().tolist())
