from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bessemer.recipe import Recipe, parse
from bessemer.tokens import documents

PLAIN = (None, None, None)


def recipe(
    sample: str = "mixture", budget: int = 800, more: str = "", weights: tuple[float | None, ...] = (1, 3, 4)
) -> Recipe:
    tables = "".join(
        f'[[corpus.sources]]\nname = "{name}"\nformat = "text"\npaths = ["x"]\n' + f"weight = {weight}\n" * bool(weight)
        for name, weight in zip("abc", weights, strict=True)
    )
    text = f'[run]\nname = "r"\n[model]\ndepth = 2\n{tables}[tokens]\nheld_out = 0.25\n{more}\n[tokenizer]\n'
    return parse(f'{text}sample = "{sample}"\nsample_bytes = {budget}\n', "test")


# Half of the run has the weights of the recipe, then 0.4 of it 1, 1, 0, then the decay, 0.1 of it, only a.
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
ALWAYS = SCHEDULE.replace("from = 0.5", "from = 0")


@pytest.mark.parametrize(
    ("of", "sizes", "wanted"),
    [
        (recipe("corpus", 500), (100, 900, 1000), (25, 225, 250)),
        (recipe("corpus", 5000), (100, 900, 0), (100, 900, 0)),
        (recipe(budget=800), (1000, 1000, 1000), (100, 300, 400)),
        (recipe(budget=900), (1000, 1000, 100), (200, 600, 100)),  # other sources replace what a small source lacks
        (recipe(budget=10_000), (1000, 1000, 100), (1000, 1000, 100)),
        (recipe(budget=100), (0, 100, 100), (0, 300 / 7, 400 / 7)),
        (recipe("mixture", 1000, SCHEDULE), (10_000, 10_000, 10_000), (362.5, 387.5, 250)),
        (recipe("mixture", 1000, SCHEDULE, PLAIN), (600_000, 300_000, 100_000), (600, 350, 50)),
        (
            recipe("mixture", 1000, ALWAYS, PLAIN),
            (600_000, 300_000, 100_000),
            (550, 450, 0),
        ),  # never trained on, so not sampled
        (recipe("mixture", 700, "temperature = 2", PLAIN), (160_000, 40_000, 10_000), (400, 200, 100)),
        (recipe("mixture", 700, "temperature = 2", PLAIN), (0, 0, 0), (0, 0, 0)),
    ],
)
def test_the_sample_has_the_shares_of_the_training(
    of: Recipe, sizes: tuple[int, ...], wanted: tuple[float, ...]
) -> None:
    shares = documents.sample_shares(of, dict(zip("abc", sizes, strict=True)))
    assert [shares[name] * size for name, size in zip("abc", sizes, strict=True)] == pytest.approx(wanted)


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
    texts = [f"{number} " * 50 for number in range(600)]
    rows = [
        {
            "identity": f"{number:032x}",
            "source": "abc"[number % 3],
            "text": text,
            "path": "",
            "label": "",
            "metadata": "{}",
        }
        for number, text in enumerate(texts)
    ]
    write(tmp_path / "documents", rows, 11)
    return tmp_path / "documents", rows


def test_the_sample_has_the_requested_shares_and_no_held_out_document(
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


def test_passages_of_every_document_can_be_held_out(corpus: tuple[Path, list[dict[str, str]]]) -> None:
    folder, rows = corpus
    stored = list(documents.read_documents(documents.part_files(folder)))
    tokens = recipe().tokens.changed(held_out=0.2, held_out_from="passages")
    cut = [documents.split_document(document, tokens) for document in stored]
    for row, parts in zip(rows, cut, strict=True):
        assert "".join(part.text for part in parts) == row["text"] and all(part.text for part in parts)
        assert sum(part.is_held_out for part in parts) == 1
    held = sum(len(part.text) for parts in cut for part in parts if part.is_held_out)
    assert 0.1 < held / sum(len(row["text"]) for row in rows) < 0.6  # short texts without lines are split at words
    assert [documents.split_document(one, tokens.changed(seed=1)) for one in stored] != cut


def test_the_held_out_share_has_the_requested_bytes(corpus: tuple[Path, list[dict[str, str]]]) -> None:
    folder, rows = corpus
    for wanted in (1, 5000, 20_000):
        share, number, held = documents.held_out_share(folder, 0, wanted, 1 << 40, len(rows))
        chosen = [len(row["text"]) for row in rows if documents.is_held_out(row["identity"], 0, share)]
        assert (len(chosen), sum(chosen)) == (number, held) and held >= wanted > held - max(chosen)
