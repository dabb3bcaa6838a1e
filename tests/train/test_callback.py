"""Callbacks: their arguments, in one process and in several; stops, errors and resumes."""

import importlib.util
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bessemer.checkpoint.protocol import checkpoint_steps
from bessemer.cli import run_command
from bessemer.common import extensions
from bessemer.recipe.resolved import ResolvedOptimizer
from bessemer.run.files import read_json, read_json_lines
from bessemer.train.optimizer import GroupOptimizer
from tests.train.faulty_runs import train as small_training

NOTES = """
import json, os
from bessemer.train.callback import Callback

class Notes(Callback):
    \"\"\"Notes each call, and stops or fails where it is set to.\"\"\"

    stop_at: int = -1
    fail_in: str = ""
    on_rank: int = 0

    def note(self, method, moment):
        shown = {"method": method, "step": moment.step, "steps": moment.steps, "main": moment.is_main,
                 "loss": moment.metrics.get("loss"), "stopped_by": moment.stopped_by,
                 "lines": len(moment.history("train")) if moment.is_main else None}
        with open(moment.run / f"notes-{moment.rank}.jsonl", "a") as file:
            file.write(json.dumps(shown) + "\\n")
        if method == self.fail_in and moment.rank == self.on_rank:
            raise ValueError("not today")
        if moment.step == self.stop_at and moment.rank == self.on_rank:
            return "far enough"

    def start(self, moment):
        return self.note("start", moment)

    def step(self, moment):
        return self.note("step", moment)

    def validation(self, moment):
        return self.note("validation", moment)

    def checkpoint(self, moment):
        return self.note("checkpoint", moment)

    def end(self, moment):
        self.note("end", moment)
"""
SETS = (
    "train.schedule.kind=constant",
    "train.steps=12",
    "train.log_every=4",
    "train.validate_every=6",
    "checkpoint.every=8",
)


class Run:
    """A run whose callback is a class in a file."""

    def __init__(self, recipe: Path, folder: Path, code: str = NOTES) -> None:
        self.recipe, self.folder, self.file = recipe, folder, folder / "mine.py"
        self.file.write_text(code)
        self.run = folder / "runs" / "small"

    def train(self, settings: str = "", *sets: str) -> int:
        use = f'train.callbacks=[{{use = "{self.file}:Notes"{settings}}}]'
        values = (f"run.dir={self.folder / 'runs'}", *SETS, use, *sets)
        return run_command(["train", str(self.recipe), *(part for value in values for part in ("--set", value))])

    def notes(self, rank: int = 0) -> list[dict[str, Any]]:
        path = self.run / f"notes-{rank}.jsonl"
        rows = read_json_lines(path)
        path.unlink()
        return rows


@pytest.fixture
def mine(runs: Path, recipe_file: Path, tmp_path: Path) -> Run:
    assert runs == tmp_path / "runs"
    return Run(recipe_file, tmp_path)


def calls(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(row["method"], row["step"]) for row in rows]


STEPS = [("step", 4), ("validation", 6), ("step", 8), ("checkpoint", 8), ("step", 12), ("validation", 12)]
WHOLE = [("start", 0), *STEPS, ("checkpoint", 12), ("end", 12)]


def test_a_callback_gets_every_event_and_its_metrics(mine: Run) -> None:
    assert mine.train() == 0
    rows = mine.notes()
    assert calls(rows) == WHOLE
    lines = read_json_lines(mine.run / "metrics.jsonl")
    logged = {(row["kind"], row["step"]): row["loss"] for row in lines if "loss" in row}
    for row in rows:
        kind = {"step": "train"}.get(row["method"], row["method"])
        assert row["loss"] == logged.get((kind, row["step"]))
        assert (row["steps"], row["main"], row["stopped_by"]) == (12, True, "")
    assert [row["lines"] for row in rows if row["method"] == "step"] == [1, 2, 3], "history has the line of the moment"


