"""A recipe whose model is wide enough to have smaller ones, with its tokens built once."""

import shutil
from pathlib import Path

import pytest

from bessemer.cli import run_command
from tests.conftest import recipe_text, write_text


def wide_recipe(folder: Path) -> str:
    """The small recipe with a wider model, whose whole training takes some seconds."""
    text = recipe_text(folder)
    for old, new in (
        (
            "layers = 2\nwidth = 32\nheads = 2\nkv_heads = 1\nmlp_width = 64",
            "layers = 4\nwidth = 96\nheads = 4\nmlp_width = 192",
        ),
        ("steps = 24\nglobal_batch_tokens = 256", "steps = 1600\nglobal_batch_tokens = 64"),
        ("micro_batch = 4\n", ""),
        ("held_out = 0.1", "held_out = 0.2"),
        ("[evaluate]\n", "[report]\ntensorboard = false\n\n[evaluate]\nmax_tokens = 1024\n"),
    ):
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, wide.toml and a run with tokens."""
    folder = tmp_path_factory.mktemp("ladder")
    write_text(folder / "text")
    (folder / "wide.toml").write_text(wide_recipe(folder))
    assert run_command(["corpus", str(folder / "wide.toml")]) == 0
    assert run_command(["tokens", str(folder / "wide.toml")]) == 0
    return folder


@pytest.fixture
def wide(made: Path, tmp_path: Path) -> Path:
    """A copy of the folder."""
    shutil.copytree(made / "runs", tmp_path / "runs")
    (tmp_path / "wide.toml").write_text(wide_recipe(made).replace(f'"{made / "runs"}"', f'"{tmp_path / "runs"}"'))
    return tmp_path
