"""Rows of features compared with plain Python, and texts that are hard for a scanner."""

from __future__ import annotations

import math
import random
import re
from itertools import pairwise

import numpy as np
import pytest

from bessemer.corpus.filters.quality.model import NUM_STATISTICS, STATISTICS_SCALE, extract, prefix

TEXTS = [
    "The cat sat on the mat, and that was that.\n\n- A list\n- Another item here\nThe cat sat on the mat, and that was that.\n",
    "def f(x_1):\n    return {x_1: 2024}\n", "Größe und Maß – „Zitat“ … sagte er.", "日本語の文章です。これは、テストです。",
    "ein Wort ohne Ende und  zwei Leerzeichen ", "\n\n\n", "", "x y", "中a文 b，c！",
    'He said "yes."\nShe said “no.”\nWhy?',
]  # fmt: skip


def python_words(text: str) -> list[str]:
    return [
        word.lower() for word in re.findall(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W_\u3040-\u30ff\u4e00-\u9fff]+", text)
    ]


def python_statistics(text: str) -> dict[int, float]:
    """Return all statistics except the share of punctuation."""
    lines = [line for line in text.split("\n") if line.strip()]
    visible = max(sum(not character.isspace() for character in text), 1)
    letters, num_lines = sum(map(str.isalpha, text)), max(len(lines), 1)
    return {
        0: letters / visible,
        1: sum(map(str.isdecimal, text)) / visible,
        3: sum(map(str.isupper, text)) / max(letters, 1),
        4: sum(map(str.isspace, text)) / max(len(text), 1),
        6: sum(len(line) <= 30 for line in lines) / num_lines,
        7: (len(lines) - len(set(lines))) / num_lines,
        8: math.log1p(len(text)) / 10,
        9: math.log1p(sum(map(len, lines)) / num_lines) / 10,
    }


def test_statistics_equal_those_of_plain_python() -> None:
    draw = random.Random(4)
    more = ["".join(draw.choices("aZ é0.,!-_#\n\t“”中文。Ωж\u00a0•|", k=draw.randrange(200))) for _ in range(200)]
    rows = extract([*TEXTS, *more], 10_000, 18)[:, 1 << 18 :].toarray() / STATISTICS_SCALE
    for text, row in zip([*TEXTS, *more], rows, strict=True):
        wanted = python_statistics(text)
        assert {place: row[place] for place in wanted} == pytest.approx(wanted, abs=1e-12), text
    assert rows[0, 5] == 2 / 4, "lines that end a sentence"
    assert rows[1, 2] == 8 / 26, "( _ ) : { _ : } are punctuation in Unicode"


@pytest.mark.parametrize("bits", [8, 20])
def test_the_bag_has_each_word_and_pair_once(bits: int) -> None:
    found = extract(TEXTS, 10_000, bits)[:, : 1 << bits]
    for number, text in enumerate(TEXTS):
        words = python_words(text)
        distinct, row = set(words) | set(pairwise(words)), found[[number]]
        assert len(set(row.indices)) == row.nnz <= len(distinct) and (bits == 8 or row.nnz == len(distinct))
        assert row.data == pytest.approx(1 / max(row.nnz, 1) ** 0.5)


def test_a_long_text_is_cut_at_its_limit_on_a_character_boundary() -> None:
    text = "word é" * 500
    for limit in range(1000, 1014):
        part = prefix(text, limit)
        assert limit - 1 <= len(part.encode()) <= limit and text.startswith(part)
    assert (extract([text, "other"], 1007, 18) != extract([prefix(text, 1007), "other"], 10_000, 18)).nnz == 0
    for huge in ("x" * 5_000_000, "a " * 1_000_000, "\n" * 3_000_000, "\0" * 3_000_000, "中" * 1_000_000, "\ud800"):
        row = extract([huge], 20_000, 18)
        assert np.isfinite(row.data).all() and row.nnz <= 20_001 + NUM_STATISTICS
