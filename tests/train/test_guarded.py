"""The guard in the loop: what it sees of sick runs, made sick for real."""

from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.recipe import load, load_resolved
from bessemer.run.files import read_json_lines
from bessemer.tokens.shards import TokenStore
from tests.train.faulty_runs import SMALL, incidents, poison

pytestmark = pytest.mark.usefixtures("fixed_step_time")


def train(recipe_file: Path, runs: Path, *overrides: str) -> Path:
    sets = [part for value in (f"run.dir={runs}", *SMALL, *overrides) for part in ("--set", value)]
    assert run_command(["train", str(recipe_file), *sets]) == 0
    return runs / "small"


@pytest.mark.fault(17)
def test_a_damaged_batch_is_skipped_and_its_documents_are_named(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, lambda first: first == 8 * 70)
    folder = train(recipe_file, runs, "train.steps=90", "checkpoint.every=40")
    found = incidents(folder)
    assert [(row["what"], row["step"], row["onset"], row["action"]) for row in found] == [
        ("spike", 71, 71, "update skipped")
    ]
    assert {sample["sample"] for sample in found[0]["documents"]} == set(range(560, 568))
    assert all(sample["documents"] for sample in found[0]["documents"])
    assert "OLMo" in found[0]["advice"]
    assert "step 71: spike: loss" in capsys.readouterr().err
    rows = [row for row in read_json_lines(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert rows[70]["learning_rate"] == 0.0 and rows[70]["loss"] > rows[69]["loss"] + 0.5
    assert rows[71]["loss"] < rows[69]["loss"] + 0.5


def test_another_phase_of_the_mixture_starts_the_windows_anew(runs: Path, recipe_file: Path) -> None:
    recipe = load(recipe_file)
    text = recipe_file.read_text()
    text += "\n[[tokens.schedule]]\nfrom = 0.0\nweights = { prose = 1, code = 0 }\n"
    text += "[[tokens.schedule]]\nfrom = 0.5\nweights = { prose = 0, code = 1 }\n"
    changed = recipe_file.with_name("phases.toml")
    changed.write_text(text)
    assert recipe.train.steps == 24
    folder = train(changed, runs, "model.layers=2", "train.steps=120", "checkpoint.every=60")
    from bessemer.tokens.loader import open_loader

    loader = open_loader(load_resolved(folder / "recipe.toml"), TokenStore.open(folder / "tokens"))
    starts = [phase.first for phase in loader.mixture.phases]
    assert len(starts) == 2 and 400 < starts[1] < 560
    assert incidents(folder) == []
