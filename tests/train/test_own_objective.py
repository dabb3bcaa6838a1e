"""Objectives of a user's file: errors before the training, the same training on any layout, and a resume with the same code."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.run.files import read_json_lines

CODE = """
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
"""
RETURN = "return nats * (1.0 + self.weight * (predictions.position % 2))"
FEW = ("train.steps=4", "checkpoint.every=2", "train.log_every=1", "train.validate_every=4")


def train(recipe: Path, folder: Path, code: str, *sets: str, name: str = "small") -> int:
    (folder / "mine.py").write_text(code)
    kind = f"train.objective={folder / 'mine.py'}:Odd"
    values = (f"run.dir={folder / 'runs'}", f"run.name={name}", kind, *FEW, *sets)
    return run_command(["train", str(recipe), *(part for value in values for part in ("--set", value))])


def rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(run / "metrics.jsonl") if row["kind"] == "train"]


@pytest.mark.parametrize(
    ("old", "new", "sets", "code", "names"),
    [
        ("loss(self, predictions)", "loss(self)", (), 2, ["Odd.loss", "predictions"]),
        ("example(self, sample)", "example(self)", (), 2, ["Odd.example", "sample"]),
        ("", "", ("train.objective_settings.wait=1",), 2, ["objective_settings.wait", "weight"]),
        ("", "", ("train.objective_settings.weight=x",), 2, ["objective_settings.weight", "a number"]),
        ("", "", ("train.objective=casual",), 2, ["train.objective", "did you mean causal?"]),
        ("", "", ("train.objective=causal", "train.objective_settings.a=1"), 2, ["objective_settings", "no effect"]),
        ("", "", ("train.z_loss=0.1",), 2, ["train.z_loss"]),
        ("", "", ("model.kv_heads=2", "parallel.tensor=2"), 2, ["parallel.tensor"]),
        ("weight:", "model = 'encoder'\n    weight:", (), 2, ["train.objective", "encoder", "decoder"]),
        ("sample.random", "np.random", (), 2, ["train.objective", "sample.random"]),
        (RETURN, "1 / 0", (), 1, ["mine.py, line 14", "Odd.loss", "ZeroDivisionError"]),
        (RETURN, "return nats.sum()", (), 1, ["mine.py", "Odd.loss", "for each target"]),
        (RETURN, "return nats.detach()", (), 1, ["Odd.loss", "gradient"]),
        ("return sample.inputs,", "return sample.inputs[1:],", (), 1, ["Odd.example", "integers"]),
        ("return sample.inputs,", "return sample.inputs + 1000,", (), 1, ["Odd.example", "integers"]),
    ],
)  # fmt: skip
def test_an_objective_that_cannot_be_used_is_one_error_before_the_training(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str,
    sets: tuple[str, ...], code: int, names: list[str],
) -> None:  # fmt: skip
    assert train(recipe_file, tmp_path, CODE.replace(old, new) if old else CODE, *sets) == code
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(name in said for name in names), said
    assert not (tmp_path / "runs" / "small" / "metrics.jsonl").exists()


def test_one_that_fails_later_names_the_step(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = f"""        from pathlib import Path
        metrics = Path({str(tmp_path / "runs" / "small" / "metrics.jsonl")!r})
        assert not metrics.exists() or '"train"' not in metrics.read_text()
        nats ="""
    assert train(recipe_file, tmp_path, CODE.replace("        nats =", late)) == 1
    said = capsys.readouterr().err
    assert "mine.py, line 15: Odd.loss: AssertionError" in said and "in step" in said


def test_the_loss_depends_neither_on_the_layout_nor_on_a_stop(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(recipe_file, tmp_path, CODE) == 0
    run = tmp_path / "runs" / "small"
    straight = rows(run)
    assert all(row["loss"] < row["objective_loss"] < 3 * row["loss"] for row in straight)
    last, before = run / "checkpoints" / "step-00000004", []
    for resumed in (False, True):
        before.append(sorted((path.name, path.read_bytes()) for path in last.glob("*.safetensors")))
        if not resumed:
            shutil.rmtree(last)
            assert train(recipe_file, tmp_path, CODE) == 0
    assert before[0] == before[1]
    assert [row["loss"] for row in rows(run)] == [row["loss"] for row in straight]

    shutil.copytree(run / "corpus", tmp_path / "runs" / "two" / "corpus")
    shutil.copytree(run / "tokens", tmp_path / "runs" / "two" / "tokens")
    assert train(recipe_file, tmp_path, CODE, "parallel.shard=2", "train.micro_batch=1", name="two") == 0
    for one, two in zip(straight, rows(tmp_path / "runs" / "two"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["objective_loss"] == pytest.approx(one["objective_loss"], rel=1e-5)

    shutil.rmtree(last)
    assert train(recipe_file, tmp_path, CODE + "\n") == 2
    assert "train.objective_code" in capsys.readouterr().err
    (tmp_path / "mine.py").unlink()
    for command in (["evaluate", str(run)], ["report", str(run)]):
        assert run_command(command) == 0, command
    assert "decoder with the objective Odd" in (run / "report.html").read_text()


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
    assert len(shares) == 4 and all(
        0.5 < share < 1 if name == "Focal" else share == pytest.approx(1) for share in shares
    )
