from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bessemer.recipe import Recipe, parse
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


SCHEDULE = """
[[tokens.schedule]]
from = 0.5
weights = {a = 1, b = 1, c = 0}
[[tokens.schedule]]
from = "decay"
weights = {a = 1, b = 0, c = 0}
[train.schedule]
kind = "wsd"
decay_share = 0.1
"""


def test_shares_by_a_changing_mixture_are_the_mean_over_the_training() -> None:
    """Half of the run by the weights 1, 3, 4, then 0.4 of it by 1, 1, 0, then the decay, 0.1 of it, a alone."""
    sizes = dict.fromkeys("abc", 10_000)
    text = RECIPE.format(sample="mixture", budget=10_000).replace("[tokenizer]", SCHEDULE + "[tokenizer]")
    wanted = {"a": 0.5 / 8 + 0.4 / 2 + 0.1, "b": 0.5 * 3 / 8 + 0.4 / 2, "c": 0.5 / 2}
    assert documents.sample_shares(parse(text, "test"), sizes) == pytest.approx(wanted)
    bare = "\n".join(line for line in text.splitlines() if not line.startswith("weight ="))  # by size, then the phases
    sizes = {"a": 6_000_000, "b": 3_000_000, "c": 1_000_000}
    wanted = {"a": 0.5 * 0.6 + 0.4 / 2 + 0.1, "b": 0.5 * 0.3 + 0.4 / 2, "c": 0.5 * 0.1}
    found = documents.sample_shares(parse(bare, "test"), sizes)
    assert {name: found[name] * sizes[name] / 10_000 for name in sizes} == pytest.approx(wanted)
    never = documents.sample_shares(
        parse(text.replace("from = 0.5", "from = 0").replace("= 1, b = 1, c", "= 0, b = 1, c"), "test"), sizes
    )
    assert never["c"] == 0.0  # what is never read is not in the sample


def test_shares_by_temperature() -> None:
    text = RECIPE.format(sample="mixture", budget=1000).replace("[tokens]", "[tokens]\ntemperature = 2")
    bare = parse("\n".join(line for line in text.splitlines() if not line.startswith("weight =")), "test")
    sizes = {"a": 160_000, "b": 40_000, "c": 10_000}
    shares = documents.sample_shares(bare, sizes)
    assert {name: shares[name] * sizes[name] for name in sizes} == pytest.approx(
        {"a": 4000 / 7, "b": 2000 / 7, "c": 1000 / 7}
    )
    assert documents.sample_shares(bare, dict.fromkeys("abc", 0)) == dict.fromkeys("abc", 0.0)


def write(folder: Path, rows: list[dict[str, str]], group: int) -> None:
    folder.mkdir(exist_ok=True)
    for number, start in enumerate(range(0, len(rows), 7 * group)):
        table = pa.Table.from_pylist(rows[start : start + 7 * group])
        pq.write_table(table, folder / f"part-{number:05d}.parquet", row_group_size=group)


def sample_of(of: Recipe, folder: Path, rows: list[dict[str, str]]) -> list[str]:
    sizes = {name: sum(len(row["text"]) for row in rows if row["source"] == name) for name in "abc"}
    stored = documents.read_documents(documents.part_files(folder))
    return list(documents.sample_texts(of.tokens, of.chat_parts, stored, documents.sample_shares(of, sizes)))


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


def test_the_sample_has_no_held_out_document_and_the_shares_asked_for(
    corpus: tuple[Path, list[dict[str, str]]],
) -> None:
    folder, rows = corpus
    total = sum(len(row["text"]) for row in rows)
    found = sample_of(recipe(budget=total // 4), folder, rows)
    by_text = {row["text"]: row for row in rows}
    taken = [by_text[text] for text in found]
    assert not any(documents.is_held_out(row["identity"], 0, 0.25) for row in taken)
    counts = {name: sum(row["source"] == name for row in taken) for name in "abc"}
    assert counts["a"] < counts["b"] < counts["c"]
    assert sample_of(recipe(budget=total // 4), folder, rows) == found


def test_passages_are_held_out_of_every_document(corpus: tuple[Path, list[dict[str, str]]]) -> None:
    folder, rows = corpus
    stored = list(documents.read_documents(documents.part_files(folder)))
    tokens = recipe().tokens.changed(held_out=0.2, held_out_from="passages")
    cut = [documents.split_document(document, tokens) for document in stored]
    for row, parts in zip(rows, cut, strict=True):
        assert "".join(part.text for part in parts) == row["text"] and all(part.text for part in parts)
        assert sum(part.is_held_out for part in parts) == 1
    held = sum(len(part.text) for parts in cut for part in parts if part.is_held_out)
    assert 0.1 < held / sum(len(row["text"]) for row in rows) < 0.6  # short texts without lines are cut at words
    assert [documents.split_document(one, tokens.changed(seed=1)) for one in stored] != cut


def test_the_share_holds_the_bytes_wanted(corpus: tuple[Path, list[dict[str, str]]]) -> None:
    folder, rows = corpus
    for wanted in (1, 5000, 20_000):
        share, number, held = documents.held_out_share(folder, 0, wanted, 1 << 40, len(rows))
        chosen = [len(row["text"]) for row in rows if documents.is_held_out(row["identity"], 0, share)]
        assert (len(chosen), sum(chosen)) == (number, held) and held >= wanted > held - max(chosen)
