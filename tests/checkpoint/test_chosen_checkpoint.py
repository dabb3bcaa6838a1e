"""Commands that use the checkpoint of a given step or the best one, and checkpoint.keep_best, which keeps it."""

import io
import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.checkpoint import save
from bessemer.checkpoint.format import SavedCheckpoint, weight_reader
from bessemer.checkpoint.protocol import find_newest, verify
from bessemer.checkpoint.selection import best_validation
from bessemer.cli import run_command
from bessemer.common.errors import InputError
from bessemer.run.directory import RunDirectory, checkpoint_name, checkpoint_steps
from bessemer.run.files import read_json, read_json_lines
from bessemer.train import loop
from bessemer.train.stop import StopSignal

SETS = ("train.validate_every=8", "evaluate.ngram=false", "report.tensorboard=false", "guard.max_rollbacks=0")


def train(recipe_file: Path, runs: Path, *sets: str, options: tuple[str, ...] = (), expected: int = 0) -> Path:
    given = [part for one in (f"run.dir={runs}", *SETS, *sets) for part in ("--set", one)]
    assert run_command(["train", str(recipe_file), *given, *options]) == expected
    return runs / "small"


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 8, 16 and 24, of which step 16 has the lowest validation loss."""
    place = tmp_path_factory.mktemp("trained")
    shutil.copytree(prepared / "runs", place / "runs")
    folder = train(prepared / "small.toml", place / "runs")
    rows = read_json_lines(folder / "metrics.jsonl")
    lowest = {8: 3.5, 16: 1.0, 24: 3.0}
    for row in rows:
        if row["kind"] == "validation":
            row["loss"] = lowest[row["step"]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "small")
    return tmp_path / "small"


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    capsys.readouterr()
    assert run_command([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_evaluate_scores_the_checkpoint_of_a_step(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = said(capsys, "evaluate", copy)
    eighth, best = said(capsys, "evaluate", copy, "--step", 8), said(capsys, "evaluate", copy, "--step", "best")
    assert (eighth["step"], best["step"], newest["step"]) == (8, 16, 24)
    assert len({eighth["loss"], best["loss"], newest["loss"]}) == 3
    assert (
        read_json(copy / "evaluation.json")["step"] == 24 and read_json(copy / "evaluation-step-16.json")["step"] == 16
    )
    assert said(capsys, "evaluate", copy, "--step", 24)["loss"] == newest["loss"]
    assert not (copy / "evaluation-step-24.json").exists(), "it is the newest"


def test_evaluate_averages_checkpoints(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three = said(capsys, "evaluate", copy, "--average", 3)
    assert three["averaged_checkpoints"] == 3 and three["step"] == 24
    assert not (copy / "evaluation.json").exists(), "the run's own scores are others"
    one = said(capsys, "evaluate", copy)
    assert one["averaged_checkpoints"] == 1 and one["loss"] != three["loss"]
    for name, found in (("evaluation.json", one), ("evaluation-average-3.json", three)):
        assert read_json(copy / name)["loss"] == found["loss"]
    for number in (9, 0):
        assert run_command(["evaluate", str(copy), "--average", str(number)]) == 2


def test_export_generate_and_chat_use_the_chosen_checkpoint(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    said(capsys, "export", copy, tmp_path / "best", "--step", "best")
    weights = verify(copy / "checkpoints" / checkpoint_name(16)).tensors("model")
    (embedding,) = [
        one for name, one in load_file(tmp_path / "best" / "model.safetensors").items() if "embed_tokens" in name
    ]
    assert any(one.shape == embedding.shape and bool((one == embedding).all()) for one in weights.values())
    assert "| steps | 16 of 24 |" in (tmp_path / "best" / "README.md").read_text()
    texts = [
        said(capsys, "generate", copy, "The ", "--temperature", 0, "--max-tokens", 30, *step)["text"]
        for step in ((), ("--step", 8), ("--step", 24), ("--step", "best"))
    ]
    assert texts[0] == texts[2] and len(set(texts)) == 3
    replies = []
    for step in ((), ("--step", 8)):
        monkeypatch.setattr("sys.stdin", io.StringIO("The\n"))
        replies.append(said(capsys, "chat", copy, "--temperature", 0, "--max-tokens", 30, *step)["messages"][-1])
    assert replies[0] != replies[1]


@pytest.mark.parametrize(
    "words", [("--step", "7"), ("--step", "newest"), ("--step", "-8"), ("--step", "8", "--average", "2")]
)
def test_a_missing_checkpoint_is_an_error(
    copy: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    error = said(capsys, "evaluate", copy, *words, code=2)
    assert error["exit"] == 2 and ("8, 16, 24" in error["error"]) == ("--average" not in words)
    assert not list(copy.glob("evaluation*"))


def test_best_needs_a_validated_and_undamaged_checkpoint(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = copy / "checkpoints" / checkpoint_name(8) / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    assert str(model) in said(capsys, "evaluate", copy, "--step", 8, code=2)["error"]
    rows = [row for row in read_json_lines(copy / "metrics.jsonl") if row["kind"] != "validation"]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said(capsys, "generate", copy, "x", "--step", "best", code=2)


@pytest.mark.parametrize(("step", "expected"), [("8", 8), ("best", 16)])
def test_a_training_starts_from_the_chosen_checkpoint(
    step: str | None, expected: int, copy: Path, runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = () if step is None else (f"train.start_step={step}",)
    (runs / "small").rename(runs / "next")
    sets = ("run.name=next", "train.steps=1", f"train.start={copy}", *chosen)
    train(recipe_file, runs, *sets)
    first = next(row for row in read_json_lines(runs / "next" / "metrics.jsonl") if row["kind"] == "validation")
    scored = said(capsys, "evaluate", copy, "--step", expected)
    assert first["step"] == 0 and first["loss"] == pytest.approx(scored["loss"], rel=1e-6)


def test_starting_from_a_missing_step_is_an_error(copy: Path, runs: Path, recipe_file: Path) -> None:
    (runs / "small").rename(runs / "next")
    train(recipe_file, runs, "run.name=next", f"train.start={copy}", "train.start_step=7", expected=2)
    train(recipe_file, runs, "run.name=next", "train.start_step=8", expected=2)
    assert not (runs / "next" / "metrics.jsonl").exists()


def scored_as(patch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """Make validations return the given loss of their step."""
    honest = getattr(loop, "_validate")  # noqa: B009
    step = [0]

    def validate(training: Any, state: Any, *given: Any) -> Any:
        step[0] = state.step
        return honest(training, state, *given)

    measured = getattr(loop, "validate")  # noqa: B009
    patch.setattr(loop, "_validate", validate)

    def scored(*given: Any) -> Any:
        made = measured(*given)
        return replace(made, metrics={**made.metrics, "loss": losses[step[0]]})

    patch.setattr(loop, "validate", scored)


LOSSES = {4: 3.0, 8: 2.0, 12: 1.0, 16: 1.5, 20: 2.0, 24: 1.2}
KEEP = ("train.validate_every=4", "checkpoint.keep=1", "checkpoint.every=8", "checkpoint.keep_best=true")


def test_the_best_validated_checkpoint_is_saved_and_kept(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check this also when no checkpoint is due after that step, and across a stop and a resume."""
    scored_as(monkeypatch, LOSSES)
    sets = (*KEEP, "checkpoint.asynchronous=true")
    calls = iter(range(99))
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "received", lambda self: "SIGTERM" if next(calls) == 18 else None)
        folder = train(recipe_file, runs, *sets, expected=75)
    assert checkpoint_steps(folder / "checkpoints") == [12, 18]
    train(recipe_file, runs, *sets)
    assert checkpoint_steps(folder / "checkpoints") == [12, 24] and best_validation(RunDirectory(folder)) == (1.0, 12)
    assert said(capsys, "evaluate", folder, "--step", "best")["step"] == 12


