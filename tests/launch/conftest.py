"""A trained run that the tests of the launch room start from."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainings import RECIPE, bessemer


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose tokens are written and which was trained by one process."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "texts").mkdir()
    for number in range(40):
        words = " ".join(f"w{(number * 7 + n * n) % 97} x{n % 13}" for n in range(120))
        (folder / "texts" / f"{number}.txt").write_text(words)
    recipe = folder / "r.toml"
    recipe.write_text(RECIPE.format(folder=folder))
    done = bessemer("train", str(recipe), needs_tokens=str(recipe))
    assert done.returncode == 0, done.stderr
    return recipe
