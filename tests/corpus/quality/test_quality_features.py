"""Statistics and the bag against a reading in plain Python, and texts that are hard on a scanner."""

from __future__ import annotations

import math
import random
import re
from itertools import pairwise

import numpy as np
import pytest

from bessemer.corpus.quality.features import STATISTICS, extract, prefix

TEXTS = [
    "The cat sat on the mat, and that was that.\n\n- A list\n- Another item here\nThe cat sat on the mat, and that was that.\n",
    "def f(x_1):\n    return {x_1: 2024}\n",
    "Größe und Maß – „Zitat“ … sagte er.",
    "日本語の文章です。これは、テストです。",
    "ein Wort ohne Ende und  zwei Leerzeichen ",
    "\n\n\n",
    "",
    "a",
    "x y",
    "中a文 b，c！",
    "• round\n* star\nplain\n- dash",
    'He said "yes."\nShe said “no.”\nWhy?',
]


def python_words(text: str) -> list[str]:
    return [
        word.lower() for word in re.findall(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W_\u3040-\u30ff\u4e00-\u9fff]+", text)
    ]


def python_statistics(text: str) -> dict[str, float]:
    words = python_words(text)
    lines = [line for line in text.split("\n") if line.strip()]
    visible = max(sum(not character.isspace() for character in text), 1)
    letters = sum(map(str.isalpha, text))
    ends = sum(character in ".!?。！？…" and character != "…" for character in text)
    num_lines = max(len(lines), 1)
    return {
        "log_length": math.log1p(len(text)),
        "mean_word_length": sum(map(len, words)) / max(len(words), 1),
        "letter_share": letters / visible,
        "digit_share": sum(map(str.isdecimal, text)) / visible,
        "uppercase_share": sum(map(str.isupper, text)) / max(letters, 1),
        "space_share": sum(map(str.isspace, text)) / max(len(text), 1),
        "stop_word_share": sum(word in ["the", "be", "to", "of", "and", "that", "have", "with"] for word in words)
        / max(len(words), 1),
        "unique_word_share": len(set(words[:256])) / max(len(words[:256]), 1),
        "log_line_length": math.log1p(sum(map(len, lines)) / num_lines),
        "closed_line_share": sum(line.endswith((".", "!", "?", "。", "！")) for line in lines) / num_lines,
        "short_line_share": sum(len(line) <= 30 for line in lines) / num_lines,
        "bullet_line_share": sum(line.lstrip().startswith(("-", "•")) for line in text.splitlines())
        / max(len(text.splitlines()), 1),
        "repeated_line_share": (len(lines) - len(set(lines))) / num_lines,
        "log_sentence_length": math.log1p(len(words) / (1 + ends)),
    }


def test_statistics_are_those_of_a_plain_reading() -> None:
    draw = random.Random(4)
    more = ["".join(draw.choices("aZ é0.,!-_#\n\t“”中文。Ωж\u00a0•|", k=draw.randrange(200))) for _ in range(200)]
    found = extract([*TEXTS, *more], 10_000, 18).statistics
    for text, row in zip([*TEXTS, *more], found.tolist(), strict=True):
        mine, wanted = dict(zip(STATISTICS, row, strict=True)), python_statistics(text)
        assert {name: mine[name] for name in wanted} == pytest.approx(wanted, abs=1e-12), text
        if text.strip():
            assert mine["punctuation_share"] >= 0 and mine["symbol_share"] >= 0
    assert found[1, list(STATISTICS).index("symbol_share")] == 0  # ( ) : { } _ are punctuation in Unicode


@pytest.mark.parametrize("bits", [8, 20])
def test_the_bag_holds_each_word_and_pair_once(bits: int) -> None:
    found = extract(TEXTS, 10_000, bits).bag
    for number, text in enumerate(TEXTS):
        words = python_words(text)
        distinct, row = set(words) | set(pairwise(words)), found[[number]]
        assert len(set(row.indices)) == row.nnz <= len(distinct) and (bits == 8 or row.nnz == len(distinct))
        assert row.data == pytest.approx(1 / max(row.nnz, 1) ** 0.5)
    same = extract(["one two", "Two, one: two"], 100, 20).bag
    assert set(same[[0]].indices) < set(same[[1]].indices)


def test_a_long_text_is_read_to_its_limit_and_never_within_a_character() -> None:
    text = "word é" * 500
    for limit in range(1000, 1014):
        part = prefix(text, limit)
        assert limit - 1 <= len(part.encode()) <= limit and text.startswith(part)
    whole, cut = extract([text, "other"], 1007, 18), extract([prefix(text, 1007), "other"], 10_000, 18)
    assert np.array_equal(whole.statistics, cut.statistics) and (whole.bag != cut.bag).nnz == 0


@pytest.mark.parametrize(
    "text",
    ["x" * 5_000_000, "a " * 1_000_000, "\n" * 3_000_000, "\0" * 3_000_000, "中" * 1_000_000, "\ud800"],
    ids=["word", "words", "lines", "nuls", "characters", "surrogate"],
)
def test_huge_documents_are_bounded(text: str) -> None:
    found = extract([text], 20_000, 18)
    assert np.isfinite(found.statistics).all() and found.bag.nnz <= 20_001
