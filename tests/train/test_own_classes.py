"""Schedules, optimizers and objectives in a user's file: errors before training, several processes, stops and resumes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bessemer.checkpoint.protocol import checkpoint_steps
from bessemer.cli import run_command
from bessemer.run.files import read_json_lines

CODES = {
    "Half": """
from bessemer.train.schedule import RateSchedule

class Half(RateSchedule):
    is_extendable = True
    share_of_peak: float = 0.5

    def share(self, update):
        return self.share_of_peak
""",
    "Signs": """
from bessemer import UpdateRule

class Signs(UpdateRule):
    moments = ("average",)
    fails_at: int = -1

    def direction(self, weight, gradient, state, update):
        if update.step == self.fails_at:
            raise ArithmeticError("not today")
        state["average"].lerp_(gradient, 0.1)
        return state["average"].sign()
""",
    "Odd": """
import numpy as np
import torch.nn.functional as F
from bessemer import Objective

class Odd(Objective):
    weight: float = 2.0

    def example(self, sample):
        return sample.inputs, np.where(sample.random.random(len(sample.targets)) < 0.5, sample.targets, -1)

    def loss(self, predictions):
        nats = F.cross_entropy(predictions.logits, predictions.targets, reduction="none")
        return nats * (1.0 + self.weight * (predictions.position % 2))
