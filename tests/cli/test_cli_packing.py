"""Packed documents as a user trains on them: end to end, killed, traced."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.cli.commands import bessemer, changed, command, start, wait_for_step
from tests.conftest import recipe_text
from tests.newest import training_result


def test_a_packed_run_whole_and_killed(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, runs, again = tmp_path / "packed.toml", tmp_path / "runs", tmp_path / "again"
    packing = '[tokens]\npacking = "best-fit"\ndocument_mask = true\n'
    recipe.write_text(changed(recipe_text(prepared), ("[tokens]\n", packing)))
    done = bessemer("run", recipe, "--set", f"run.dir={runs}")
    assert done.returncode == 0, done.stderr
    folder = runs / "small"
    for name in ("corpus", "tokens"):
        shutil.copytree(folder / name, again / "small" / name)
    process = start(recipe, again)
    wait_for_step(again, 11, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = bessemer("train", recipe, "--set", f"run.dir={again}")
    assert "going on from step" in done.stderr, done.stderr
    assert training_result(again / "small") == training_result(folder)
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
