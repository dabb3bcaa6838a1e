"""Repeated paragraphs go, first ones stay, and the filter errs as rarely as it says."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_samples import prose
from dedup_samples import without_repeats

from bessemer.corpus.dedup import paragraphs, task
from bessemer.corpus.dedup.paragraphs import RangedFilter, false_positive_rate, filter_size
from bessemer.corpus.dedup.repeat_kernels import paragraph_items, visit
from bessemer.corpus.dedup.signatures import utf8
from bessemer.corpus.dedup.task import perform_here
from bessemer.corpus.work import CorpusTask
from bessemer.recipe import Dedup, Paragraphs

TINY = 1e-9
"""A false-positive rate at which none is to be expected."""


def line(seed: int, num_words: int = 20) -> str:
    return " ".join(prose(seed, num_words).split())


@pytest.fixture
def cleaned(tmp_path: Path) -> Any:
    """Texts in parts of `size`, without repeated paragraphs."""

    def clean(texts: list[str], settings: Paragraphs, size: int = 100, **more: Any) -> list[str]:
        return without_repeats(texts, Dedup(paragraphs=settings, **more), tmp_path / "repeats", size)[0]

    return clean


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
def test_the_same_as_with_a_set(mode: str, cleaned: Any) -> None:
    settings = Paragraphs(mode=mode, false_positive=TINY)
    draw = random.Random(0)
    lines = [line(seed, draw.choice([10, 20, 30, 60])) for seed in range(30)] + ["", "}", "Überschrift ẞ"]
    lines += [each.upper().replace(" ", "  ") for each in lines[:5]] + [f"{lines[3]} one {lines[7]}", lines[9] + " end"]
    texts = ["\n".join(draw.choices(lines, k=draw.randrange(8))) for _ in range(200)]
    expected = by_hand(texts, settings)
    assert sum(map(len, expected)) < 0.5 * sum(map(len, texts))
    for size in (1, 7, 200):
        assert cleaned(texts, settings, size) == expected


def test_a_paragraph_whose_ngrams_mostly_stood_before(cleaned: Any) -> None:
    words = line(1, 50).split()
    few, many = [*words[:45], *line(2).split()[:5]], [*words[:20], *line(3, 30).split()]
    texts = [" ".join(words), " ".join(few), " ".join(many)]
    settings = Paragraphs(mode="ngram", false_positive=TINY)
    assert cleaned(texts, settings) == [texts[0], "", texts[2]]  # 33 of 38 n-grams, then 8 of 38
    assert cleaned(texts, Paragraphs(mode="ngram", threshold=0.9, false_positive=TINY)) == texts


def test_breaks_go_with_their_lines(cleaned: Any) -> None:
    a, b, c = line(1), line(2), line(3)
    texts = ["\n".join((a, b)), "\n".join((a, "", c)), "\n".join((b, "x", c)), "\n".join((c, a)), f"y\n{a}\n{b}"]
    expected = ["\n".join((a, b)), "\n".join(("", c)), "x", "", "y"]
    assert cleaned(texts, Paragraphs(mode="paragraph", false_positive=TINY)) == expected


def test_counts(tmp_path: Path) -> None:
    settings = Dedup(paragraphs=Paragraphs(mode="paragraph", false_positive=TINY))
    texts = [line(1), line(1), f"{line(1)}\nmore\n{line(1)}"]
    _, _, counts = without_repeats(texts, settings, tmp_path / "repeats")
    removed = 3 * len(line(1)) + 2
    assert counts["paragraphs"] == {
        "documents": 3, "edited": 2, "emptied": 1, "spans": 3, "removed_characters": removed
    }  # fmt: skip


def test_an_earlier_corpus_counts_as_seen(cleaned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "documents").mkdir()
    words = line(3, 40)
    pq.write_table(pa.table({"text": [f"{line(1)}\n{words}"]}), tmp_path / "documents" / "a.parquet")
    for memory in (1 << 20, 40):
        monkeypatch.setattr(task, "MEBIBYTE", memory)
        for mode in ("paragraph", "ngram"):
            settings = Paragraphs(mode=mode, false_positive=TINY, max_memory_mib=4)
            found = cleaned([line(1).upper(), line(2), f"{words} end"], settings, against=(str(tmp_path),))
            assert found == ["", line(2), "" if mode == "ngram" else f"{words} end"]


# --- Ranges of the filter


def in_one_pass(texts: Sequence[str], settings: Paragraphs) -> list[str]:
    """The definition: line after line through one filter, its errors included."""
    folded = ["\n".join(" ".join(each.split()) for each in text.casefold().split("\n")) for text in texts]
    bloom = RangedFilter.of(sum(len(text.split()) for text in texts), settings.changed(max_memory_mib=1 << 20))
    words, out = np.zeros(bloom.num_words(0), np.uint64), []
    for text, each_folded in zip(texts, folded, strict=True):
        kept = []
        for old, each in zip(text.split("\n"), each_folded.split("\n"), strict=True):
            data, offsets = utf8([each])
            items, numbers, counts = np.empty(200, np.uint64), np.empty(200, np.uint32), np.zeros(1, np.uint32)
            ngram = settings.ngram if settings.mode == "ngram" else 0
            found = paragraph_items(
                data, offsets, ngram, settings.min_words, np.empty(200, np.uint64), items, numbers, counts
            )
            starts = bloom.blocks(items[:found]) * np.uint64(8)
            pairs = list(zip(starts, items[:found], strict=True))
            seen = sum(visit(words, start, bloom.num_bits, item, False) for start, item in pairs)
            if seen and seen >= (settings.threshold if settings.mode == "ngram" else 1.0) * found:
                continue
            kept.append(old)
            for start, item in pairs:
                visit(words, start, bloom.num_bits, item, True)
        out.append("\n".join(kept))
    return out


def chains(seed: int, num_texts: int) -> list[str]:
    """Lines that share most words with the line before, so that which one goes depends on all before it, and unrelated ones."""
    draw, words, texts = random.Random(seed), line(seed, 30).split(), []
    for _ in range(num_texts):
        lines = []
        for _ in range(draw.randrange(1, 6)):
            words = [*words[3:], *(f"w{draw.getrandbits(32)}" for _ in range(3))]
            lines.append(" ".join(words) if draw.random() < 0.9 else line(draw.randrange(40), 25))
        texts.append("\n".join(lines))
    return texts


@pytest.mark.parametrize("mode", ["paragraph", "ngram"])
@pytest.mark.parametrize(("rate", "max_files"), [(TINY, 256), (0.2, 256), (0.2, 4)])
def test_ranges_decide_as_one_filter_does_errors_included(
    mode: str, rate: float, max_files: int, cleaned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "MAX_FILES", max_files)  # small: files that tasks exchange are merged
    texts = chains(0, 60)
    settings = Paragraphs(mode=mode, false_positive=rate, max_memory_mib=1)
    expected = in_one_pass(texts, settings)
    assert expected != texts
    whole = RangedFilter.of(sum(len(text.split()) for text in texts), settings).num_words(0) * 8
    for num_ranges, size, slice_bytes in ((1, 100, 100), (3, 100, 1 << 20), (8, 20, 500)):
        monkeypatch.setattr(task, "MEBIBYTE", -(-whole // num_ranges))
        monkeypatch.setattr(paragraphs, "SLICE_BYTES", slice_bytes)
        assert cleaned(texts, settings, size) == expected


def test_what_bounds_leave_open_is_settled_at_once_or_in_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, done = chains(1, 30), list[CorpusTask]()
    settings = Paragraphs(mode="ngram", false_positive=0.01, max_memory_mib=1)
    expected = in_one_pass(texts, settings)
    monkeypatch.setattr(task, "MEBIBYTE", 2000)

    def watched(tasks: Sequence[CorpusTask]) -> list[dict[str, Any]]:
        done.extend(tasks)
        return perform_here(tasks)

    for is_settled in (True, False):
        done.clear()
        monkeypatch.setattr(paragraphs, "SETTLE_BYTES", 1 if is_settled else 1 << 40)
        found = without_repeats(texts, Dedup(paragraphs=settings), tmp_path / "repeats", 20, watched)[0]
        assert found == expected
        rounds = {one.round for one in done if isinstance(one, paragraphs.BoundParagraphs)}
        settled = [one for one in done if isinstance(one, paragraphs.SettleLines)]
        assert (len(rounds) == 1 and len(settled) == 1) if is_settled else (len(rounds) > 5 and not settled)


def hashes(seed: int, number: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 64, number, dtype=np.uint64)


@pytest.mark.parametrize("rate", [0.1, 0.01, 0.0005])
def test_the_full_filter_errs_as_often_as_it_says(rate: float) -> None:
    number = 100_000
    bloom = RangedFilter.of(number, Paragraphs(mode="ngram", false_positive=rate))
    words = np.zeros(bloom.num_words(0), np.uint64)

    def passed(items: np.ndarray, inserts: bool) -> int:
        starts = bloom.blocks(items) * np.uint64(8)
        return sum(
            visit(words, start, bloom.num_bits, item, inserts) for start, item in zip(starts, items, strict=True)
        )

    passed(hashes(1, number), True)
    assert passed(hashes(1, number)[::10], False) == number // 10
    wrong = passed(hashes(2, 200_000), False)
    deviation = (200_000 * rate) ** 0.5
    assert abs(wrong - 200_000 * rate) < 5 * deviation + 0.05 * 200_000 * rate


def test_size_follows_the_blocked_formula() -> None:
    """At 1% an unblocked filter takes 9.6 bits an item; blocks of 512 bits cost at most a tenth more."""
    blocks, num_bits = filter_size(1_000_000, 0.01)
    bits = blocks * 512 / 1_000_000
    assert 9.58 < bits < 10.6
    assert false_positive_rate(512 / bits, num_bits) == pytest.approx(0.01, rel=1e-3)


def test_ranges_take_the_memory_that_they_may() -> None:
    settings = Paragraphs(mode="ngram", max_memory_mib=8)
    one = RangedFilter.of(1_000_000, settings)
    assert one.num_words(0) * 8 == filter_size(1_000_000, settings.false_positive)[0] * 64 and one.num_ranges == 1
    assert RangedFilter.of(1300, Paragraphs(mode="paragraph")).num_blocks == filter_size(100, 0.01)[0]
    for mode, copies in (("ngram", 2), ("paragraph", 1)):
        many = RangedFilter.of(100_000_000, settings.changed(mode=mode, min_words=1))
        assert many.num_ranges > 1
        assert max(many.num_words(number) for number in range(many.num_ranges)) * 8 * copies <= (8 << 20) + 64 * copies


def test_every_block_of_a_filter_of_any_size_is_used() -> None:
    """Half of a hash chooses among 2^32 blocks at the most; a filter for 100 TB has 25 billion."""
    huge, items = RangedFilter.of(10**12, Paragraphs(mode="ngram")), hashes(3, 100_000)
    assert huge.num_filters > 1 and huge.num_blocks <= 1 << 32 and huge.num_ranges > 1000
    blocks = huge.blocks(items)
    total = huge.num_blocks * huge.num_filters
    assert np.histogram(blocks.astype(float), 20, (0, total))[0] == pytest.approx(np.full(20, 5000), rel=0.08)
    found = huge.range_of(items)
    assert all(
        huge.first_block(at) <= block < huge.first_block(at + 1)
        for at, block in zip(found[:500].tolist(), blocks[:500].tolist(), strict=True)
    )