def saved(folder: Path, step: int, **weights: torch.Tensor) -> dict[str, torch.Tensor]:
    save(folder, step, {"model": weights}, {}, keep=10)
    return weights


def mean_weights(checkpoints: list[SavedCheckpoint]) -> dict[str, torch.Tensor]:
    with ExitStack() as stack:
        read = weight_reader(checkpoints, stack)
        return {name: read(name) for name in checkpoints[0].contents["model"]}


def test_averaged_weights_use_the_newest_checkpoints(tmp_path: Path) -> None:
    made = [saved(tmp_path, step, w=torch.randn(5, 7), b=torch.randn(3)) for step in (10, 20, 30, 40)]
    found = find_newest(tmp_path, 3, print)
    assert [checkpoint.step for checkpoint in found] == [40, 30, 20]
    mean = mean_weights(found)
    for name in ("w", "b"):
        wanted = torch.stack([weights[name].double() for weights in made[1:]]).mean(0)
        assert mean[name].dtype == torch.float32
        torch.testing.assert_close(mean[name].double(), wanted, rtol=1e-7, atol=1e-9)


def test_averaging_skips_damaged_checkpoints_and_needs_enough_others(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step, w=torch.full((2,), float(step)))
    with open(tmp_path / "step-00000002" / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    said: list[str] = []
    assert mean_weights(find_newest(tmp_path, 2, said.append))["w"].tolist() == [2.0, 2.0]
    assert len(said) == 1 and "step-00000002" in said[0]
    with pytest.raises(InputError, match=r"--average 3: .* 2 .*checkpoint\.keep"):
        find_newest(tmp_path, 3, print)
