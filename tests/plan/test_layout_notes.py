"""What a plan notes of its layout, each held against the plan that follows the note."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command

RECIPE = """
[model]
layers = 32
width = 4096
heads = 32
vocabulary = {vocabulary}

[tokens]
sequence_length = 4096

[train]
tokens = 100_000_000_000
global_batch_tokens = 524288

{parallel}

[cluster]
device = "A100-80GB"
devices = {devices}
"""


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run_command(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def recipe(folder: Path, parallel: str, devices: int, vocabulary: int = 128256) -> str:
    path = folder / f"{devices}.toml"
    path.write_text(RECIPE.format(parallel=parallel, devices=devices, vocabulary=vocabulary))
    return str(path)


def only(found: dict[str, Any], words: str) -> str:
    (note,) = [note for note in found["notes"] if words in note]
    return note  # type: ignore[no-any-return]


def test_a_layout_of_the_recipe_that_does_not_fit_has_one_that_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, recipe(tmp_path, "[parallel]\nreplicate = 4", 4))
    note = only(found, "another layout of these devices fits")
    assert not found["fits"] and "shard 4, zero 3" in note
    other = planned(capsys, recipe(tmp_path, "", 4))
    assert other["fits"] and (other["layout"]["shard"], other["layout"]["zero"]) == (4, 3)
    held = other["memory_bytes_per_device"]["total"] / 1e9
    assert float(re.search(r"in ([\d.]+) GB", note)[1]) == pytest.approx(held, abs=0.05)  # type: ignore[index]


def test_the_other_layout_keeps_the_micro_batch_and_the_recompute_of_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("--set", "train.micro_batch=4", "--set", "train.recompute=selective")
    found = planned(capsys, recipe(tmp_path, "[parallel]\nreplicate = 4", 4), *own)
    note = only(found, "another layout of these devices fits")
    other = planned(capsys, recipe(tmp_path, "", 4), *own)
    assert (other["layout"]["micro_batch"], other["layout"]["recompute"]) == (4, "selective") and other["fits"]
    held = other["memory_bytes_per_device"]["total"] / 1e9
    assert float(re.search(r"in ([\d.]+) GB", note)[1]) == pytest.approx(held, abs=0.05)  # type: ignore[index]


def test_where_no_layout_fits_the_note_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = recipe(tmp_path, "[parallel]\nshard = 1", 1)
    assert "with --set train.optimizer.offload=true" in only(planned(capsys, alone), "no other layout")
    assert planned(capsys, alone, "--set", "train.optimizer.offload=true")["fits"]


def test_an_uneven_vocabulary_is_noted_with_what_a_rounder_one_saves(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "gpt2", "--tokens", "10B", "--gpus", "8xH100")
    found = planned(capsys, *words, "--micro-batch", "16", "--dp", "8")
    note = only(found, "a vocabulary of 50,257 is an uneven width")
    rounder = planned(capsys, *words, "--micro-batch", "16", "--dp", "8", "--set", "model.vocabulary=50304")
    assert not any("vocabulary" in one for one in rounder["notes"])
    saved = 1 - rounder["step_seconds"] / found["step_seconds"]
    assert float(re.search(r"takes (\d+)% less", note)[1]) == pytest.approx(100 * saved, abs=1)  # type: ignore[index]


def test_a_run_of_many_years_has_the_devices_of_one_year(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--params", "7B", "--tokens", "100T")
    found = planned(capsys, *words, "--gpus", "8xH100")
    devices = int(re.search(r"a year takes about (\d+) of them", only(found, "a run of a year"))[1])  # type: ignore[index]
    assert devices == math.ceil(8 * found["expected"]["days"] / 365.25)
    more = planned(capsys, *words, "--gpus", f"{devices}xH100")
    assert not any("a run of a year" in note for note in more["notes"])
    assert more["expected"]["days"] == pytest.approx(365.25, rel=0.15)


def test_more_tokens_than_there_are_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "--params", "7B", "--tokens", "9e18", "--gpus", "8xH100"]) == 2
    assert "train.tokens: 9e+18 is over 100 times the text of the whole web" in capsys.readouterr().err
