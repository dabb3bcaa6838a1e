"""Plans from Python, which equal those of the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bessemer as bs
from bessemer.cli import run_command
from bessemer.common.errors import InputError


def of_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run_command(["plan", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_plan_equals_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    plan = bs.plan_training(params="8B", tokens="2T", devices="512xH100", seq=8192, keys={"train.precision": "bf16"})
    options = ["--params", "8B", "--tokens", "2T", "--gpus", "512xH100", "--seq", "8192"]
    expected = of_command(capsys, *options, "--set", "train.precision=bf16")
    assert json.loads(json.dumps(plan.to_dict())) == expected
    assert plan.fits and "H100" in str(plan) and "<table>" in plan._repr_html_() and "512" in repr(plan)
    same = bs.plan_training(params=8e9, tokens=2e12, devices="512xH100", seq=8192, keys={"train.precision": "bf16"})
    assert same.to_dict() == plan.to_dict()


def test_a_plan_of_a_recipe(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = bs.plan_training(recipe_file, devices="2xH100")
    assert json.loads(json.dumps(plan.to_dict())) == of_command(capsys, str(recipe_file), "--gpus", "2xH100")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"params": "8B"}, "device"),
        ({"devices": "8xH100"}, "model"),
        ({"params": "8B", "devices": "8xNoSuch"}, "NoSuch"),
        ({"params": "8B", "devices": "8xH100", "sequence_len": 1}, "sequence_len"),
        ({"params": "8B", "devices": "8xH100", "keys": {"train.nope": 1}}, "nope"),
        ({"params": "8B", "devices": "8xH100", "keys": {"train.steps": object()}}, "recipe"),
        ({"recipe": "demo"}, "device"),
    ],
)
def test_invalid_goals_raise_errors(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        bs.plan_training(**arguments)
