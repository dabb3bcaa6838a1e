"""Statistics and buckets against a reading in plain Python, and texts that are hard on a scanner."""

from __future__ import annotations

import itertools
import math
import random
import re

import numpy as np
import pytest

from bessemer.corpus.quality import kernels
from bessemer.corpus.quality.features import STATISTICS, STOP_WORDS, Features, Texts, extract, joined

MASK = (1 << 64) - 1
MARKS = set(".,;:!?'\"()-")

TEXTS = [
    "The cat sat on the mat, and that was that.\n\n- A list\n- Another item here\nThe cat sat on the mat, and that was that.\n",
    "def f(x_1):\n    return {x_1: 2024}\n",
    "Größe und Maß – „Zitat“ … sagte er.",
    "日本語の文章です。これは、テストです。",
    "ein Wort ohne Ende und  zwei Leerzeichen ",
    "\n\n\n",
    " ",
    "a",
    "x y",
    "中a文 b，c！",
    "• round\n* star\nplain",
    'He said "yes."\nShe said “no.”\nWhy?',
]


def python_words(text: str) -> list[str]:
    """Words, read by a regular expression."""
    outside = r"[^\x00-\x7f\u0080-\u00a9\u00ab-\u00b4\u00b6-\u00b9\u00bb-\u00bf\u2000-\u207f\u3000-\u303f\uff00-\uff0f\uff1a-\uff20\u3040-\u9fff]"
    found = re.findall(rf"[\u3040-\u9fff]|(?:[A-Za-z0-9]|{outside})+", text)
    return [re.sub("[0-9]", "0", re.sub("[A-Z]", lambda sign: sign[0].lower(), word)) for word in found]


def python_hash(word: str) -> int:
    value = 0xCBF29CE484222325
    for byte in word.encode():
        value = (value ^ byte) * 0x100000001B3 & MASK
    return value


def python_bucket(value: int, bits: int) -> int:
    return ((value ^ value >> 32) * 0xFF51AFD7ED558CCD & MASK) >> 64 - bits


def python_buckets(text: str, bits: int) -> set[int]:
    hashes = [python_hash(word) for word in python_words(text)]
    pairs = [(a * 0x9E3779B97F4A7C15 + b) & MASK for a, b in itertools.pairwise(hashes)]
    return {python_bucket(value, bits) for value in (*hashes, *pairs)}


def python_statistics(text: str) -> dict[str, float]:
    words = python_words(text)
    lines = [line.strip(" \t") for line in text.split("\n") if line.strip(" \t")]
    # Trailing spaces count to a line's length, leading ones do not.
    lengths = [len(line.lstrip(" \t")) for line in text.split("\n") if line.strip(" \t")]
    visible = [sign for sign in text if not (sign.isascii() and sign.isspace())]
    word_signs = sum(map(len, words))
    ascii_signs = [sign for sign in visible if sign.isascii() and not sign.isalnum()]
    digits = sum(sign.isascii() and sign.isdigit() for sign in visible)
    wide_marks = len(visible) - word_signs - len(ascii_signs)
    sentences = sum(sign in ".!?…。！？" for sign in visible)
    capitals = sum("A" <= sign <= "Z" for sign in visible)
    count, num_lines = max(len(words), 1), max(len(lines), 1)
    return {
        "log_bytes": math.log1p(len(text.encode())),
        "mean_word_length": word_signs / count,
        "letter_share": (word_signs - digits) / max(len(visible), 1),
        "digit_share": digits / max(len(visible), 1),
        "punctuation_share": (sum(sign in MARKS for sign in ascii_signs) + wide_marks) / max(len(visible), 1),
        "symbol_share": sum(sign not in MARKS for sign in ascii_signs) / max(len(visible), 1),
        "uppercase_share": capitals / max(word_signs - digits, 1),
        "space_share": (len(text) - len(visible)) / max(len(text), 1),
        "stop_word_share": sum(word in STOP_WORDS for word in words) / count,
        "unique_word_share": len(set(words[:256])) / max(min(len(words), 256), 1),
        "log_line_length": math.log1p(sum(lengths) / num_lines),
        "closed_line_share": sum(line[-1] in '.!?"…”。！？' for line in lines) / num_lines,
        "short_line_share": sum(length <= 30 for length in lengths) / num_lines,
        "bullet_line_share": sum(line[0] in "-*•" for line in lines) / num_lines,
        "repeated_line_share": (len(lines) - len({re.sub("[ \t]", "", line) for line in lines})) / num_lines,
        "log_sentence_length": math.log1p(len(words) / (1 + sentences)),
    }


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_statistics_are_those_of_a_plain_reading(text: str) -> None:
    found = dict(zip(STATISTICS, extract(Texts.of([text.encode()]), 10_000, 18).statistics[0].tolist(), strict=True))
    assert found == pytest.approx(python_statistics(text), abs=1e-12)