def test_two_processes_stop_together_and_resume(mine: Run) -> None:
    """The callback of one of the processes requests the stop."""
    sets = ("parallel.replicate=2", "train.micro_batch=2")
    assert mine.train(", stop_at = 8, on_rank = 1", *sets) == 75
    both = mine.notes(0), mine.notes(1)
    for rank, rows in enumerate(both):
        assert calls(rows) == [("start", 0), *STEPS[:3], ("checkpoint", 8), ("end", 8)]
        assert all(row["main"] == (rank == 0) for row in rows)
        assert "Notes: far enough" in rows[-1]["stopped_by"]
    assert [row["loss"] for row in both[0]] == [row["loss"] for row in both[1]]
    assert checkpoint_steps(mine.run / "checkpoints") == [8]
    assert mine.train("", *sets) == 0
    assert calls(mine.notes(1)) == calls(mine.notes(0)) == [("start", 8), *STEPS[4:], ("checkpoint", 12), ("end", 12)]


@pytest.mark.parametrize(
    ("method", "step", "saved"),
    [("start", 0, []), ("step", 4, [4]), ("checkpoint", 8, [8, 9]), ("end", 12, [8, 12])],
)
def test_an_exception_stops_the_training_with_everything_saved(
    mine: Run, capsys: pytest.CaptureFixture[str], method: str, step: int, saved: list[int]
) -> None:
    assert mine.train(f', fail_in = "{method}"') == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{mine.file}, line 19: Notes.{method}: ValueError: not today (step {step})" in said
    assert checkpoint_steps(mine.run / "checkpoints") == saved
    assert calls(mine.notes())[-1][0] == "end"
    assert mine.train() == 0, "without the fault the same command continues"


def test_an_exception_in_one_of_two_processes(mine: Run, capfd: pytest.CaptureFixture[str]) -> None:
    sets = ("parallel.replicate=2", "train.micro_batch=2")
    assert mine.train(', fail_in = "validation", on_rank = 1', *sets) == 1
    assert f"{mine.file}, line 19: Notes.validation: ValueError: not today (step 6)" in capfd.readouterr().err
    assert checkpoint_steps(mine.run / "checkpoints") == [6]


@pytest.mark.parametrize(
    ("code", "settings", "names"),
    [
        (NOTES.replace("def step(self, moment)", "def step(self)"), "", ["Notes.step", "moment"]),
        (NOTES.replace("(Callback)", ""), "", ["Notes", "bessemer.Callback"]),
        ("import bessemer\nclass Notes(bessemer.Callback):\n    def on_step(self): ...", "", ["Notes", "start, step"]),
        (NOTES.replace("import json", "import no_such_package"), "", ["line 2", "no_such_package"]),
        (NOTES, ", stop = 3", ["train.callbacks.Notes.stop", "stop_at"]),
        (NOTES, ', stop_at = "3"', ["train.callbacks.Notes.stop_at", "a whole number"]),
    ],
)  # fmt: skip
def test_an_unusable_callback_is_one_error(
    mine: Run, capsys: pytest.CaptureFixture[str], code: str, settings: str, names: list[str]
) -> None:
    mine.file.write_text(code)
    assert mine.train(settings) == 2
    [said] = capsys.readouterr().err.strip().splitlines()
    assert all(name in said for name in names), said
    assert not (mine.run / "metrics.jsonl").exists()


def test_an_invalid_stop_reason_is_an_error(mine: Run, capsys: pytest.CaptureFixture[str]) -> None:
    mine.file.write_text(NOTES.replace('return "far enough"', "return True"))
    assert mine.train(", stop_at = 4") == 1
    assert "Notes.step: TypeError: returned bool" in capsys.readouterr().err


PAGES = ("own-callback", "optimizers", "own-objective", "own-model-family")
PAGE = "".join((Path(__file__).parents[2] / "docs/how-to" / f"{page}.md").read_text("utf-8") for page in PAGES)
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


