"""Repeated paragraphs go, first ones stay, and the filter errs as rarely as it says."""

import random

import numpy as np
import pyarrow as pa
import pytest
from corpus_samples import prose

from bessemer.corpus.dedup.kernels import visit
from bessemer.corpus.dedup.paragraphs import (
    false_positive_rate,
    filter_size,
    insert_paragraphs,
    paragraph_filter,
    remove_paragraphs,
)
from bessemer.corpus.dedup.verdicts import EditStatistics
from bessemer.errors import InputError
from bessemer.recipe import Paragraphs

TINY = 1e-9
"""A false-positive rate at which none is to be expected."""


def line(seed: int, num_words: int = 20) -> str:
    return " ".join(prose(seed, num_words).split())


def table(*texts: str) -> pa.Table:
    return pa.table(
        {"identity": [f"{i:032x}" for i in range(len(texts))], "text": texts, "characters": map(len, texts)}
    )


def cleaned(texts: list[str], settings: Paragraphs, size: int = 100) -> list[str]:
    bloom = paragraph_filter(sum(len(text.split()) for text in texts), settings)
    parts = (table(*texts[start : start + size]) for start in range(0, len(texts), size))
    out: list[str] = []
    for done, edits in remove_paragraphs(parts, bloom, settings):
        assert done["characters"].to_pylist() == [len(text) for text in done["text"].to_pylist()]
        for edit in edits:
            before = texts[len(out) + edit.row]
            assert len(done["text"][edit.row].as_py()) == len(before) - edit.removed_characters
        out += done["text"].to_pylist()
    return out


def by_hand(texts: list[str], settings: Paragraphs) -> list[str]:
    """The same with a set."""
    seen: set[tuple[str, ...]] = set()
    out = []
    for text in texts:
        kept = []
        for each in text.split("\n"):
            words = each.casefold().split()
            n = settings.ngram if settings.mode == "ngram" and len(words) >= settings.ngram else len(words)
            items = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
            share = sum(item in seen for item in items) / max(len(items), 1)
            least = settings.threshold if settings.mode == "ngram" else 1.0
            if len(words) >= settings.min_words and share >= least:
                continue
            kept.append(each)
            if len(words) >= settings.min_words:
                seen.update(items)
        out.append("\n".join(kept))
    return out


@pytest.mark.parametrize("mode", ["paragraph", "ngram"])
def test_the_same_as_with_a_set(mode: str) -> None:
    settings = Paragraphs(mode=mode, false_positive=TINY)
    draw = random.Random(0)
    lines = [line(seed, draw.choice([10, 20, 30, 60])) for seed in range(30)] + ["", "}", "Überschrift ẞ"]
    lines += [each.upper().replace(" ", "  ") for each in lines[:5]] + [f"{lines[3]} one {lines[7]}", lines[9] + " end"]
    texts = ["\n".join(draw.choices(lines, k=draw.randrange(8))) for _ in range(200)]
    expected = by_hand(texts, settings)
    assert sum(map(len, expected)) < 0.5 * sum(map(len, texts))
    for size in (1, 7, 200):
        assert cleaned(texts, settings, size) == expected


def test_a_paragraph_whose_ngrams_mostly_stood_before() -> None:
    words = line(1, 50).split()
    few, many = [*words[:45], *line(2).split()[:5]], [*words[:20], *line(3, 30).split()]
    texts = [" ".join(words), " ".join(few), " ".join(many)]
    settings = Paragraphs(mode="ngram", false_positive=TINY)
    assert cleaned(texts, settings) == [texts[0], "", texts[2]]  # 33 of 38 n-grams, then 8 of 38
    assert cleaned(texts, Paragraphs(mode="ngram", threshold=0.9, false_positive=TINY)) == texts


def test_breaks_go_with_their_lines() -> None:
    a, b, c = line(1), line(2), line(3)
    texts = ["\n".join((a, b)), "\n".join((a, "", c)), "\n".join((b, "x", c)), "\n".join((c, a)), f"y\n{a}\n{b}"]
    expected = ["\n".join((a, b)), "\n".join(("", c)), "x", "", "y"]
    assert cleaned(texts, Paragraphs(mode="paragraph", false_positive=TINY)) == expected


def test_counts() -> None:
    statistics = EditStatistics()
    settings = Paragraphs(mode="paragraph", false_positive=TINY)
    texts = [line(1), line(1), f"{line(1)}\nmore\n{line(1)}"]
    for done, edits in remove_paragraphs([table(*texts)], paragraph_filter(1000, settings), settings):
        statistics.add(done, edits)
    removed = 3 * len(line(1)) + 2
    assert vars(statistics) == {
        "documents": 3, "edited": 2, "emptied": 1, "spans": 3, "removed_characters": removed
    }  # fmt: skip


def test_an_earlier_corpus_counts_as_seen() -> None:
    settings = Paragraphs(mode="paragraph", false_positive=TINY)
    bloom = paragraph_filter(1000, settings)
    insert_paragraphs([table(line(1))], bloom, settings)
    ((done, _),) = remove_paragraphs([table(line(1).upper(), line(2))], bloom, settings)
    assert done["text"].to_pylist() == ["", line(2)]


def hashes(seed: int, number: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 64, number, dtype=np.uint64)


@pytest.mark.parametrize("rate", [0.1, 0.01, 0.0005])
def test_the_full_filter_errs_as_often_as_it_says(rate: float) -> None:
    number = 100_000
    bloom = paragraph_filter(number, Paragraphs(mode="ngram", false_positive=rate))
    for item in hashes(1, number):
        visit(bloom.words, bloom.num_bits, item, True)
    assert all(visit(bloom.words, bloom.num_bits, item, False) for item in hashes(1, number)[::10])
    wrong = sum(visit(bloom.words, bloom.num_bits, item, False) for item in hashes(2, 200_000))
    deviation = (200_000 * rate) ** 0.5
    assert abs(wrong - 200_000 * rate) < 5 * deviation + 0.05 * 200_000 * rate


def test_size_follows_the_blocked_formula() -> None:
    """At 1% an unblocked filter takes 9.6 bits an item; blocks of 512 bits cost at most a tenth more."""
    blocks, num_bits = filter_size(1_000_000, 0.01)
    bits = blocks * 512 / 1_000_000
    assert 9.58 < bits < 10.6
    assert false_positive_rate(512 / bits, num_bits) == pytest.approx(0.01, rel=1e-3)


def test_memory_is_stated_before_and_refused_when_too_much() -> None:
    settings = Paragraphs(mode="ngram", max_memory_mib=8)
    assert (
        len(paragraph_filter(1_000_000, settings).words) * 8 == filter_size(1_000_000, settings.false_positive)[0] * 64
    )
    assert len(paragraph_filter(1300, Paragraphs(mode="paragraph")).words) == filter_size(100, 0.01)[0] * 8
    with pytest.raises(InputError, match=r"10000000 words need a Bloom filter of 1\d MiB"):
        paragraph_filter(10_000_000, settings)