""",
}
KEYS = {"Half": "train.schedule.kind", "Signs": "train.optimizer.kind", "Odd": "train.objective"}
SIGN, LOSS = 'state["average"].sign()', "return nats * (1.0 + self.weight * (predictions.position % 2))"
FEW = ("train.steps=4", "checkpoint.every=2", "train.log_every=1", "train.validate_every=4")


class Own:
    """A run that trains with a class in a file."""

    def __init__(self, recipe: Path, folder: Path) -> None:
        self.recipe, self.file, self.run = recipe, folder / "mine.py", folder / "runs" / "small"

    def train(self, name: str, *sets: str, old: str = "", new: str = "", run: str = "small") -> int:
        """Train with the named class, with `old` replaced by `new` in its code."""
        assert old in CODES[name]
        self.file.write_text(CODES[name].replace(old, new) if old else CODES[name] + new)
        values = (f"run.dir={self.run.parent}", f"run.name={run}", f"{KEYS[name]}={self.file}:{name}", *FEW, *sets)
        options = (part for one in values for part in (["--set", one] if "=" in one else [one]))
        return run_command(["train", str(self.recipe), *options])


@pytest.fixture
def own(runs: Path, recipe_file: Path, tmp_path: Path) -> Own:
    return Own(recipe_file, tmp_path)


def rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(run / "metrics.jsonl") if row["kind"] == "train"]


@pytest.mark.parametrize(
    ("name", "old", "new", "sets", "code", "said"),
    [
        ("Half", "share(self, update)", "share(self)", (), 2, ["Half.share", "update"]),
        ("Half", "def share", "def rate", (), 2, ["Half", "share"]),
        ("Half", "", "", ("train.schedule.settings.share=1",), 2, ["train.schedule.settings.share", "share_of_peak"]),
        ("Half", "", "", ("train.schedule.settings.share_of_peak=x",), 2, ["settings.share_of_peak", "a number"]),
        ("Half", "", "", ("train.schedule.kind=cosin",), 2, ["train.schedule.kind", "did you mean cosine?"]),
        ("Half", "", "", ("train.schedule.kind=none.py:Half",), 2, ["train.schedule.kind", "none.py"]),
        ("Half", "", "", ("train.schedule.kind=cosine", "train.schedule.settings.a=1"), 2, ["train.schedule", "settings"]),
        ("Half", "self.share_of_peak", "1 / 0", (), 1, ["mine.py", "Half.share", "ZeroDivisionError"]),
        ("Half", "self.share_of_peak", "-1.0", (), 1, ["mine.py", "Half.share", "returned -1.0"]),
        ("Half", "self.share_of_peak", "'much'", (), 1, ["mine.py", "Half.share", "TypeError"]),
        ("Signs", ", update)", ")", (), 2, ["Signs.direction", "update"]),
        ("Signs", "def direction", "def move", (), 2, ["Signs", "direction"]),
        ("Signs", '("average",)', '"average"', (), 2, ["mine.py", "line 4", "moments"]),
        ("Signs", "", "", ("train.optimizer.settings.fails=1",), 2, ["train.optimizer.settings.fails", "fails_at"]),
        ("Signs", "", "", ("train.optimizer.kind=adamx",), 2, ["train.optimizer.kind", "did you mean adamw?"]),
        ("Signs", "", "", ("train.optimizer.kind=lion", "train.optimizer.settings.a=1"), 2, ["train.optimizer", "settings"]),
        ("Signs", "", "", ("train.optimizer.settings.fails_at=1",), 1,
         ["mine.py, line 10: Signs.direction: ArithmeticError", "step 2"]),
        ("Signs", SIGN, "3.0", (), 1, ["Signs.direction", "float"]),
        ("Signs", SIGN, "gradient[0]", (), 1, ["Signs.direction", "shape"]),
        ("Signs", SIGN, "gradient.double()", (), 1, ["Signs.direction", "dtype"]),
        ("Signs", SIGN, "weight.add_(1)", (), 1, ["Signs.direction", "weight"]),
        ("Signs", "return", "state['x'] =", (), 1, ["Signs.direction", "NoneType"]),
        ("Odd", "loss(self, predictions)", "loss(self)", (), 2, ["Odd.loss", "predictions"]),
        ("Odd", "example(self, sample)", "example(self)", (), 2, ["Odd.example", "sample"]),
        ("Odd", "", "", ("train.objective_settings.wait=1",), 2, ["objective_settings.wait", "weight"]),
        ("Odd", "", "", ("train.objective_settings.weight=x",), 2, ["objective_settings.weight", "a number"]),
        ("Odd", "", "", ("train.objective=casual",), 2, ["train.objective", "did you mean causal?"]),
        ("Odd", "", "", ("train.objective=causal", "train.objective_settings.a=1"), 2, ["train", "objective_settings"]),
        ("Odd", "", "", ("train.z_loss=0.1",), 2, ["train.z_loss"]),
        ("Odd", "", "", ("model.kv_heads=2", "parallel.tensor=2"), 2, ["parallel.tensor"]),
        ("Odd", "weight:", "model = 'encoder'\n    weight:", (), 2, ["train.objective", "encoder", "decoder"]),
        ("Odd", "sample.random", "np.random", (), 2, ["train.objective", "sample.random"]),
        ("Odd", LOSS, "1 / 0", (), 1, ["mine.py, line 14", "Odd.loss", "ZeroDivisionError"]),
        ("Odd", LOSS, "return nats.sum()", (), 1, ["mine.py", "Odd.loss", "for each target"]),
        ("Odd", LOSS, "return nats.detach()", (), 1, ["Odd.loss", "gradient"]),
        ("Odd", "return sample.inputs,", "return sample.inputs[1:],", (), 1, ["Odd.example", "integers"]),
        ("Odd", "return sample.inputs,", "return sample.inputs + 1000,", (), 1, ["Odd.example", "integers"]),
    ],
)  # fmt: skip
def test_an_unusable_class_is_one_error_before_training(
    own: Own, capsys: pytest.CaptureFixture[str], name: str, old: str, new: str, sets: tuple[str, ...], code: int, said: list[str]
) -> None:  # fmt: skip
    assert own.train(name, *sets, old=old, new=new) == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(word in error for word in said), error
    assert not (own.run / "metrics.jsonl").exists()


def test_a_class_that_fails_later_is_an_error_with_the_step(own: Own, capsys: pytest.CaptureFixture[str]) -> None:
    late = f"""        from pathlib import Path
        metrics = Path({str(own.run / "metrics.jsonl")!r})
        assert not metrics.exists() or '"train"' not in metrics.read_text()
        nats ="""
    assert own.train("Odd", old="        nats =", new=late) == 1
    said = capsys.readouterr().err
    assert "mine.py, line 15: Odd.loss: AssertionError" in said and "in step" in said


@pytest.mark.parametrize(
    ("name", "code"),
    [("Half", "train.schedule.code"), ("Signs", "train.optimizer.code"), ("Odd", "train.objective_code")],
)
def test_a_run_resumes_only_with_the_same_code_and_a_finished_one_needs_none(
    own: Own, capsys: pytest.CaptureFixture[str], name: str, code: str
) -> None:
    assert own.train(name) == 0
    assert own.train(name, new="\n") == 2
    assert code in capsys.readouterr().err
    if name == "Half":
        assert own.train(name, "train.steps=6") == 0, "it is extendable"
        assert checkpoint_steps(own.run / "checkpoints")[-1] == 6
    own.file.unlink()
    for command in (
        ["evaluate", str(own.run)],
        ["report", str(own.run)],
        ["export", str(own.run), str(own.run / "out")],
    ):
        assert run_command(command) == 0, command
    assert name != "Odd" or "decoder with the objective Odd" in (own.run / "report.html").read_text()


def test_an_error_in_two_processes_is_one_error(own: Own, capfd: pytest.CaptureFixture[str]) -> None:
    sets = ("parallel.shard=2", "train.micro_batch=2", "train.optimizer.settings.fails_at=3")
    assert own.train("Signs", *sets) == 1
    assert "Signs.direction: ArithmeticError: not today (step 4, " in capfd.readouterr().err
    assert checkpoint_steps(own.run / "checkpoints") == [2], "whole ones alone"


def test_the_loss_does_not_depend_on_the_layout(own: Own) -> None:
    assert own.train("Odd") == 0
    alone = rows(own.run)
    assert all(row["loss"] < row["objective_loss"] < 3 * row["loss"] for row in alone)
    for stage in ("corpus", "tokens"):
        shutil.copytree(own.run / stage, own.run.with_name("two") / stage)
    assert own.train("Odd", "parallel.shard=2", "train.micro_batch=1", run="two") == 0
    for one, two in zip(alone, rows(own.run.with_name("two")), strict=True):
        assert (two["loss"], two["objective_loss"]) == pytest.approx((one["loss"], one["objective_loss"]), rel=1e-5)


PAGE = (Path(__file__).parents[2] / "docs" / "how-to/own-objective.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["Focal", "FillInTheMiddle"])
def test_the_objectives_of_the_page(runs: Path, recipe_file: Path, tmp_path: Path, name: str) -> None:
    for file, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / file).write_text(code)
    [objective] = [one for one in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if f":{name}" in one]
    text = recipe_file.read_text().replace(str(recipe_file.parent / "runs"), str(runs))
    for table in re.split(r"(?=^\[)", objective, flags=re.MULTILINE):  # into the tables of the recipe
        head = table.partition("\n")[0]
        text = text.replace(f"{head}\n", table) if table else text
    (tmp_path / "my.toml").write_text(text)
    for command in ("tokens", "train"):
        assert run_command([command, str(tmp_path / "my.toml"), "--set", "train.steps=4"]) == 0
    shares = [row["objective_loss"] / row["loss"] for row in rows(runs / "small")]
    expected = pytest.approx([1.0] * 4) if name == "FillInTheMiddle" else pytest.approx([0.75] * 4, abs=0.25)
    assert shares == expected
