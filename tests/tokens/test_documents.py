from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bessemer.recipe import parse
from bessemer.tokens import documents

RECIPE = """
[run]
name = "r"
[model]
depth = 2
[[corpus.sources]]
name = "a"
format = "text"
paths = ["x"]
weight = 1.0
[[corpus.sources]]
name = "b"
format = "text"
paths = ["x"]
weight = 3.0
[[corpus.sources]]
name = "c"
format = "text"
paths = ["x"]
weight = 4.0
[tokens]
held_out = 0.25
[tokenizer]
sample = "{sample}"
sample_bytes = {budget}
"""


def recipe(sample: str = "mixture", budget: int = 800):  # type: ignore[no-untyped-def]
    return parse(RECIPE.format(sample=sample, budget=budget), "test")


def test_shares_by_the_corpus_are_one() -> None:
    assert documents.sample_shares(recipe("corpus", 500), {"a": 100, "b": 900, "c": 1000}) == dict.fromkeys("abc", 0.25)
    assert documents.sample_shares(recipe("corpus", 5000), {"a": 100, "b": 900}) == {"a": 1.0, "b": 1.0}


def test_shares_by_the_mixture_follow_the_weights() -> None:
    sizes = {"a": 1000, "b": 1000, "c": 1000}
    shares = documents.sample_shares(recipe(budget=800), sizes)
    assert {name: share * sizes[name] for name, share in shares.items()} == {"a": 100, "b": 300, "c": 400}


def test_what_a_small_source_cannot_give_the_others_do() -> None:
    sizes = {"a": 1000, "b": 1000, "c": 100}
    shares = documents.sample_shares(recipe(budget=900), sizes)
    assert shares == {"a": 0.2, "b": 0.6, "c": 1.0}  # 800 left, one to three
    assert documents.sample_shares(recipe(budget=10_000), sizes) == dict.fromkeys("abc", 1.0)
    assert documents.sample_shares(recipe(budget=100), {"a": 0, "b": 100, "c": 100}) == pytest.approx(
        {"a": 0.0, "b": 3 / 7, "c": 4 / 7}
    )


def write(folder: Path, rows: list[dict[str, str]], group: int) -> None:
    folder.mkdir(exist_ok=True)
    for number, start in enumerate(range(0, len(rows), 7 * group)):
        table = pa.Table.from_pylist(rows[start : start + 7 * group])
        pq.write_table(table, folder / f"part-{number:05d}.parquet", row_group_size=group)


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, list[dict[str, str]]]:
    rows = [
        {
            "identity": f"{number:032x}", "source": "abc"[number % 3], "text": f"{number} " * 50, "path": "", "label": "",
            "metadata": json.dumps({"language": "de"} if number % 2 else {"x": "language"}),
        }
        for number in range(600)
    ]  # fmt: skip
    write(tmp_path / "documents", rows, 11)
    return tmp_path / "documents", rows


def test_documents_from_any_number_on(corpus: tuple[Path, list[dict[str, str]]]) -> None:
    folder, rows = corpus
    assert documents.count(folder) == 600
    for skip in (0, 1, 10, 11, 12, 76, 77, 78, 300, 599, 600, 700):
        assert [one.identity for one in documents.documents(folder, skip)] == [row["identity"] for row in rows[skip:]]
    assert [one.language for one in documents.documents(folder)] == ["", "de"] * 300
    assert documents.bytes_of_sources(folder) == {
        name: sum(len(row["text"]) for row in rows if row["source"] == name) for name in "abc"
    }


def test_the_sample_has_no_held_out_document_and_the_shares_asked_for(
    corpus: tuple[Path, list[dict[str, str]]],
) -> None:
    folder, rows = corpus
    total = sum(len(row["text"]) for row in rows)
    found = list(documents.training_sample(recipe(budget=total // 4), folder))
    by_text = {row["text"]: row for row in rows}
    taken = [by_text[text] for text in found]
    assert not any(documents.is_held_out(row["identity"], 0, 0.25) for row in taken)
    counts = {name: sum(row["source"] == name for row in taken) for name in "abc"}
    assert counts["a"] < counts["b"] < counts["c"]
    assert list(documents.training_sample(recipe(budget=total // 4), folder)) == found


def test_a_giant_document_is_cut_in_the_sample(tmp_path: Path) -> None:
    rows = [{"identity": "0" * 32, "source": "a", "text": "x" * 3_000_000, "path": "", "label": "", "metadata": "{}"}]
    rows += [{**rows[0], "identity": f"{number:032x}", "text": "y"} for number in range(1, 40)]
    write(tmp_path / "documents", rows, 8)
    longest = max(map(len, documents.training_sample(recipe("corpus", 1 << 40), tmp_path / "documents")))
    assert longest in (1, documents.SAMPLE_CHARACTERS)


def test_a_few_from_all_over(corpus: tuple[Path, list[dict[str, str]]]) -> None:
    folder, _ = corpus
    found = [int(one.identity, 16) for one in documents.spread(folder, 5, 2)]
    assert len(found) == len(set(found)) >= 10
    assert min(found) == 0 and max(found) > 400
