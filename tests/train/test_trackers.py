"""Trackers: each real one in its offline form, where it is installed; one that fails does not stop the training."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.run.files import read_json, read_json_lines


def train(recipe_file: Path, runs: Path, *sets: str) -> int:
    values = (f"run.dir={runs}", "train.schedule.kind=constant", "train.steps=12", *sets)
    return run_command(["train", str(recipe_file), *(part for value in values for part in ("--set", value))])


def needs(name: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@needs("wandb")
def test_wandb_offline(runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert train(recipe_file, runs, 'report.trackers=["wandb"]') == 0
    (log,) = (runs / "small" / "wandb").glob("offline-run-*/run-*.wandb")
    content = log.read_bytes()
    for tag in (b"train/loss", b"validation/loss", b"learning_rate"):
        assert tag in content
    identity = read_json(runs / "small" / "trackers.json")["wandb"]
    assert train(recipe_file, runs, 'report.trackers=["wandb"]', "train.steps=16") == 0
    assert read_json(runs / "small" / "trackers.json")["wandb"] == identity, "it goes on in the same run"


@needs("mlflow")
def test_mlflow_in_a_folder(runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert train(recipe_file, runs, 'report.trackers=["mlflow"]') == 0
    identity = read_json(runs / "small" / "trackers.json")["mlflow"]
    history = mlflow.MlflowClient().get_metric_history(identity, "train/loss")
    rows = [row for row in read_json_lines(runs / "small" / "metrics.jsonl") if row["kind"] == "train"]
    assert [(one.step, one.value) for one in history] == [(row["step"], row["loss"]) for row in rows]


@needs("trackio")
def test_trackio_in_a_folder(runs: Path, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert train(recipe_file, runs, 'report.trackers=["trackio"]') == 0
    assert list((tmp_path / "trackio").rglob("*.db")), "its database"


def test_lines_on_standard_output(runs: Path, recipe_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(recipe_file, runs, "report.stdout=true") == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert lines == read_json_lines(runs / "small" / "metrics.jsonl")


def test_a_tracker_that_is_not_there_is_refused_before_the_training(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type] # its import fails
    assert run_command(["run", str(recipe_file), "--set", f"run.dir={runs}", "--set", 'report.trackers=["wandb"]']) == 2
    assert "report.trackers: wandb cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["start", "log"])
def test_a_tracker_that_fails_is_left(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    def fail(*given: Any, **named: Any) -> None:
        raise RuntimeError("no network\nat all")

    logged = SimpleNamespace(
        define_metric=lambda *given, **named: None, log=fail, finish=lambda: pytest.fail("it was left")
    )
    wandb = SimpleNamespace(init=fail if when == "start" else lambda **options: logged)
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    assert train(recipe_file, runs, 'report.trackers=["wandb"]') == 0
    said = capsys.readouterr().err
    assert said.count("no network") == 1 and "the training goes on without it" in said
    assert read_json_lines(runs / "small" / "metrics.jsonl")[-1]["step"] == 12
