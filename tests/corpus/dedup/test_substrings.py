"""Repeated spans against brute force: every window compared with every earlier one."""

import random
import re
from pathlib import Path

import pytest
from dedup_samples import without_repeats

from bessemer.corpus.dedup import paragraphs, substrings, task
from bessemer.corpus.extract import fold
from bessemer.recipe import Dedup, Paragraphs, Substrings


def cut(
    texts: list[str], settings: Substrings, folder: Path, size: int = 7
) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """New texts, and what was cut out of each."""
    new, removed, _ = without_repeats(texts, Dedup(substrings=settings), folder / "work", size)
    return new, list(map(list, removed))


def brute_force(streams: list[list[object]], length: int) -> list[set[int]]:
    """Numbers of the tokens of each document that lie in a window which stood before without overlapping."""
    earlier: list[tuple[int, tuple[object, ...]]] = []
    removed: list[set[int]] = []
    start = 0
    for stream in streams:
        gone: set[int] = set()
        for i in range(len(stream) - length + 1):
            window = tuple(stream[i : i + length])
            if any(place + length <= start + i and window == other for place, other in earlier):
                gone.update(range(i, i + length))
            earlier.append((start + i, window))
        removed.append(gone)
        start += len(stream)
    return removed


def repetitive(seed: int, alphabet: int, num_documents: int = 12) -> list[list[str]]:
    """Documents of few words, with copies of spans of each other."""
    draw = random.Random(seed)
    documents: list[list[str]] = []
    for _ in range(num_documents):
        words = [f"w{draw.randrange(alphabet)}" for _ in range(draw.randrange(40))]
        for _ in range(draw.randrange(3)):
            if documents and (other := draw.choice(documents)):
                first = draw.randrange(len(other))
                place = draw.randrange(len(words) + 1)
                words[place:place] = other[first : first + draw.randrange(1, 30)]
        documents.append(words)
    return documents


@pytest.mark.parametrize("alphabet", [1, 2, 3, 50])
@pytest.mark.parametrize("seed", range(6))
def test_words_as_by_brute_force(alphabet: int, seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    documents = repetitive(seed, alphabet)
    texts = ["".join(word + draw.choice([" ", "\n", " \n\t"]) for word in words).rstrip() for words in documents]
    expected = brute_force(documents, 5)
    new, _ = cut(texts, Substrings(unit="words", min_tokens=5), tmp_path, size=1 + seed)
    kept = [
        [word for i, word in enumerate(words) if i not in gone] for words, gone in zip(documents, expected, strict=True)
    ]
    assert [text.split() for text in new] == kept


@pytest.mark.parametrize("seed", range(6))
def test_bytes_as_by_brute_force(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    alphabet = "ab" if seed % 2 else "aé😀b "
    texts: list[str] = []
    for _ in range(10):
        text = "".join(draw.choices(alphabet, k=draw.randrange(40)))
        if texts:
            text += draw.choice(texts)[draw.randrange(5) :]
        texts.append(text)
    expected = brute_force([list(text.encode()) for text in texts], 8)
    assert any(expected)
    wanted = []
    for text, gone in zip(texts, expected, strict=True):
        place, kept = 0, ""
        for character in text:
            after = place + len(character.encode())
            kept += "" if gone.issuperset(range(place, after)) else character
            place = after
        wanted.append(kept)
    new, _ = cut(texts, Substrings(unit="bytes", min_tokens=8), tmp_path)
    assert new == wanted


@pytest.mark.parametrize("max_files", [256, 2])
def test_little_memory_and_small_slices_change_nothing(
    max_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "MAX_FILES", max_files)  # 2: files that tasks exchange are merged
    texts = [" ".join(words) for seed in range(8) for words in repetitive(seed, 3)]
    settings = Substrings(unit="words", min_tokens=5, max_memory_mib=1)
    expected = cut(texts, settings, tmp_path)
    assert sum(map(bool, expected[1])) > 10
    for num_bytes, slice_bytes, size in ((10_000, 1, 1), (3000, 50, 3), (1 << 20, 1 << 20, 100)):
        monkeypatch.setattr(task, "MEBIBYTE", num_bytes)  # little: many ranges
        monkeypatch.setattr(paragraphs, "SLICE_BYTES", slice_bytes)
        monkeypatch.setattr(substrings, "FIRST_SLOTS", 4)
        ranges = substrings.num_sample_ranges(2000, 10_000, settings), substrings.num_window_ranges(500, settings)
        assert (min(ranges) > 2) == (num_bytes < 1 << 20)
        assert cut(texts, settings, tmp_path, size) == expected


def test_spans_are_of_what_paragraphs_leave(tmp_path: Path) -> None:
    span = [f"s{number}" for number in range(20)]
    texts = [
        "\n".join([" ".join(span), f"head {' '.join(span[:12])}"]),
        "\n".join([" ".join(span), f"x {' '.join(span[3:])}"]),
    ]
    settings = Dedup(
        paragraphs=Paragraphs(mode="paragraph", false_positive=1e-9), substrings=Substrings(unit="words", min_tokens=10)
    )
    new, _, counts = without_repeats(texts, settings, tmp_path / "work", 1)
    assert new == ["\n".join([" ".join(span), "head "]), "x "]
    assert counts["paragraphs"]["edited"] == 1 and counts["substrings"] == {
        "documents": 2, "edited": 2, "emptied": 0, "spans": 2, "removed_characters": len(" ".join(span[:12])) + len(" ".join(span[3:]))
    }  # fmt: skip


def test_the_first_occurrence_stays_whole(tmp_path: Path) -> None:
    span = [f"s{i}" for i in range(60)]
    texts = [" ".join(["before", *span, "after"]), " ".join(["other", *span]), " ".join([w.upper() for w in span[:50]])]
    texts += [" ".join(span[:49])]
    new, removed = cut(texts, Substrings(unit="words"), tmp_path)
    assert new == [texts[0], "other ", "", texts[3]]
    assert removed == [[], [(6, len(texts[1]))], [(0, len(texts[2]))], []]


def test_a_run_of_one_word_keeps_the_first_window(tmp_path: Path) -> None:
    new, _ = cut([" ".join(["no"] * 1000)], Substrings(unit="words", min_tokens=10), tmp_path)
    assert new[0].split() == ["no"] * 10


def test_empty_documents_and_none(tmp_path: Path) -> None:
    assert cut([], Substrings(unit="words"), tmp_path) == ([], [])
    assert cut(["", "  ", "a"], Substrings(unit="words"), tmp_path) == (["", "  ", "a"], [[], [], []])
    assert cut(["", ""], Substrings(unit="bytes"), tmp_path) == (["", ""], [[], []])


def test_folding_keeps_words_apart_as_they_were() -> None:
    """Word spans are found in folded text and cut out of the text: both must have the same words."""
    for code in range(0x110000):
        character = chr(code)
        if not 0xD800 <= code < 0xE000:
            text = f"a{character}b"
            assert len(fold(text).split(" ")) == len(re.findall(r"\S+", text)), hex(code)
