"""The default recipe rejects less than 1% of known good text from installed packages."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from bessemer.recipe import Rules
from bessemer.recipe.rules import C4
from bessemer.run.directory import RunDirectory


def test_good_text_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    good_text = importlib.import_module("good_text")
    recipe = good_text.assemble(tmp_path, 100, [])
    found = good_text.losses(recipe, RunDirectory(tmp_path / "run"))
    assert [row["kind"] for row in found["kinds"]] == ["code", "descriptions", "docstrings", "reference"]
    assert found["documents"] - found["duplicates"] > 200
    assert found["share_lost"] < 0.01, found["kinds"]
    filtered = recipe.changed(corpus={"rules": Rules(c4=C4())})
    assert good_text.losses(filtered, RunDirectory(tmp_path / "c4"))["share_lost"] > 0.05, "it counts what rules reject"
