"""Filters of a recipe: the one of docs/how-to/own-filter.md in every engine, its counts, and failures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import slurm_commands
from build_corpus import cut_finely
from corpus_samples import prose

from bessemer.cli import run_command
from bessemer.common import extensions
from bessemer.corpus.document import Document, Reject
from bessemer.corpus.filters.base import BUILT_IN
from bessemer.corpus.filters.rules.apply import RULES, check
from bessemer.recipe.uses import make
from bessemer.report import page as report
from bessemer.run.directory import RunDirectory
from bessemer.run_tasks import run as worker
from bessemer.run_tasks import slurm
from bessemer.text.statistics import Statistics

PAGE = (Path(__file__).parents[2] / "docs" / "how-to/own-filter.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', PAGE, re.DOTALL))
LONG = "antidisestablishmentarianism "
HEAD = """
[run]
name = "t"
dir = "runs"

[[corpus.sources]]
name = "s"
format = "text"
paths = ["data"]

"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The filter and the recipe of the page, and 30 documents."""
    monkeypatch.setenv(extensions.TRUSTED, "{}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long_words.py").write_text(BLOCKS["long_words.py"])
    (tmp_path / "my.toml").write_text(HEAD + BLOCKS["my.toml"])
    (tmp_path / "data").mkdir()
    for number in range(30):
        more = LONG * 60 if number % 3 == 0 else "\n********" if number % 3 == 1 else ""
        (tmp_path / "data" / f"{number}.txt").write_text(prose(number) + more)
    return tmp_path


def rows(project: Path, kind: str) -> list[dict[str, Any]]:
    return list(pq.read_table(project / "runs" / "t" / "corpus" / kind).to_pylist())


def statistics(project: Path) -> dict[str, Any]:
    return dict(json.loads((project / "runs" / "t" / "corpus" / "statistics.json").read_text()))


