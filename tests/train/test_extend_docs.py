"""The classes of docs/extend-training.md train as the page says."""

import math
import re
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.run.files import read_json_lines

PAGE = (Path(__file__).parent.parent.parent / "docs" / "extend-training.md").read_text(encoding="utf-8")
CODE = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
TABLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def recipe(runs: Path, recipe_file: Path, tmp_path: Path) -> Path:
    """A recipe next to the files of the page."""
    for name, code in CODE.items():
        (tmp_path / name).write_text(code)
        assert len(code.strip().splitlines()) <= 30
    text = recipe_file.read_text().replace(str(recipe_file.parent / "runs"), str(runs))
    (tmp_path / "my.toml").write_text(text)
    return tmp_path / "my.toml"


def train(recipe: Path, table: str, *sets: str) -> int:
    """Train with a table of the page added to the recipe."""
    text = recipe.read_text()
    recipe.with_name("own.toml").write_text(f"{text}\n{table}")
    return run_command(
        ["train", str(recipe.with_name("own.toml")), *(part for value in sets for part in ("--set", value))]
    )


def test_a_schedule_and_its_rates(recipe: Path) -> None:
    sets = (
        "train.steps=12",
        "train.log_every=1",
        "train.schedule.warmup_steps=2",
        "train.optimizer.learning_rate=0.01",
    )
    assert train(recipe, table("[train.schedule]"), *sets) == 0
    rows = read_json_lines(recipe.parent / "runs" / "small" / "metrics.jsonl")
    rates = [row["learning_rate"] / 0.01 for row in rows if row["kind"] == "train"]
    assert rates[:2] == pytest.approx([1 / 3, 2 / 3])
    waves = [step / 9 * 3 % 1.0 for step in range(9)]
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * place)) / 2 for place in waves]
    assert rates[2:-1] == pytest.approx(expected) and rates[-1] == pytest.approx(0.1, abs=1e-4)


def table(start: str) -> str:
    [found] = [one for one in TABLES if one.startswith(start)]
    return found


def test_early_stop_in_two_processes(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A rate at which nothing is learned any more: the loss stays, and is not better."""
    sets = (
        "parallel.replicate=2", "train.micro_batch=2", "train.steps=12", "train.log_every=1", "train.validate_every=2",
        "train.optimizer.learning_rate=1e-12",
    )  # fmt: skip
    callback = table("[[train.callbacks]]")
    assert train(recipe, callback, *sets) == 75
    assert "EarlyStop: no better loss in" in capfd.readouterr().err
    metrics = recipe.parent / "runs" / "small" / "metrics.jsonl"
    losses = [row["loss"] for row in read_json_lines(metrics) if row["kind"] == "validation"]
    assert 2 < len(losses) < 6
    steps = max(row["step"] for row in read_json_lines(metrics))
    assert train(recipe, callback, *sets) == 75, "a resumed one stops at once"
    assert max(row["step"] for row in read_json_lines(metrics)) == steps
    assert train(recipe, callback.replace("2", "9"), *sets) == 0
