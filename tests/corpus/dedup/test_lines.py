"""Repeated lines are removed and first occurrences kept, wherever they are."""

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_samples import prose, recipe

from bessemer.corpus.dedup.lines import LineStep
from bessemer.corpus.global_steps import CorpusDocuments, perform_here, run_step
from bessemer.corpus.verdicts import read_table, without
from bessemer.run_tasks.task import Task


def line(seed: int, num_words: int = 20) -> str:
    return " ".join(prose(seed, num_words).split())


@dataclass(frozen=True)
class TextPart:
    """Texts as a part of a corpus."""

    texts: tuple[str, ...]
    corpus: str = ""

    @property
    def size(self) -> int:
        return len(self.texts)

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        yield pa.table({"text": pa.array(self.texts, pa.large_string())})


@pytest.fixture
def cleaned(tmp_path: Path) -> Any:
    """Return texts without repeated lines, in parts of `size`, with tasks in any order."""

    def shuffled(tasks: Sequence[Task]) -> list[dict[str, Any]]:
        for one in random.Random(0).sample(tasks, len(tasks)):
            one.run()
        return perform_here(tasks)

    def clean(texts: list[str], size: int = 100, **settings: Any) -> list[str]:
        shutil.rmtree(tmp_path / "lines", ignore_errors=True)
        parts = [TextPart(tuple(texts[start : start + size])) for start in range(0, len(texts), size)]
        given = CorpusDocuments(parts, tmp_path / "lines", "test", perform=shuffled)
        found = run_step(LineStep(lines=True, **settings), given)
        assert {path.name for path in given.folder.iterdir()} == {"result", "verdicts"}
        new = list[str]()
        for number, part in enumerate(parts):
            after = list(part.texts)
            for verdict in read_table(given.folder / "verdicts" / f"{number:06d}" / "000000.arrow").to_pylist():
                after[verdict["row"]] = without(after[verdict["row"]], verdict["spans"])
            new += after
        assert found["statistics"]["removed_characters"] == sum(map(len, texts)) - sum(map(len, new))
        return new

    return clean


def without_repeats(texts: list[str], line_words: int) -> list[str]:
    """Return the same with a set, as a reference."""
    seen, out = set[tuple[str, ...]](), []
    for text in texts:
        kept = []
        for each in text.split("\n"):
            words = tuple(each.casefold().split())
            if len(words) < line_words or words not in seen:
                kept.append(each)
                seen.add(words)
        out.append("\n".join(kept))
    return out


@pytest.mark.parametrize("line_words", [1, 13])
def test_results_equal_those_of_a_set(line_words: int, cleaned: Any) -> None:
    draw = random.Random(0)
    lines = [line(seed, draw.choice([10, 20, 30, 60])) for seed in range(30)] + ["x", "}", "Überschrift ẞ"]
    lines += [each.upper().replace(" ", "  ") for each in lines[:5]] + [f"{lines[3]} one {lines[7]}", lines[9] + " end"]
    texts = ["\n".join(draw.choices(lines, k=draw.randrange(8))) for _ in range(200)]
    expected = without_repeats(texts, line_words)
    assert sum(map(len, expected)) < 0.5 * sum(map(len, texts))
    for size in (7, 200):
        assert cleaned(texts, size, line_words=line_words) == expected


def test_line_breaks_are_removed_with_their_lines(cleaned: Any) -> None:
    a, b, c = line(1), line(2), line(3)
    texts = ["\n".join((a, b)), "\n".join((a, "", c)), "\n".join((b, "x", c)), "\n".join((c, a)), f"y\n{a}\n{b}"]
    assert cleaned(texts) == ["\n".join((a, b)), "\n".join(("", c)), "x", "", "y"]


@pytest.mark.parametrize("size", [1, 100])
def test_lines_of_an_earlier_corpus_count_as_repeated(cleaned: Any, tmp_path: Path, size: int) -> None:
    (tmp_path / "documents").mkdir()
    twice = f"{line(1)}\n{line(3)}\n{line(1)}"
    pq.write_table(pa.table({"text": [twice]}), tmp_path / "documents" / "a.parquet")
    found = cleaned([line(1).upper(), line(2), f"{line(3)} end", line(2)], size, against=(str(tmp_path),))
    assert found == ["", line(2), f"{line(3)} end", ""]


def test_statistics_count_removed_lines_and_documents_of_repeats_only(data: Path, build: Any) -> None:
    texts = {
        "first": f"{line(1)}\n{line(2)}\n{line(3)}",
        "second": f"{line(4)}\n{line(2)}",
        "third": f"{line(3)}\n{line(1)}",
    }
    for name, text in texts.items():
        (data / name).mkdir()
        (data / name / "a.txt").write_text(text)
    (data / "third" / "b.txt").write_text(line(5))
    sources = [{"name": name, "format": "text", "paths": [str(data / name)]} for name in texts]
    documents, rejected, statistics = build(recipe(*sources, dedup="lines = true", rules="min_characters = 20"))
    assert [row["text"] for row in documents] == [texts["first"], line(4), line(5)]
    assert [(row["source"], row["reason"]) for row in rejected] == [("third", "only_repeats")]
    removed = len(texts["third"]) + len(line(2)) + 1
    assert statistics["lines"] == {"edited": 2, "spans": 2, "removed_characters": removed}
