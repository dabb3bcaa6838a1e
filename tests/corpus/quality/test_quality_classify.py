"""The classifier end to end on a small corpus, and what must not change its decisions."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from bessemer.common.errors import InputError
from bessemer.corpus.dedup.task import packed
from bessemer.corpus.filters.quality.classify import inputs
from bessemer.corpus.filters.quality.decide import QualityStep
from bessemer.corpus.filters.quality.sample import draw
from bessemer.corpus.global_steps import CorpusDocuments, run_step
from bessemer.corpus.verdicts import read_table
from bessemer.recipe import Corpus, Quality, Source, parse

SOURCES = ("wiki", "crawl", "blog")
SETTINGS = Quality(high=("wiki",), low=("crawl",), use="filter", threshold=0.5, hash_bits=12)


@dataclass(frozen=True)
class Part:
    """The documents of one source, as tables."""

    rows: tuple[tuple[str, str, str], ...]
    at_once: int
    corpus: str = ""

    @property
    def size(self) -> int:
        return len(self.rows)

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        there = dict(zip(("identity", "source", "text"), zip(*self.rows, strict=True), strict=True))
        table = pa.table({name: pa.array(values, pa.string()) for name, values in there.items()})
        for at in range(0, table.num_rows, self.at_once):
            yield table.select(list(columns)).slice(at, self.at_once)


class Decided(NamedTuple):
    """Decisions on all documents, sorted by identity."""

    identities: np.ndarray
    scores: np.ndarray
    stays: np.ndarray
    model: Path

    def rows(self, identities: Sequence[str]) -> np.ndarray:
        return np.searchsorted(self.identities, packed(identities))


def judged(settings: Quality, documents: list, folder: Path, at_once: int = 97) -> tuple[Decided, dict[str, Any]]:
    """Train and classify in one process, with parts of some documents of one source."""
    size, parts = 150, []
    for name in SOURCES:
        rows = [row for row in documents if row[1] == name]
        parts += [Part(tuple(rows[start : start + size]), at_once) for start in range(0, len(rows), size)]
    corpus = Corpus(sources=tuple(Source(name=name, paths=("x",)) for name in SOURCES))
    done = run_step(QualityStep(**dict(settings)), CorpusDocuments(parts, folder, "m", corpus))
    verdicts = pa.concat_tables(
        read_table(folder / "verdicts" / f"{number:06d}" / f"{place:06d}.arrow")
        for number, part in enumerate(parts)
        for place, _ in enumerate(part(["identity"]))
    )
    names = packed([row[0] for part in parts for row in part.rows])
    order = np.argsort(names)
    scores, stays = verdicts["score"].to_numpy()[order], pc.is_null(verdicts["reason"]).to_numpy()[order]
    assert done["rejected"].get("low_quality", 0) == int((~stays).sum()) and done["documents"] == len(names)
    assert {path.name for path in folder.iterdir()} == {"result", "verdicts"}
    report = folder / "result" / "report"
    return Decided(names[order], scores, stays, report / "quality"), json.loads((report / "quality.json").read_text())


def of_source(found: Decided, documents: list, name: str) -> np.ndarray:
    return found.rows([identity for identity, source, _ in documents if source == name])


def test_the_classifier_learns_and_filters_the_chosen_sources(documents, tmp_path: Path) -> None:
    found, report = judged(SETTINGS, documents, tmp_path)
    assert report["held_out"]["accuracy"] > 0.9 and report["held_out"]["roc_auc"] > 0.95
    wiki, crawl = (of_source(found, documents, name) for name in ("wiki", "crawl"))
    assert found.scores[wiki].mean() > 0.8 > 0.2 > found.scores[crawl].mean()
    assert found.stays[wiki].all(), "documents of high are not judged"
    assert np.array_equal(found.stays[crawl], found.scores[crawl] >= 0.5)
    rejected = int(crawl[~found.stays[crawl]][0])
    assert report["use"]["limit"] == "threshold 0.5" and not found.stays[rejected]
    judged_sources = [row["source"] for row in report["use"]["sources"] if row["judged"]]
    assert judged_sources == ["blog", "crawl"]
    assert sum(row["kept"] for row in report["use"]["sources"]) == int(found.stays.sum())
    assert {name: sum(counts) for name, counts in report["scores"].items()} == {"wiki": 300, "crawl": 300, "blog": 200}
    assert report["labelled"]["high"] == {"wiki": 300} and report["labelled"]["low"] == {"crawl": 300}
    assert (found.model / "model.npy").exists()


def test_order_and_table_boundaries_change_nothing(documents, tmp_path: Path) -> None:
    one, first = judged(SETTINGS, documents, tmp_path / "one")
    shuffled = random.Random(1).sample(documents, len(documents))
    two, second = judged(SETTINGS, shuffled, tmp_path / "two", at_once=61)
    for name in ("identities", "scores", "stays"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name
    assert first == second
    assert (one.model / "model.json").read_bytes() == (two.model / "model.json").read_bytes()


def test_a_saved_model_gives_the_same_scores_without_labels(documents, tmp_path: Path) -> None:
    one, _ = judged(SETTINGS, documents, tmp_path / "one")
    settings = Quality(model=str(one.model), use="filter", sources=("crawl", "blog"))
    two, report = judged(settings, documents, tmp_path / "two")
    assert np.array_equal(one.scores, two.scores) and np.array_equal(one.stays, two.stays)
    assert "held_out" not in report and not two.model.exists()


def test_a_share_of_the_documents_is_kept(documents, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"threshold": None, "keep_share": 0.4})
    found, report = judged(settings, documents, tmp_path / "all")
    rows = np.concatenate([of_source(found, documents, name) for name in ("crawl", "blog")])
    cut = np.sort(found.scores[rows])[::-1][round(0.4 * len(rows)) - 1]
    assert report["use"]["threshold"] == cut and np.array_equal(found.stays[rows], found.scores[rows] >= cut)


def test_sample_splits_are_disjoint_and_have_each_text_once(documents, tables) -> None:
    copies = [
        (hashlib.blake2b(f"copy {number}".encode(), digest_size=16).hexdigest(), source, text)
        for number, (_, source, text) in enumerate(documents[:5])
    ]
    both = [("0" * 31 + "1", "crawl", documents[10][2])]  # a text on both sides is an example of neither
    found = draw(SETTINGS, SOURCES, tables([*documents, *copies, *both]))
    assert len(set(found.texts)) == len(found.texts)
    assert found.duplicates == 5 + 2 and documents[10][2] not in found.texts
    assert int(found.high.sum()) * 2 == len(found.high) == 2 * 299
    sizes = [len(found.subset(is_test)[0]) for is_test in (False, True)]
    assert sum(sizes) == len(found.high) and sizes[0] > 2 * sizes[1] and min(sizes) > 60
    fewer = draw(SETTINGS.model_copy(update={"documents": 100}), SOURCES, tables(documents))
    assert len(fewer.texts) == 200 and set(fewer.texts) < set(draw(SETTINGS, SOURCES, tables(documents)).texts)


def test_examples_from_files_and_runs(documents, tables, tmp_path: Path) -> None:
    good = [text for _, source, text in documents if source == "wiki"]
    (tmp_path / "good").mkdir()
    lines = [json.dumps({"text": text}) for text in good[:100]]
    broken = ['{"text": "unfinished', "[1]", '{"text": 3}', "[" * 100_000, '{"text": "\\ud800 half"}']
    (tmp_path / "good" / "a.jsonl").write_text("\n".join([*lines[:50], *broken, *lines[50:]]))
    (tmp_path / "good" / "b.txt").write_text(good[100])
    (tmp_path / "good" / "c.txt").write_bytes(b"\xff not UTF-8")
    (tmp_path / "good" / "d.md.gz").write_bytes(gzip.compress(good[101].encode()))  # read like a source of the corpus
    (tmp_path / "good" / "e.csv").write_text(f'id,text\n1,"{good[102]}"\n')
    (tmp_path / "good" / "f.pdf").write_text("not read")
    pq.write_table(pa.table({"text": [good[103]]}), tmp_path / "good" / "g.parquet")
    run = tmp_path / "run" / "corpus" / "documents"
    run.mkdir(parents=True)
    bad = [row for row in documents if row[1] == "crawl"]
    table = pa.table({"identity": [row[0] for row in bad], "text": [row[2] for row in bad]})
    pq.write_table(table, run / "part-0.parquet")
    settings = Quality(high=(str(tmp_path / "good"),), low=(str(run),), hash_bits=12)
    found = draw(settings, ("blog",), tables([row for row in documents if row[1] == "blog"]))
    assert found.num_documents == {str(tmp_path / "good"): 105, str(run): 300}
    assert {text for text, high in zip(found.texts, found.high, strict=True) if high} - {"? half"} <= set(good)
    assert int(found.high.sum()) == 105
    with pytest.raises(InputError, match="RUN/corpus/documents"):
        inputs(Quality(high=(str(tmp_path / "run"),), low=("blog",)), ("blog",))
    before = inputs(settings, ("blog",))
    (tmp_path / "good" / "b.txt").write_text("another text")
    assert inputs(settings, ("blog",)) != before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"high": ("wikis",)}, "corpus.quality: wikis"),
        ({"sources": ("news",)}, "corpus.quality.sources: .*news.*blog, crawl, wiki"),
        ({"documents": 20}, "corpus.quality.low"),
        ({"model": "/nowhere"}, "corpus.quality.model: .*model.json"),
    ],
)
def test_unusable_settings_are_errors(documents, tmp_path: Path, change: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        judged(SETTINGS.model_copy(update=change), documents, tmp_path)


RECIPE = '[run]\nname = "t"\n[model]\ndepth = 2\n[[corpus.sources]]\nname = "wiki"\nformat = "text"\npaths = ["a"]\n[corpus.quality]\n'


def test_paths_of_examples_are_relative_to_the_recipe(tmp_path: Path) -> None:
    from bessemer.recipe import load

    (tmp_path / "r.toml").write_text(RECIPE + 'high = ["wiki"]\nlow = ["raw.jsonl"]\nmodel = "old/run"\n')
    quality = load(tmp_path / "r.toml").corpus.quality
    assert quality.high == ("wiki",) and quality.low == (str(tmp_path / "raw.jsonl"),)
    assert quality.model == str(tmp_path / "old/run") and quality.on
    assert not parse(RECIPE, "test").corpus.quality.on
