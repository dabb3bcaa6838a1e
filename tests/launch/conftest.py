"""A recipe with tokens, for the tests of launching."""

import subprocess
from pathlib import Path

import pytest
from trainings import RECIPE, command, trained


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose tokens are written."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "texts").mkdir()
    for number in range(40):
        words = " ".join(f"w{(number * 7 + n * n) % 97} x{n % 13}" for n in range(120))
        (folder / "texts" / f"{number}.txt").write_text(words)
    recipe = folder / "r.toml"
    recipe.write_text(RECIPE.format(folder=folder))
    for stage in ("corpus", "tokens"):
        subprocess.run(command(stage, str(recipe)), check=True, capture_output=True, timeout=240)
    return recipe


@pytest.fixture(scope="session")
def whole(made: Path) -> str:
    return trained(made, "one-fp64", "train.precision=fp64")


@pytest.fixture(scope="session")
def replicas(made: Path) -> str:
    return trained(made, "two-replicas", "parallel.replicate=2", "train.steps=30")


@pytest.fixture(scope="session")
def shards(made: Path) -> str:
    return trained(made, "two-shards", "parallel.shard=2", "train.steps=24")
