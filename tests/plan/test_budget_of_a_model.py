"""A budget for a model of one's own: the model is kept, and the tokens are those that are paid for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command

RECIPE = """
[model]
layers = 16
width = 2048
heads = 16
vocabulary = 50257
[tokens]
sequence_length = 2048
[train]
global_batch_tokens = 1048576
{length}
[parallel]
shard = 8
[cluster]
device = "H100"
"""
SIZES = ("--set", "model.layers=16", "--set", "model.width=2048", "--set", "model.heads=16")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run_command(["plan", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(("--params", "7B"), 7004213248), (("--model", "llama-3-8b"), 8030261248), (SIZES, None)],
    ids=str,
)
@pytest.mark.parametrize(
    "budget", [("--money", "30k"), ("--days", "2", "--odds", "90%"), ("--flops", "1e21"), ("--days", "0.01")], ids=str
)
def test_a_budget_buys_tokens_for_a_model(
    model: tuple[str, ...], parameters: int | None, budget: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is kept, one more step would break it, and the plan is the one that the same model has on so many tokens."""
    asked = ("--gpus", "64xH100", "--batch", "1048576", *model)
    found = planned(capsys, *asked, *budget)
    tokens, batch, spent = found["tokens"], found["batch_tokens"], found["budget"]
    assert found["parameters"] == (parameters or planned(capsys, *asked)["parameters"]) and tokens % batch == 0
    assert spent["is_kept"] and 0.97 < spent["spent"] / spent["amount"] <= 1
    same = planned(capsys, *asked, "--tokens", str(tokens))
    assert {**same, "notes": 0} == {**{name: value for name, value in found.items() if name != "budget"}, "notes": 0}
    more = planned(capsys, *asked, *budget, "--what-if", f"tokens={tokens + batch}")["what_if"][0]
    assert not more["budget"]["is_kept"], "one more step is not paid for"


@pytest.mark.parametrize("length", ["tokens = 1_000_000_000", "steps = 500", "minutes = 30.0", ""])
def test_a_budget_for_a_recipe_replaces_its_tokens(
    length: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE.format(length=length))
    found = planned(capsys, str(path), "--days", "3", "--what-if", "gpus=16", "--what-if", "tokens=1B")
    assert found["layout"]["shard"] == 8
    assert 2.99 < found["budget"]["spent"] <= 3 and found["tokens"] % found["batch_tokens"] == 0
    replaced = [note for note in found["notes"] if "are those that --days 3 pays for, in place of the recipe's" in note]
    assert len(replaced) == bool(length) and all(f"train.{length.split()[0]} = " in note for note in replaced)
    more, fewer = found["what_if"]
    assert more["tokens"] == found["tokens"] and fewer["tokens"] < 1.01e9 and fewer["budget"]["is_kept"]
    assert not any("pays for" in note for one in (more, fewer) for note in one["notes"])


def test_tokens_that_differ_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--params", "1B", "--gpus", "64xH100", "--days", "4")
    plain, repeated = planned(capsys, *words), planned(capsys, *words, "--unique", "20B")
    assert repeated["tokens"] == plain["tokens"]
    assert repeated["repeated"]["epochs"] == pytest.approx(plain["tokens"] / 20e9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--params", "7B", "--tokens", "1T", "--days", "3"),
            "without --days the plan says what model and tokens cost",
        ),
        ((*SIZES, "--set", "train.steps=5", "--days", "3"), "a model, train.steps and --days exclude each other"),
        (("--set", "train.steps=5", "--days", "3"), "train.steps and a budget exclude each other"),
        (("--params", "70B", "--days", "3"), "no layout of 8 x H100 SXM fits"),
        (("--params", "1B", "--batch", "1M", "--money", "0.01"), "--money 0.01: too little to train this model on"),
        (("--params", "1B", "--days", "3", "--money", "5"), "give one budget"),
    ],
    ids=str,
)
def test_what_is_contradictory_is_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", "--gpus", "8xH100", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and ("--what-if" not in error or "--gpus 8xH100 --what-if gpus=16" in error)


def test_dollars_need_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "--params", "1B", "--gpus", "8xL40S", "--money", "10k")
    assert run_command([*words, "--price", "1"]) == 0
    assert run_command([*words]) == 2
    assert "--money: the catalogue has no price for L40S; add --price P" in capsys.readouterr().err
