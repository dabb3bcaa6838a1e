"""`bessemer compare` end to end: pairs, stops, more seeds, and recipes that do not compare."""

import json
import os
import signal
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import pytest

from bessemer.api.run import open_run
from bessemer.cli import run_command
from tests.conftest import recipe_text


def write_recipes(prepared: Path, folder: Path, *changes: tuple[str, str]) -> tuple[str, str]:
    """Write two recipes that differ by `changes`."""
    text = recipe_text(prepared).replace(f'"{prepared / "runs"}"', f'"{folder / "runs"}"')
    other = text
    for old, new in changes:
        assert old in other
        other = other.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / "a.toml").write_text(text)
    (folder / "b.toml").write_text(other)
    return str(folder / "a.toml"), str(folder / "b.toml")


def compare(recipes: tuple[str, str], seeds: int, capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run_command(["compare", *recipes, "--seeds", str(seeds), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.long
def test_pairs_are_exact_and_a_stopped_comparison_resumes(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = ("learning_rate = 0.01", "learning_rate = 0.002")
    whole = compare(write_recipes(prepared, tmp_path / "whole", slower), 2, capsys)
    assert whole["same_order"] and whole["look"] == 1 and whole["mean"] > 0, "a rate that is too low is worse"
    assert Path(whole["page"]).exists() and Path(whole["page"]).with_suffix(".json").exists()
    folder = Path(whole["page"]).parent
    a, b = whole["a"]["name"], whole["b"]["name"]
    batches = {name: open_run(folder / name).batch(3).inputs for name in (f"{a}-1", f"{b}-1", f"{a}-2", f"{b}-2")}
    for seed in (1, 2):
        assert (batches[f"{a}-{seed}"] == batches[f"{b}-{seed}"]).all()
    assert (batches[f"{a}-1"] != batches[f"{a}-2"]).any()

    recipes = write_recipes(prepared, tmp_path / "stopped", slower)
    place = tmp_path / "stopped" / "runs" / "compare"

    def signal_in_second_training() -> None:
        while not (place / f"{b}-1" / "metrics.jsonl").exists():
            sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=signal_in_second_training, daemon=True).start()
    assert run_command(["compare", *recipes, "--seeds", "2"]) == 75
    assert not (place / "comparisons.jsonl").exists()
    first = (place / f"{a}-1" / "metrics.jsonl").stat().st_mtime_ns
    resumed = compare(recipes, 2, capsys)
    assert resumed["differences"] == whole["differences"] and resumed["look"] == 1
    assert (place / f"{a}-1" / "metrics.jsonl").stat().st_mtime_ns == first

    done = {path: path.stat().st_mtime_ns for path in place.glob("*/metrics.jsonl")}
    more = compare(recipes, 3, capsys)
    assert compare(recipes, 1, capsys)["differences"] == more["differences"], "finished pairs count"
    assert more["differences"][:2] == whole["differences"] and more["look"] == 2
    assert {path: path.stat().st_mtime_ns for path in done} == done


@pytest.mark.parametrize(
    ("change", "seeds"),
    [
        (("width = 32", "width = 64"), 0),
        (('name = "small"', 'name = "other"'), 2),
        (("held_out = 0.1", "held_out = 0.2"), 2),
    ],
    ids=["no seeds", "equal recipes", "other held-out text"],
)
def test_recipes_that_do_not_compare_train_nothing(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], seeds: int
) -> None:
    found = compare(write_recipes(prepared, tmp_path / "one", change), seeds, capsys, code=2)
    assert found["exit"] == 2 and not list(tmp_path.rglob("checkpoints"))
