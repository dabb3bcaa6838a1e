"""Signatures, compared with their definition in Python's integers."""

import re

import pyarrow as pa
import pytest
from corpus_samples import prose
from dedup_samples import SCRIPTS

from bessemer.corpus.dedup.signatures import _permutations, signatures
from bessemer.recipe import Dedup
from bessemer.text.normalise import fold

MASK = (1 << 64) - 1


def mixed(value: int) -> int:
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), (33, 1)):
        value = (value ^ (value >> shift)) * factor & MASK
    return value


# a letter of a script without spaces, or a run of other letters
ALONE = r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u4e00-\u9fff\U00020000-\U000323af"
UNIT = re.compile(rf"[{ALONE}]|[^{ALONE}\s]+")


def reference_signature(text: str, settings: Dedup) -> list[int]:
    """Return the signature computed with Python's integers."""
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
def test_signatures_equal_their_definition(settings: Dedup) -> None:
    texts = ["", "a", "a b c d", "one two three four five", prose(1), "Ünïcode 中文 字 😀 x " * 9, "中" * 30]
    texts += [
        "x漢x字𠀀x" * 9,
        *(f"two words {letters} and {letters[::-1]}" for letters in SCRIPTS.values()),
        "गद्य कविता 한국어 글 αβγ" * 9,
    ]
    texts = [fold(text) for text in texts]
    expected = [reference_signature(text, settings) for text in texts]
    assert signatures(texts, settings).tolist() == expected
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        assert signatures(pa.array(["x", *texts], kind)[1:], settings).tolist() == expected