def test_an_own_optimizer_equals_torchs(recipe: Path) -> None:
    """Its update of one weight equals torch.optim.Adamax, and the loss of a training falls."""
    rule = extensions.anchor("directions:AdaMax", recipe.parent)
    extensions.trust([rule])
    weight, other = (torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2))
    config = ResolvedOptimizer(kind=rule, learning_rate=0.01, betas=(0.9, 0.99), weight_decay=0.0)
    facts = {"params": [weight], "names": ["w"], "rule": config.rule, "lr": 0.01}
    steppers = GroupOptimizer([config.model_dump() | facts]), torch.optim.Adamax([other], 0.01, (0.9, 0.99))
    for number in range(4):
        for parameter, stepper in zip((weight, other), steppers, strict=True):
            parameter.grad = torch.cos(torch.arange(12.0) * number).view(3, 4)
            stepper.step()
    torch.testing.assert_close(weight, other)

    recipe.write_text(recipe.read_text().replace("[train.optimizer]\nlearning_rate = 0.01\n", ""))
    sets = ("train.steps=12", "train.optimizer.learning_rate=0.01")
    assert train(recipe, table("[train.optimizer]"), *sets) == 0
    rows = read_json_lines(recipe.parent / "runs" / "small" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5


def table(start: str) -> str:
    [found] = [one for one in TABLES if one.startswith(start)]
    return found


def test_early_stop(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """At a rate of almost zero the loss does not improve."""
    sets = (
        "train.steps=12", "train.log_every=1", "train.validate_every=2", "train.optimizer.learning_rate=1e-12",
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


CONSTANT = "train.schedule.kind=constant"


def needs(name: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@needs("wandb")
def test_wandb_offline(runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    small_training(recipe_file, runs, CONSTANT, 'report.trackers=["wandb"]', "train.steps=12")
    (log,) = (runs / "small" / "wandb").glob("offline-run-*/run-*.wandb")
    content = log.read_bytes()
    for tag in (b"train/loss", b"validation/loss", b"learning_rate"):
        assert tag in content
    identity = read_json(runs / "small" / "trackers.json")["wandb"]
    small_training(recipe_file, runs, CONSTANT, 'report.trackers=["wandb"]', "train.steps=16")
    assert read_json(runs / "small" / "trackers.json")["wandb"] == identity, "it goes on in the same run"


@needs("mlflow")
def test_mlflow_in_a_folder(runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    small_training(recipe_file, runs, CONSTANT, 'report.trackers=["mlflow"]', "train.steps=12")
    identity = read_json(runs / "small" / "trackers.json")["mlflow"]
    history = mlflow.MlflowClient().get_metric_history(identity, "train/loss")
    rows = [row for row in read_json_lines(runs / "small" / "metrics.jsonl") if row["kind"] == "train"]
    assert [(one.step, one.value) for one in history] == [(row["step"], row["loss"]) for row in rows]


def test_a_missing_tracker_is_an_error_before_training(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type] # its import fails
    assert run_command(["run", str(recipe_file), "--set", f"run.dir={runs}", "--set", 'report.trackers=["wandb"]']) == 2
    assert "report.trackers: wandb cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["start", "log"])
def test_a_failing_tracker_is_dropped(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    def fail(*given: Any, **named: Any) -> None:
        raise RuntimeError("no network\nat all")

    logged = SimpleNamespace(
        define_metric=lambda *given, **named: None, log=fail, finish=lambda: pytest.fail("it was left")
    )
    wandb = SimpleNamespace(init=fail if when == "start" else lambda **options: logged)
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    small_training(recipe_file, runs, CONSTANT, 'report.trackers=["wandb"]', "train.steps=12")
    said = capsys.readouterr().err
    assert said.count("no network") == 1 and "continues without it" in said
    assert read_json_lines(runs / "small" / "metrics.jsonl")[-1]["step"] == 12
