"""A user's steps over all documents: found next to the recipe, counted, named in errors, and equal in workers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import slurm_commands
from build_corpus import cut_finely
from corpus_samples import prose

from bessemer.common import extensions
from bessemer.common.errors import BessemerError, InputError
from bessemer.corpus import global_steps, pipeline
from bessemer.corpus.statistics import funnel_lines
from bessemer.recipe import load
from bessemer.run.directory import RunDirectory
from bessemer.run_tasks import run as worker
from bessemer.run_tasks import slurm

PAGE = (Path(__file__).parents[2] / "docs" / "how-to/own-filter.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', PAGE, re.DOTALL))
STEPS = (
    BLOCKS["host_limit.py"]
    + """

class FirstWord(GlobalStep):
    \"\"\"Cut the first word out of each document.\"\"\"

    name = "headless"
    fails: bool = False

    def decide(self, facts, report):
        (report / "words.txt").write_text(str(sum(map(len, facts))))

    def judge(self, facts, decided):
        words = [text.partition(" ")[0] for text in facts["text"].to_pylist()]
        return [DocumentVerdict(row, None, spans=[(0, len(word) // (not self.fails))]) for row, word in enumerate(words)]
"""
)
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
    (tmp_path / "mine.py").write_text(STEPS)
    return tmp_path


def built(
    folder: Path, steps: str, run: str = "run", *overrides: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    (folder / "my.toml").write_text(RECIPE + steps)
    corpus = RunDirectory(folder / run)
    pipeline.build(load(folder / "my.toml", overrides, trust_code=False), corpus)
    documents, rejected = (pq.read_table(corpus.corpus / kind).to_pylist() for kind in ("documents", "rejected"))
    return documents, rejected, json.loads((corpus.corpus / "statistics.json").read_text())


def test_a_step_next_to_the_recipe_in_every_engine(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_finely(monkeypatch)
    steps = BLOCKS["steps.toml"].replace("host_limit:", "mine:") + '[[corpus.steps]]\nuse = "mine:FirstWord"\n'
    before, _, _ = built(files, "", "plain")
    documents, rejected, statistics = built(files, steps)
    assert len(before) == 30 and len(documents) == 18
    assert {(row["reason"], row["detail"]) for row in rejected} == {("host_limit", "a.example has 12 pages")}
    texts = {row["identity"]: row["text"] for row in before}
    assert all(f" {texts[row['identity']].partition(' ')[2]}" == row["text"] for row in documents)
    assert statistics["host_limit"] == {"a.example": 12}
    assert statistics["totals"]["rejected"] == {"host_limit": 12}
    assert statistics["reasons"]["host_limit"]["meaning"] == "Reject the pages of hosts that have too many."
    assert any("host_limit" in line and "too many" in line for line in funnel_lines(statistics))
    rows = [(row["step"], row["documents_in"], row["rejected"]) for row in statistics["sources"][0]["steps"]]
    assert rows[-5:] == [
        ("quality", 30, 0), ("duplicates", 30, 0), ("host_limit", 30, 12), ("headless", 18, 0), ("lines", 18, 0)
    ]  # fmt: skip
    assert (files / "run" / "corpus" / "words.txt").read_text() == "18"
    monkeypatch.setattr(worker, "SMALL_BYTES", 0)
    monkeypatch.setattr(global_steps, "GROUP_BYTES", 0)
    for name, value in {"READ_SECONDS": 0.02, "ASK_SECONDS": 0.1, "SEEN_SECONDS": 0.3}.items():
        monkeypatch.setattr(slurm, name, value)
    monkeypatch.setenv("PATH", f"{slurm_commands.install(files / 'slurm')}:{os.environ['PATH']}")
    for engine in ("local", "slurm"):
        assert built(files, steps, engine, f"corpus.engine={engine}") == (documents, rejected, statistics)


def test_near_duplicates_by_another_signature(files: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to/deduplicate.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', page, re.DOTALL))
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
        (STEPS, 'use = "mine:FirstWord"\nfails = true', BessemerError, "mine.py.*FirstWord.judge: ZeroDivisionError"),
        (STEPS.replace("decided[host]}", "none[0]}").replace("1000", "1"), 'use = "mine:HostLimit"', BessemerError, "HostLimit.judge: NameError"),
        (STEPS.replace("return pa.table", "return str"), 'use = "mine:HostLimit"', BessemerError, "HostLimit.collect: .*30 rows"),
        (STEPS.replace("return {host: count", "return {(host,): count").replace("1000", "1"), 'use = "mine:HostLimit"', BessemerError, "HostLimit.decide"),
        (STEPS.replace("DocumentVerdict(row,", "DocumentVerdict(-1,").replace("1000", "1"), 'use = "mine:HostLimit"', BessemerError, "HostLimit.judge: .*-1"),
        (STEPS.replace("judge(self, facts: pa.Table, decided: dict[str, int])", "judge(self)"), 'use = "mine:HostLimit"', InputError, r"HostLimit.judge\(self\)"),
        (STEPS.replace("def judge", "def judged"), 'use = "mine:HostLimit"', InputError, "HostLimit lacks the method judge"),
        (STEPS.replace('"headless"', '"lines"'), 'use = "mine:FirstWord"', InputError, "'lines' is taken"),
        (STEPS, 'use = "mine:HostLimit"\nlimits = 4', InputError, "corpus.steps.HostLimit.limits: .*limit"),
    ],
)  # fmt: skip
def test_an_unusable_step_is_named(files: Path, code: str, steps: str, error: type[Exception], place: str) -> None:
    (files / "mine.py").write_text(code)
    with pytest.raises(error, match=place):
        built(files, f"[[corpus.steps]]\n{steps}\n")
    assert not (files / "run" / "corpus").exists()
