"""A user's reader, filter and step over all documents in one recipe: counted, and equal in every engine."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from corpus_samples import page_files, prose, subtitles

from bessemer.cli import run_command
from bessemer.common import extensions
from bessemer.corpus.statistics import funnel_lines
from bessemer.report import page as report
from bessemer.run.directory import RunDirectory
from bessemer.run_tasks import run as worker
from tests.storage_folder import contents

FILES = page_files("how-to/own-filter.md") | page_files("how-to/own-reader.md")
FIRST_WORD = """
from bessemer import DocumentVerdict, GlobalStep


class FirstWord(GlobalStep):
    \"\"\"Cut the first word out of each document.\"\"\"

    name = "headless"

    def decide(self, facts, report):
        (report / "words.txt").write_text(str(sum(map(len, facts))))

    def judge(self, facts, decided):
        words = [text.partition(" ")[0] for text in facts["text"].to_pylist()]
        return [DocumentVerdict(row, None, spans=[(0, len(word))]) for row, word in enumerate(words)]
"""


def film(number: int) -> str:
    """Return the text of a film: every third has long words, and every third a line of asterisks."""
    more = " antidisestablishmentarianism" * 60 if number % 3 == 0 else "\n********" if number % 3 == 1 else ""
    return f"[music] {prose(number)}{more}"


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The corpus of 30 films of three folders and one damaged file, built in this process."""
    monkeypatch.setenv(extensions.TRUSTED, "{}")
    monkeypatch.chdir(tmp_path)
    reader = FILES["subtitles.py"].replace("text=", 'metadata={"url": "http://" + part.name.partition("/")[2]}, text=')
    for name, text in {**FILES, "subtitles.py": reader, "first_word.py": FIRST_WORD}.items():
        Path(name).write_text(text)
    recipe = [FILES[name] for name in ("films.toml", "my.toml", "steps.toml")]
    recipe.append('[[corpus.steps]]\nuse = "first_word:FirstWord"\n')
    Path("my.toml").write_text('[run]\nname = "t"\ndir = "runs"\n' + "\n".join(recipe))
    for number in range(30):
        file = Path("films", "a" if number < 18 else "bc"[number % 2], f"{number}.srt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(subtitles(film(number)))
    file.with_suffix(".srt.gz").write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()
    Path("films", "bad.SRT").write_text("1\nno times\nText")
    Path("films", "other.txt").write_text("of no film")
    assert run_command(["corpus", "my.toml"]) == 0
    return contents(Path("runs/t/corpus"))


def arguments(engine: str) -> list[str]:
    """Return the command for two workers of an engine, with another folder of runs so that no corpus is reused."""
    keys = (f"corpus.engine={engine}", "corpus.workers=2", f"run.dir={engine}-runs")
    return ["corpus", "my.toml", *(word for key in keys for word in ("--set", key))]


def test_counts_are_by_the_name_of_each_class_and_workers_build_the_same_corpus(
    finely: None, built: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = RunDirectory(Path("runs/t")).corpus
    documents, rejected = (pq.read_table(corpus / kind).to_pylist() for kind in ("documents", "rejected"))
    assert sorted(row["text"] for row in documents) == sorted(
        " " + film(number).partition(" ")[2].partition("\n***")[0] for number in range(18, 30) if number % 3
    )
    assert Counter((row["reason"], row["detail"]) for row in rejected) == {
        ("unreadable", "subtitle 1 has no times"): 1,
        ("long_words.share", "0.33 of the words are long"): 10,
        ("host_limit", "a has 12 pages"): 12,
    }
    statistics = json.loads(built["statistics.json"])
    (source,) = statistics["sources"]
    assert (source["files"], source["format"], list(source["not_read"])) == (31, "subtitles.py:Subtitles", [".txt"])
    steps = {row["step"]: (row["documents_in"], row["rejected"]) for row in source["steps"]}
    own = {"long_words": (30, 10), "host_limit": (20, 12), "headless": (8, 0)}
    assert own.items() <= steps.items() and [step for step in steps if step in own] == list(own)
    assert statistics["totals"]["tables"]["edited_documents"] == {"long_words": 10}
    assert statistics["totals"]["rejected"] == {"unreadable": 1, "long_words.share": 10, "host_limit": 12}
    assert statistics["host_limit"] == {"a": 12} and built["words.txt"] == b"8"
    meanings = {name: statistics["reasons"][name]["meaning"] for name in ("long_words.share", "host_limit")}
    assert meanings["host_limit"] == "Reject the pages of hosts that have too many."
    assert meanings["long_words.share"].startswith("Reject documents with too many long words")
    assert any("host_limit" in line and "too many" in line for line in funnel_lines(statistics))
    assert "long words" in report.write(RunDirectory(Path("runs/t"))).read_text()
    monkeypatch.setattr(worker, "SMALL_BYTES", 0)
    assert run_command(arguments("local")) == 0
    assert contents(Path("local-runs", "t", "corpus")) == built


@pytest.mark.long
def test_the_corpus_is_equal_on_slurm(finely: None, built: dict[str, bytes], cluster: Path) -> None:
    assert run_command(arguments("slurm")) == 0
    assert contents(Path("slurm-runs", "t", "corpus")) == built
    assert "sbatch" in (cluster / "calls").read_text()


@pytest.mark.long
def test_the_corpus_is_equal_on_ray(built: dict[str, bytes]) -> None:
    """Run as a separate command whose workers receive the files and their hashes."""
    pytest.importorskip("ray")
    environment = {name: value for name, value in os.environ.items() if name != extensions.TRUSTED}
    command = [sys.executable, "-m", "bessemer", *arguments("ray")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert contents(Path("ray-runs", "t", "corpus")) == built
