"""The dry run of the rules: the decisions of the whole corpus for some of its documents, with nothing written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_samples import prose

from bessemer.cli import run_command
from bessemer.corpus.dry_run import dry_run
from bessemer.recipe import Corpus


def write_sources(folder: Path, count: int = 400) -> dict[str, object]:
    """Write JSON lines, compressed ones, Parquet and files, each with short, wrapped, good and repeated documents."""
    texts = []
    for number in range(count):
        text = prose(number, 60) + "."
        texts.append(("short" if number % 4 == 0 else text) if number % 10 else prose(3, 60))
    rows = [{"text": text} for text in texts]
    data = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "lines.jsonl").write_text(data)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(data.encode()))
    pq.write_table(pa.Table.from_pylist(rows), folder / "table.parquet", row_group_size=50)
    (folder / "files").mkdir()
    for number, text in enumerate(texts[:100]):
        (folder / "files" / f"{number}.txt").write_text(text)
    names = {"lines": "lines.jsonl", "packed": "packed.jsonl.gz", "table": "table.parquet", "files": "files"}
    sources = [{"name": name, "paths": [str(folder / path)]} for name, path in names.items()]
    return {"sources": sources, "rules": {"min_characters": 200}}


def test_decisions_equal_those_of_the_whole_corpus_and_the_sample_is_reproducible(tmp_path: Path) -> None:
    corpus = Corpus.model_validate(write_sources(tmp_path))
    found = dry_run(corpus, 200)
    assert 200 <= found["documents"] <= 300
    for source in found["sources"]:
        rejected = sum(entry["documents"] for entry in source["rejected"].values())
        assert source["documents_in"] == source["documents_kept"] + rejected
        example = source["rejected"]["too_short"]["examples"][0]
        assert example["detail"] == "5 (limit 200) characters" and example["excerpt"] == "short"
    copies = [source["rejected"].get("exact_duplicate", {"documents": 0}) for source in found["sources"]]
    assert sum(entry["documents"] for entry in copies) > 10, "each tenth document is the same"
    assert dry_run(corpus, 200) == found
    assert dry_run(corpus, 20)["documents"] < 60


def test_the_command_prints_the_funnel_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert run_command(["corpus", "lines.jsonl", "--sample", "100", "--set", "corpus.rules.min_characters=200"]) == 0
    said = capsys.readouterr().out
    assert "of 100 documents" in said and "too_short" in said
    assert run_command(["corpus", "lines.jsonl", "--sample", "100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 100
    assert run_command(["corpus", "lines.jsonl", "--sample", "0"]) == 2
    assert run_command(["corpus", "none.jsonl", "--sample", "10"]) == 2
    assert sorted(tmp_path.rglob("*")) == before
