"""Packed documents as a user trains on them: end to end, killed, traced; for a decoder and for a masked encoder."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.conftest import recipe_text
from tests.test_cli import bessemer, command, start, trained, wait_for_step
from tests.test_cli_objectives import changed, masked_recipe


def whole_run(folder: Path, text: str) -> tuple[Path, Path]:
    """Packs the documents of a recipe and runs every stage of it, without a stop. Returns the recipe and the runs."""
    recipe, runs = folder / "packed.toml", folder / "runs"
    recipe.write_text(changed(text, ("[tokens]\n", '[tokens]\npacking = "best-fit"\ndocument_mask = true\n')))
    done = bessemer("run", recipe, "--set", f"run.dir={runs}")
    assert done.returncode == 0, done.stderr
    return recipe, runs


def killed_run(recipe: Path, runs: Path, folder: Path, step: int) -> Path:
    """The same training, killed after a step and started again."""
    for name in ("corpus", "tokens"):
        shutil.copytree(runs / "small" / name, folder / "small" / name)
    process = start(recipe, folder)
    wait_for_step(folder, step, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = bessemer("train", recipe, "--set", f"run.dir={folder}")
    assert done.returncode == 0, done.stderr
    assert "going on from step" in done.stderr
    return folder / "small"


def test_a_packed_run_whole_and_killed(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, runs = whole_run(tmp_path, recipe_text(prepared))
    folder = runs / "small"
    assert trained(killed_run(recipe, runs, tmp_path / "again", 11)) == trained(folder)
    facts = json.loads((folder / "tokens" / "manifest.json").read_text())["packing"]
    assert facts["packing"] == "best-fit" and 0.5 < facts["utilisation"] <= 1.0
    assert "best-fit" in (folder / "report.html").read_text()
    capsys.readouterr()
    assert command("trace", folder, "--step", "3", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["sample"] for row in rows} == set(range(16, 24))
    for row in rows[::5]:
        assert command("trace", folder, "--document", row["document"], "--json") == 0
        steps = json.loads(capsys.readouterr().out)["steps"]
        assert (3, row["sample"]) in {(one["step"], one["sample"]) for one in steps}


@pytest.mark.long
def test_a_masked_run_of_packed_documents_whole_and_killed(prepared: Path, tmp_path: Path) -> None:
    """What is masked is drawn anew at every step, and must not depend on the stop."""
    recipe, runs = whole_run(tmp_path, masked_recipe(prepared))
    folder = runs / "small"
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["objective"] == "masked" and evaluation["bits_per_byte"] is None
    assert 0 < evaluation["accuracy"] < 1 and evaluation["fill_ins"]
    weights, losses = trained(folder)
    assert sum(losses[-4:]) < sum(losses[:4])
    assert (folder / "report.html").exists() and (folder / "export" / "config.json").exists()
    assert trained(killed_run(recipe, runs, tmp_path / "again", 11)) == (weights, losses)
