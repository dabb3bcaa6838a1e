"""Update rules of a user's file: errors before and during the training, two processes, and what needs no code afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bessemer.checkpoint import latest
from bessemer.checkpoint.protocol import checkpoint_steps
from bessemer.cli import run_command
from bessemer.common.hashing import file_sha256
from bessemer.recipe.resolved import load_resolved

CODE = """
from bessemer import UpdateRule

class Signs(UpdateRule):
    moments = ("average",)
    fails_at: int = -1

    def direction(self, weight, gradient, state, update):
        if update.step == self.fails_at:
            raise ArithmeticError("not today")
        state["average"].lerp_(gradient, 0.1)
        return state["average"].sign()
"""
RETURNED = 'state["average"].sign()'


def train(recipe: Path, folder: Path, code: str, *sets: str) -> int:
    (folder / "mine.py").write_text(code)
    kind = f"train.optimizer.kind={folder / 'mine.py'}:Signs"
    values = (f"run.dir={folder / 'runs'}", kind, "train.steps=12", "checkpoint.every=4", *sets)
    return run_command(
        ["train", str(recipe), *(part for value in values for part in (["--set", value] if "=" in value else [value]))]
    )


@pytest.mark.parametrize(
    ("code", "sets", "exit_code", "names"),
    [
        (CODE.replace(", update)", ")"), [], 2, ["Signs.direction", "update"]),
        (CODE.replace("def direction", "def move"), [], 2, ["Signs", "direction"]),
        (CODE.replace('("average",)', '"average"'), [], 2, ["mine.py", "line 4", "moments"]),
        (CODE, ["train.optimizer.settings.fails=1"], 2, ["train.optimizer.settings.fails", "fails_at"]),
        (CODE, ["train.optimizer.kind=adamx"], 2, ["train.optimizer.kind", "did you mean adamw?"]),
        (CODE, ["train.optimizer.kind=lion", "train.optimizer.settings.a=1"], 2, ["train.optimizer: settings"]),
        (CODE, ["train.optimizer.settings.fails_at=1"], 1, ["mine.py, line 10: Signs.direction: ArithmeticError", "step 2"]),
        (CODE.replace(RETURNED, "3.0"), [], 1, ["Signs.direction", "float"]),
        (CODE.replace(RETURNED, "gradient[0]"), [], 1, ["Signs.direction", "shape"]),
        (CODE.replace(RETURNED, "gradient.double()"), [], 1, ["Signs.direction", "dtype"]),
        (CODE.replace(RETURNED, "weight.add_(1)"), [], 1, ["Signs.direction", "weight"]),
        (CODE.replace("return", "state['x'] ="), [], 1, ["Signs.direction", "NoneType"]),
    ],
)  # fmt: skip
def test_a_rule_that_cannot_be_used_is_one_error_before_the_training(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, sets: list[str],
    exit_code: int, names: list[str],
) -> None:  # fmt: skip
    assert train(recipe_file, tmp_path, code, *sets) == exit_code
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(name in said for name in names), said
    assert not (tmp_path / "runs" / "small" / "metrics.jsonl").exists()


def test_two_processes_resume_bit_for_bit_and_fail_with_one_error(
    runs: Path, recipe_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sets, run = ("parallel.shard=2", "train.micro_batch=2"), tmp_path / "runs" / "small"
    assert train(recipe_file, tmp_path, CODE, *sets) == 0
    found = latest(run / "checkpoints")
    assert found is not None and checkpoint_steps(run / "checkpoints") == [4, 8, 12]
    before = {path: file_sha256(path) for path in found.folder.glob("*.safetensors")}
    shutil.rmtree(found.folder)
    assert train(recipe_file, tmp_path, CODE, *sets) == 0
    assert before and {path: file_sha256(path) for path in before} == before
    capfd.readouterr()
    assert train(recipe_file, tmp_path, CODE, "--restart", *sets, "train.optimizer.settings.fails_at=9") == 1
    assert "Signs.direction: ArithmeticError: not today (step 10, " in capfd.readouterr().err
    assert checkpoint_steps(run / "checkpoints") == [4, 8], "whole ones alone"


def test_a_finished_run_needs_no_code(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "small"
    assert train(recipe_file, tmp_path, CODE) == 0
    assert load_resolved(run / "recipe.toml").train.optimizer.code is not None
    assert train(recipe_file, tmp_path, CODE + "\n") == 2
    assert "train.optimizer.code" in capsys.readouterr().err
    (tmp_path / "mine.py").unlink()
    for command in (["report", str(run)], ["evaluate", str(run)], ["export", str(run), str(tmp_path / "export")]):
        assert run_command(command) == 0
