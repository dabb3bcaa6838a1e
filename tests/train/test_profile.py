"""Profiling: a window of steps, a table, a trace, and the same weights."""

import gzip
import json
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.train.profile import StepProfiler
from tests.newest import training_result
from tests.train.small_trainer import batch, trainer_of


@pytest.mark.parametrize(("num_steps", "profiled"), [(1, 1), (3, 2), (6, 3), (14, 3)])
def test_a_few_steps_are_profiled_however_short_the_session(
    recipe_file: Path, tmp_path: Path, num_steps: int, profiled: int
) -> None:
    trainer = trainer_of(recipe_file)
    profiler = StepProfiler(trainer.device, num_steps, tmp_path / "profile")
    for data in profiler(iter([batch() for _ in range(num_steps)])):
        trainer.update(0, trainer.forward_backward(data).grad_norm)
    table = (tmp_path / "profile" / "operators.txt").read_text()
    assert "aten::mm" in table or "aten::addmm" in table
    events = json.loads(gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    assert len([event for event in events if str(event.get("name", "")).startswith("Optimizer.step")]) == profiled


def test_a_profiled_training_has_the_same_weights(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = f"run.dir={runs}", "train.steps=10", "model.layers=1", "report.tensorboard=false"
    given = ["train", str(recipe_file), *(part for value in sets for part in ("--set", value))]
    assert run_command(given) == 0
    expected = training_result(runs / "small")
    assert run_command([*given, "--profile"]) == 2, "no step is left"
    capsys.readouterr()
    assert run_command([*given, "--restart", "--profile", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["profile"]
    assert Path(found["table"]).exists() and Path(found["trace"]).exists()
    assert training_result(runs / "small") == expected