@pytest.mark.parametrize("bits", [8, 18])
def test_buckets_are_those_of_a_plain_reading(bits: int) -> None:
    found = extract(Texts.of([text.encode() for text in TEXTS]), 10_000, bits)
    for number, text in enumerate(TEXTS):
        mine = found.buckets[found.bounds[number] : found.bounds[number + 1]].tolist()
        assert len(mine) == len(set(mine)) and set(mine) == python_buckets(text, bits)


def test_random_texts_agree_too() -> None:
    draw = random.Random(4)
    signs = "aZ é0.,!-_#\n\t“”…中文。Ωж\u00a0•|"
    texts = ["".join(draw.choices(signs, k=draw.randrange(200))) for _ in range(300)]
    found = extract(Texts.of([text.encode() for text in texts]), 10_000, 18)
    for number, text in enumerate(texts):
        assert set(found.buckets[found.bounds[number] : found.bounds[number + 1]]) == python_buckets(text, 18)
        mine = dict(zip(STATISTICS, found.statistics[number].tolist(), strict=True))
        wanted = python_statistics(text)
        assert mine == pytest.approx(wanted, abs=1e-12), (
            text,
            {k: (v, wanted[k]) for k, v in mine.items() if abs(v - wanted[k]) > 1e-9},
        )


def test_a_long_text_is_read_to_its_limit_and_never_within_a_character() -> None:
    text = "word é" * 500
    for limit in range(1000, 1014):
        texts = Texts.of([text.encode(), b"other"])
        part = texts.text(0, limit)
        assert limit - 1 <= len(part) <= limit and text.startswith(part.decode())
        whole, cut = extract(texts, limit, 18), extract(Texts.of([part, b"other"]), 10_000, 18)
        assert np.array_equal(whole.buckets, cut.buckets)
        assert np.array_equal(whole.statistics[:, 1:], cut.statistics[:, 1:])


def test_columns_of_arrow_are_read_in_place() -> None:
    pa = pytest.importorskip("pyarrow")
    values = ["zero", "one é", "", "three", "four"]
    for kind in (pa.string(), pa.large_string()):
        table = pa.concat_tables([pa.table({"text": pa.array(values, kind)})] * 2)
        for column, wanted in (
            (table["text"], values * 2),
            (table["text"].slice(1, 3), values[1:4]),
            (table["text"].take(pa.array([3, 1])), ["three", "one é"]),
            (table["text"].slice(0, 0), []),
        ):
            texts = Texts.of_column(column)
            assert [texts.text(number, 100).decode() for number in range(len(texts))] == wanted


def test_batches_join() -> None:
    parts = [extract(Texts.of([text.encode() for text in some]), 1000, 18) for some in (TEXTS[:5], TEXTS[5:])]
    whole, once = joined(parts), extract(Texts.of([text.encode() for text in TEXTS]), 1000, 18)
    for name in Features.__annotations__:
        assert np.array_equal(getattr(whole, name), getattr(once, name))
    few = once.rows(np.array([3, 0]))
    assert few.bounds.tolist() == [0, *np.cumsum(np.diff(once.bounds)[[3, 0]])]


@pytest.mark.parametrize(
    "text",
    [
        b"x" * 50_000_000,
        b"a " * 3_000_000,
        b"\n" * 3_000_000,
        b"\0" * 3_000_000,
        "中".encode() * 1_000_000,
        b"aA" * 2_000_000,
    ],
    ids=["word", "words", "lines", "nuls", "characters", "case"],
)
def test_huge_documents_are_bounded(text: bytes) -> None:
    found = extract(Texts.of([text]), 20_000, 18)
    assert np.isfinite(found.statistics).all() and len(found.buckets) <= 20_001


def test_damaged_utf8_stays_within_its_text() -> None:
    """Arrow holds whole UTF-8; a reader that let a cut character pass must still not read beyond the text."""
    for ending in (b"\xe3", b"\xe3\x81", b"\xc2", b"\xf0\x9f\x98", b"\xef\xbc", b"\xe2\x80"):
        alone = extract(Texts.of([b"word " + ending]), 1000, 18)
        beside = extract(Texts.of([b"word " + ending, b"\x82\x81 more"]), 1000, 18)
        assert np.array_equal(alone.statistics[0], beside.statistics[0])


def test_stop_words_are_hashed_alike() -> None:
    word = np.frombuffer(b"the", dtype=np.uint8)
    assert int(kernels.fnv(word, 0, 3)) == python_hash("the")
