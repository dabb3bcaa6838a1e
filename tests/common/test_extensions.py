"""Extensions: found by name, validated, run only when trusted, and clear in their errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bessemer.common import extensions
from bessemer.common.errors import InputError
from bessemer.recipe import load
from bessemer.recipe.uses import make

GOOD = """
from __future__ import annotations
from bessemer.corpus.filters.base import Filter, Reject

class LongWords(Filter):
    \"\"\"Reject documents with long words.\"\"\"

    max_length: int = 9
    words: tuple[str, ...] = ()

    def judge(self, document):
        return Reject("long") if max(map(len, document.text.split())) > self.max_length else None
"""
RECIPE = """
[run]
name = "small"

[[corpus.sources]]
name = "text"
paths = ["text"]

[[corpus.filters]]
use = "mine:LongWords"
max_length = 5
"""


@pytest.fixture(autouse=True)
def no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(extensions.TRUSTED, "{}")


def write(folder: Path, code: str = GOOD, recipe: str = RECIPE) -> Path:
    (folder / "mine.py").write_text(code)
    (folder / "my.toml").write_text(recipe)
    return folder / "my.toml"


def distribution(folder: Path, name: str, entry: str, code: str = GOOD) -> str:
    """Install a distribution of one module with one entry point, and return the folder for sys.path."""
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[bessemer.filters]\n{entry} = {name}:LongWords\n")
    (folder / f"{name}.py").write_text(code)
    return str(folder)


def problem(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as error:
        load(path, overrides, trust_code=False)
    return str(error.value)


def test_a_class_of_a_file_next_to_the_recipe(tmp_path: Path) -> None:
    path = write(tmp_path)
    recipe = load(path, trust_code=False)
    [use] = recipe.corpus.filters
    assert use.use == f"{tmp_path}/mine.py:LongWords"
    found = extensions.find("filters", use.use)
    made = make("filters", use.use, use.settings)
    assert (found.origin, made.max_length, made.name) == (f"{tmp_path}/mine.py", 5, "long_words")
    assert extensions.reference_to(type(made)) == use.use
    (tmp_path / "mine.py").write_text(GOOD + "\n")
    assert extensions.find("filters", use.use).digest != found.digest
    (tmp_path / "mine.py").write_text(GOOD)
    # A path is a name too, settings are set like other keys, and TOML lists become tuples.
    text = RECIPE.replace("mine:", "./mine.py:").replace("max_length = 5", 'words = ["a"]')
    recipe = load(write(tmp_path, recipe=text), ["corpus.filters.LongWords.max_length=7"], trust_code=False)
    assert make("filters", use.use, recipe.corpus.filters[0].settings).max_length == 7


def test_settings_are_validated_like_keys(tmp_path: Path) -> None:
    path = write(tmp_path, recipe=RECIPE.replace("max_length", "max_lenght"))
    assert problem(path).startswith(f"{path}:11: corpus.filters.LongWords.max_lenght: unknown key; did you mean")
    path = write(tmp_path, recipe=RECIPE.replace("= 5", '= "5"'))
    assert problem(path).startswith(f"{path}:11: corpus.filters.LongWords.max_length: should be a whole number")
    assert "--set corpus.filters.max_length=x)" in problem(write(tmp_path), "corpus.filters.max_length=x")


@pytest.mark.parametrize(
    ("code", "names"),
    [
        (GOOD.replace("LongWords", "Other"), ["LongWords"]),
        (GOOD.replace("(Filter)", ""), ["LongWords", "bessemer.Filter"]),
        (GOOD.replace("def judge(self, document)", "def judge(self)"), ["LongWords.judge", "document"]),
        (GOOD.replace("def judge", "async def judge"), ["LongWords.judge"]),
        (GOOD.replace("def judge", "def decide"), ["LongWords", "judge"]),
        (GOOD.replace("annotations\n", "annotations\nimport no_such_package\n"), ["line 3", "no_such_package"]),
        (GOOD + "1 +", ["line 13", "SyntaxError"]),
        (GOOD + "raise SystemExit(3)", ["line 13", "SystemExit"]),
    ],
)  # fmt: skip
def test_an_unusable_class_is_one_error(tmp_path: Path, code: str, names: list[str]) -> None:
    path = write(tmp_path, code)
    said = problem(path)
    assert said.startswith(f"{path}:9: corpus.filters.LongWords: {tmp_path}/mine.py")
    assert all(name in said for name in names) and "\n" not in said


def test_code_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    """A run directory's recipe may name code that someone else put there."""
    marker = tmp_path / "ran"
    write(tmp_path, f"{GOOD}open({str(marker)!r}, 'w')")
    run = tmp_path / "run"
    (run / "corpus").mkdir(parents=True)
    (run / "corpus" / "stage.json").write_text("{}")
    (run / "recipe.toml").write_text(RECIPE.replace("mine:", f"{tmp_path}/mine.py:"))
    for place in (run, run / "recipe.toml"):
        [use] = load(place, trust_code=False).corpus.filters
        with pytest.raises(InputError, match="--trust-code"):
            make("filters", use.use, use.settings)
    assert not marker.exists()
    load(run, trust_code=True)
    assert marker.exists()
    # Another process receives the file as it was.
    code = (
        f"from bessemer.common.extensions import find; find('filters', {str(tmp_path / 'mine.py:LongWords')!r}).target"
    )
    asked = [sys.executable, "-c", code]
    assert subprocess.run(asked, env=os.environ, capture_output=True, check=False).returncode == 0
    (tmp_path / "mine.py").write_text(GOOD + "# another\n")
    changed = subprocess.run(asked, env=os.environ, capture_output=True, text=True, check=False)
    assert changed.returncode == 1 and "changed since" in changed.stderr
    assert json.loads(os.environ[extensions.TRUSTED]).keys() == {f"{tmp_path}/mine.py"}


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path, recipe=RECIPE.replace("mine:", "folder.other:"))
    assert f"{tmp_path}/folder/other.py: " in problem(path)


def test_entry_points_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(distribution(tmp_path / "one", "packed_words", "long-words"))
    path = write(tmp_path, recipe=RECIPE.replace("mine:LongWords", "long-words"))
    [use] = load(path, trust_code=False).corpus.filters
    found = extensions.find("filters", use.use)
    assert (found.origin, found.digest) == ("packed_words 1.2", "packed_words 1.2")
    assert make("filters", use.use, use.settings).max_length == 5
    near = problem(write(tmp_path, recipe=RECIPE.replace("mine:LongWords", "long_words")))
    assert "did you mean long-words?" in near
    monkeypatch.syspath_prepend(distribution(tmp_path / "two", "other_words", "long-words"))
    said = problem(write(tmp_path, recipe=RECIPE.replace("mine:LongWords", "long-words")))
    assert "packed_words 1.2" in said and "other_words 1.2" in said
    monkeypatch.syspath_prepend(distribution(tmp_path / "three", "broken_words", "broken", "import no_such_package"))
    said = problem(write(tmp_path, recipe=RECIPE.replace("mine:LongWords", "broken")))
    assert "broken_words 1.2" in said and "no_such_package" in said


def test_a_class_defined_in_a_function_cannot_be_named() -> None:
    class Inner: ...

    with pytest.raises(InputError, match="Inner"):
        extensions.reference_to(Inner)
