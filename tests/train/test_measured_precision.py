"""train.precision = "auto" on a CPU: the faster of bf16 and fp32, measured once and kept by the run."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path

import pytest
import torch

from bessemer import forecast
from bessemer.cli import run_command
from bessemer.defaults import derived_keys
from bessemer.model.huggingface.config import model_config
from bessemer.recipe import Recipe, load
from bessemer.run import read_json, read_json_lines, write_json
from bessemer.train import measure


@pytest.fixture
def recipe(recipe_file: Path) -> Recipe:
    return derived_keys.resolve(load(recipe_file), 400)


def has_units(monkeypatch: pytest.MonkeyPatch, gain: float, seconds: tuple[float, float] = (2.0, 1.0)) -> None:
    """A CPU whose bf16 matmuls are `gain` times as fast as in fp32, and on which a step takes `seconds` in fp32 and bf16."""
    monkeypatch.setattr(measure, "MIN_MATMUL_GAIN", 1.5)
    monkeypatch.setattr(measure, "matmul_gain", lambda *_: gain)
    timed = measure._timed_steps
    monkeypatch.setattr(
        measure,
        "_timed_steps",
        lambda trainers, *more, **given: (
            list(seconds)
            if [one.device.precision.name for one in trainers] == ["fp32", "bf16"]
            else timed(trainers, *more, **given)
        ),
    )


def test_matmuls_and_then_steps_decide(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_config(recipe, 400)
    has_units(monkeypatch, 4.0)
    assert measure.faster_precision(recipe, config, 1.0) == (
        "bf16",
        "a step takes 2 s in fp32 and 1 s in bf16; this CPU's matmuls of these shapes are 4.0 times as fast in bf16",
    )
    assert measure.faster_precision(recipe, config, 0.0)[0] == "bf16", "no time for steps"
    has_units(monkeypatch, 4.0, (1.05, 1.0))
    assert measure.faster_precision(recipe, config, 1.0)[0] == "fp32", "what is between the matmuls takes as long"
    has_units(monkeypatch, 0.1)
    name, why = measure.faster_precision(recipe, config, 1.0)
    assert name == "fp32" and why.endswith("10.0 times slower in bf16")


def test_what_is_timed_is_the_matmuls_of_the_model(recipe: Recipe) -> None:
    assert 1e-3 < measure.matmul_gain(recipe, model_config(recipe, 400)) < 1e3
    assert 1e-4 < measure.matmul_gain(recipe, model_config(recipe, 400), torch.float16) < 1e3


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_precision_that_a_cpu_is_slow_in_is_warned_of(
    recipe: Recipe, precision: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_units(monkeypatch, 0.1)
    given = recipe.changed(train={"precision": precision})
    planner = forecast.Planner.of(given, model_config(given, 400), None)
    assert planner.precision(given, 0.0) == precision
    said = " ".join(capsys.readouterr().err.split())
    slow = (
        f"train.precision = {precision}: this CPU has no units for it, its matmuls are 10.0 times slower than in fp32"
    )
    assert (slow in said) == (precision != "fp32")


def test_a_cpu_without_units_is_known_by_small_matmuls(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are computed without units, the largest would take minutes."""
    timed = []

    def slow(x: torch.Tensor, weight: torch.Tensor) -> None:
        timed.append(x.numel() * len(weight))
        time.sleep(0.03 if x.dtype == torch.bfloat16 else 0.0)

    monkeypatch.setattr(measure, "linear_kernel", slow)
    wide = dataclasses.replace(model_config(recipe, 400), width=4096, mlp_width=11_008)
    assert measure.matmul_gain(recipe, wide) < measure.HOPELESS_GAIN
    assert max(timed) <= 64 * 256 * 256


def trained(runs: Path) -> tuple[str, list[float]]:
    rows = read_json_lines(runs / "small" / "metrics.jsonl")
    losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
    return load(runs / "small").train.precision, [losses[step] for step in sorted(losses)]


def test_a_run_keeps_what_was_chosen_at_its_start(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ["--set", f"run.dir={runs}", "--set", "train.log_every=1", "--set", "train.steps=8"]
    has_units(monkeypatch, 4.0)
    assert run_command(["train", str(recipe_file), *sets]) == 0
    assert "train.precision = bf16: a step takes 2 s in fp32 and 1 s in bf16" in capsys.readouterr().err
    assert trained(runs)[0] == "bf16"
    has_units(monkeypatch, 0.1)  # another machine, or moment, would choose otherwise
    assert run_command(["train", str(recipe_file), *sets[:-1], "train.steps=10"]) == 0
    assert "a step takes" not in capsys.readouterr().err
    precision, losses = trained(runs)
    assert precision == "bf16" and len(losses) == 10
    plan, checkpoints = runs / "small" / "plan.json", runs / "small" / "checkpoints"
    write_json(plan, {**read_json(plan), "device": "Other CPU, 8 threads"})
    shutil.rmtree(checkpoints / "step-00000010")  # as if it had been killed, and gone on on another machine
    assert run_command(["train", str(recipe_file), *sets[:-1], "train.steps=10"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert (
        said.count("this CPU has no units for it, its matmuls are 10.0 times slower than in fp32; the run keeps it")
        == 1
    )
    assert "planned on Other CPU, 8 threads; on " in said
    # Asked for by name and trained anew it computes the same; asking for another is another recipe.
    assert run_command(["train", str(recipe_file), *sets, "--set", "train.precision=fp32"]) == 2
    assert "train.precision" in capsys.readouterr().err
    assert run_command(["train", str(recipe_file), *sets, "--set", "train.precision=bf16", "--restart"]) == 0
    assert "its matmuls are 10.0 times slower than in fp32" in " ".join(capsys.readouterr().err.split())
    assert trained(runs)[1] == losses[:8]


@pytest.mark.parametrize(
    ("precision", "compile_", "warns"), [("bf16", "on", True), ("bf16", "auto", False), ("fp32", "on", False)]
)
def test_a_slow_combination_is_warned_of(
    recipe: Recipe, precision: str, compile_: str, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = recipe.changed(train={"precision": precision, "compile": compile_, "device": "cpu"})
    forecast.planned_run(resolved, resolved, 400, 0, {}, measure_seconds=0.0)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("warning: train.compile = on") == warns
    assert ("0.46 times as fast" in said) == warns
