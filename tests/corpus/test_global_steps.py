"""A user's steps over all documents: another signature, and failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from corpus_samples import page_files, prose

from bessemer.common import extensions
from bessemer.common.errors import BessemerError, InputError
from bessemer.corpus import pipeline
from bessemer.recipe import load
from bessemer.run.directory import RunDirectory

STEP = page_files("how-to/own-filter.md")["host_limit.py"]
RECIPE = """
[run]
name = "small"
[model]
depth = 2
[corpus]
workers = 2
[[corpus.sources]]
name = "pages"
paths = ["pages.jsonl"]
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(extensions.TRUSTED, "{}")
    rows = [
        {
            "text": prose(number),
            "url": f"http://{'a' if number < 12 else 'bc'[number % 2]}.example/{number}",
        }
        for number in range(30)
    ]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(STEP)
    return tmp_path


def built(folder: Path, steps: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    (folder / "my.toml").write_text(RECIPE + steps)
    corpus = RunDirectory(folder / "run")
    pipeline.build(load(folder / "my.toml", trust_code=False), corpus)
    documents, rejected = (pq.read_table(corpus.corpus / kind).to_pylist() for kind in ("documents", "rejected"))
    return documents, rejected, json.loads((corpus.corpus / "statistics.json").read_text())


def test_near_duplicates_by_another_signature(files: Path) -> None:
    blocks = page_files("how-to/deduplicate.md")
    (files / "simhash.py").write_text(blocks["simhash.py"])
    with (files / "pages.jsonl").open("a") as file:
        for number in range(10):
            file.write(json.dumps({"text": f"{prose(number)}\nand some more words", "url": ""}) + "\n")
    documents, rejected, statistics = built(files, blocks["simhash.toml"])
    assert len(documents) == 30 and {row["reason"] for row in rejected} == {"sim_hash.near_duplicate"}
    assert statistics["duplicates"]["removed"] == {"exact": 0, "near": 0}
    assert statistics["sim_hash"]["removed"] == {"exact": 0, "near": 10}


@pytest.mark.parametrize(
    ("code", "steps", "error", "place"),
    [
        (STEP.replace("decided[host]}", "none[0]}").replace("1000", "1"), 'use = "mine:HostLimit"', BessemerError, "mine.py.*HostLimit.judge: NameError"),
        (STEP.replace("return pa.table", "return str"), 'use = "mine:HostLimit"', BessemerError, "HostLimit.collect: .*30 rows"),
        (STEP.replace("return {host: count", "return {(host,): count").replace("1000", "1"), 'use = "mine:HostLimit"', BessemerError, "HostLimit.decide"),
        (STEP.replace("DocumentVerdict(row,", "DocumentVerdict(-1,").replace("1000", "1"), 'use = "mine:HostLimit"', BessemerError, "HostLimit.judge: .*-1"),
        (STEP.replace("judge(self, facts: pa.Table, decided: dict[str, int])", "judge(self)"), 'use = "mine:HostLimit"', InputError, r"HostLimit.judge\(self\)"),
        (STEP.replace("def judge", "def judged"), 'use = "mine:HostLimit"', InputError, "HostLimit lacks the method judge"),
        (STEP.replace("limit: int", 'name = "lines"\n    limit: int'), 'use = "mine:HostLimit"', InputError, "'lines' is taken"),
        (STEP, 'use = "mine:HostLimit"\nlimits = 4', InputError, "corpus.steps.HostLimit.limits: .*limit"),
    ],
)  # fmt: skip
def test_an_unusable_step_is_named(files: Path, code: str, steps: str, error: type[Exception], place: str) -> None:
    (files / "mine.py").write_text(code)
    with pytest.raises(error, match=place):
        built(files, f"[[corpus.steps]]\n{steps}\n")
    assert not (files / "run" / "corpus").exists()