def failure(project: Path, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    """Return the error of a build, which leaves nothing behind."""
    assert run_command(["corpus", str(project / "my.toml"), *arguments]) == code
    assert not (project / "runs" / "t" / "corpus").exists()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bessemer: ")]
    return line


def test_the_filter_of_the_page_in_every_engine(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are equal, and its documents count as kept, edited and rejected under its name."""
    cut_finely(monkeypatch)
    assert run_command(["corpus", "my.toml"]) == 0
    expected = rows(project, "documents"), rows(project, "rejected")
    assert {row["reason"] for row in expected[1]} == {"long_words.share"} and len(expected[1]) == 10
    assert not any("***" in row["text"] for row in expected[0])
    found = statistics(project)
    steps = {row["step"]: (row["documents_in"], row["rejected"]) for row in found["sources"][0]["steps"]}
    assert list(steps)[5:8] == ["rules", "long_words", "evaluation sets"] and steps["long_words"] == (30, 10)
    assert found["totals"]["tables"]["edited_documents"] == {"long_words": 10}
    assert found["reasons"]["long_words.share"]["meaning"].startswith("Reject documents with too many long words")
    page = report.write(RunDirectory(project / "runs" / "t")).read_text()
    assert "long words" in page
    # worker processes, and a Slurm job array
    monkeypatch.setattr(worker, "SMALL_BYTES", 0)
    for name, value in {"READ_SECONDS": 0.02, "ASK_SECONDS": 0.1, "SEEN_SECONDS": 0.3}.items():
        monkeypatch.setattr(slurm, name, value)
    monkeypatch.setenv("PATH", f"{slurm_commands.install(project / 'cluster')}:{os.environ['PATH']}")
    for engine in ("local", "slurm"):
        arguments = ["--set", "corpus.workers=2", "--set", f"corpus.engine={engine}", "--set", f"run.dir={engine}"]
        assert run_command(["corpus", "my.toml", *arguments]) == 0
        for kind, there in zip(("documents", "rejected"), expected, strict=True):
            assert pq.read_table(project / engine / "t" / "corpus" / kind).to_pylist() == there
    assert "sbatch" in (project / "cluster" / "calls").read_text()  # no corpus was shared with another run


@pytest.mark.long
def test_the_filter_of_the_page_on_ray(project: Path) -> None:
    """Run as a separate command whose workers receive the file and its hash."""
    pytest.importorskip("ray")
    assert run_command(["corpus", "my.toml"]) == 0
    environment = {name: value for name, value in os.environ.items() if name != extensions.TRUSTED}
    arguments = ["--set", "corpus.engine=ray", "--set", "corpus.workers=2", "--set", "run.name=ray"]
    command = [sys.executable, "-m", "bessemer", "corpus", "my.toml", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    for kind in ("documents", "rejected"):
        assert pq.read_table(project / "runs" / "ray" / "corpus" / kind).to_pylist() == rows(project, kind)


def test_a_changed_filter_builds_the_corpus_again(project: Path) -> None:
    assert run_command(["corpus", "my.toml"]) == 0
    text = (project / "long_words.py").read_text()
    (project / "long_words.py").write_text(text.replace("length: int = 20", "length: int = 40"))
    assert run_command(["corpus", "my.toml"]) == 0
    assert not rows(project, "rejected")
    assert run_command(["corpus", "my.toml", "--set", "corpus.filters.LongWords.length=3"]) == 2, "none is left"
    assert len(rows(project, "documents")) == 30


def test_a_sample_shows_what_it_rejects(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["corpus", "my.toml", "--sample", "30"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"long_words.share +10 .*Reject documents with too many long words", shown)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("return 1 / 0", "ZeroDivisionError"),
        ("return True", "returned True"),
        ("raise SystemExit(1)", "SystemExit"),
        ("open('/no/such/list')", "FileNotFoundError"),
        ("return chr(0xD800)", "UnicodeEncodeError"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_in_a_filter_stops_the_stage(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    what: str,
    workers: int,
) -> None:
    """Errors name file, line, class, method and document; the same command resumes once the file is corrected."""
    if workers == 2:
        cut_finely(monkeypatch)
        monkeypatch.setattr(worker, "SMALL_BYTES", 0)
    good = (project / "long_words.py").read_text()
    (project / "long_words.py").write_text(good.replace("words = document.text.split()", f"words = []\n        {line}"))
    said = failure(project, capsys, "--set", f"corpus.workers={workers}")
    assert f"{project}/long_words.py" in said and "LongWords.judge: " in said and what in said
    assert re.search(r"source s, data/\d+\.txt", said)
    if "return True" not in line and "chr" not in line:
        assert "line 12" in said
    (project / "long_words.py").write_text(good)
    assert run_command(["corpus", "my.toml"]) == 0


@pytest.mark.parametrize("name", ["rules", "quality", "read", "too_short", "exact_duplicate", "gopher_quality"])
def test_a_clashing_filter_name_is_an_error(project: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = (project / "long_words.py").read_text().replace("max_share: float", f"name = {name!r}\n    max_share: float")
    (project / "long_words.py").write_text(
        text.replace("name =", "name: ClassVar[str] =").replace(
            "from bessemer", "from typing import ClassVar\nfrom bessemer", 1
        )
    )
    said = failure(project, capsys, code=2)
    assert f"{project}/long_words.py: LongWords" in said and repr(name) in said


def test_mistakes_in_a_recipe_are_found_before_anything_is_read(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = (project / "my.toml").read_text()
    (project / "my.toml").write_text(recipe.replace("0.2", '"0.2"'))
    assert "my.toml:13: corpus.filters.LongWords.max_share: should be a number" in failure(project, capsys, code=2)
    (project / "my.toml").write_text(recipe)
    (project / "long_words.py").unlink()
    assert f"{project}/long_words.py" in failure(project, capsys, code=2)


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) & set(RULES)))
def test_published_rule_sets_as_filters_decide_like_the_rules(name: str) -> None:
    kept = make("filters", name, {})
    for seed in range(40):
        text = "\n".join([*([prose(seed % 7, 20)] * (seed % 5)), "The end of it. " * (seed % 3), "{x}; " * (seed % 4)])
        expected = check(name, Statistics(text), kept) if text.strip() else Reject("empty")
        verdict = kept.judge(Document("", 0, text))
        assert verdict == expected if expected else verdict == text
