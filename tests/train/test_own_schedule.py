"""Schedules of a user's file: errors before the training, and a run that resumes with the same code alone."""

from pathlib import Path

import pytest

from bessemer.checkpoint.protocol import checkpoint_steps
from bessemer.cli import run_command
from bessemer.recipe.resolved import load_resolved

CODE = """
from bessemer.train.schedule import RateSchedule

class Half(RateSchedule):
    is_extendable = True
    share_of_peak: float = 0.5

    def share(self, update):
        return self.share_of_peak
"""


def train(recipe: Path, folder: Path, code: str, *sets: str) -> int:
    (folder / "mine.py").write_text(code)
    kind = f"train.schedule.kind={folder / 'mine.py'}:Half"
    values = (f"run.dir={folder / 'runs'}", kind, "train.steps=8", "checkpoint.every=8", *sets)
    return run_command(["train", str(recipe), *(part for value in values for part in ("--set", value))])


@pytest.mark.parametrize(
    ("code", "sets", "names"),
    [
        (CODE.replace("share(self, update)", "share(self)"), "", ["Half.share", "update"]),
        (CODE.replace("def share", "def rate"), "", ["Half", "share"]),
        (CODE, "train.schedule.settings.share=1", ["train.schedule.settings.share", "share_of_peak"]),
        (CODE, "train.schedule.settings.share_of_peak=x", ["train.schedule.settings.share_of_peak", "a number"]),
        (CODE, "train.schedule.kind=cosin", ["train.schedule.kind", "did you mean cosine?"]),
        (CODE, "train.schedule.kind=none.py:Half", ["train.schedule.kind", "none.py"]),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_used_is_one_error(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, sets: str, names: list[str]
) -> None:  # fmt: skip
    assert train(recipe_file, tmp_path, code, *filter(None, [sets])) == 2
    [said] = capsys.readouterr().err.strip().splitlines()
    assert all(name in said for name in names), said


@pytest.mark.parametrize(
    ("body", "what"), [("1 / 0", "ZeroDivisionError"), ("-1.0", "returned -1.0"), ("'much'", "TypeError")]
)
def test_a_schedule_that_fails_does_so_before_the_training(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, what: str
) -> None:
    assert train(recipe_file, tmp_path, CODE.replace("self.share_of_peak", body)) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path / 'mine.py'}" in said and "Half.share" in said and what in said
    assert not (tmp_path / "runs" / "small" / "metrics.jsonl").exists()


def test_settings_of_a_built_in_schedule(runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("--set", f"run.dir={runs}", "--set", "train.schedule.settings.a=1")
    assert run_command(["plan", str(recipe_file), *sets]) == 2
    assert "train.schedule: settings has no effect" in capsys.readouterr().err


def test_a_run_resumes_with_the_same_code_alone(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "small"
    assert train(recipe_file, tmp_path, CODE) == 0
    assert load_resolved(run / "recipe.toml").train.schedule.code is not None
    assert train(recipe_file, tmp_path, CODE + "\n", "train.steps=12") == 2
    assert "train.schedule.code" in capsys.readouterr().err
    assert train(recipe_file, tmp_path, CODE, "train.steps=12") == 0, "it is extendable"
    assert checkpoint_steps(run / "checkpoints")[-1] == 12
    (tmp_path / "mine.py").unlink()
    assert run_command(["report", str(run)]) == 0
    assert run_command(["evaluate", str(run)]) == 0
