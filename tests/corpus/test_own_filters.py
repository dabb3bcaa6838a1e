"""Filters of a recipe: the one of docs/how-to/own-filter.md, changes of it, and failures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from build_corpus import cut_finely
from corpus_samples import page_files, prose

from bessemer.cli import run_command
from bessemer.common import extensions
from bessemer.corpus.document import Document, Reject
from bessemer.corpus.filters.base import BUILT_IN
from bessemer.corpus.filters.rules.apply import RULES, check
from bessemer.recipe.uses import make
from bessemer.run_tasks import run as worker
from bessemer.text.statistics import Statistics

BLOCKS = page_files("how-to/own-filter.md")
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


def failure(project: Path, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    """Return the error of a build, which leaves nothing behind."""
    assert run_command(["corpus", str(project / "my.toml"), *arguments]) == code
    assert not (project / "runs" / "t" / "corpus").exists()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bessemer: ")]
    return line


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
    ("line", "what", "workers"),
    [
        ("return 1 / 0", "ZeroDivisionError", 1),
        ("return True", "returned True", 1),
        ("raise SystemExit(1)", "SystemExit", 2),
        ("open('/no/such/list')", "FileNotFoundError", 2),
        ("return chr(0xD800)", "UnicodeEncodeError", 1),
    ],
)
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
