"""Resuming and extending a run: exact if the schedule allows it, otherwise an error that suggests a new run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.model import recipe_defaults
from bessemer.recipe import load
from bessemer.recipe.keys import EXTENDS, MAY_CHANGE, keys
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json, read_json_lines
from bessemer.train.run_spec import Fresh, Resume
from bessemer.workflow import resume_policy
from bessemer.workflow.resume_policy import Extend, Refuse, decide
from tests.newest import training_result, weights_hash

WSD = ("train.schedule.kind=wsd", "train.schedule.decay_share=0.25", "checkpoint.keep=1")
CONSTANT = "train.schedule.kind=constant"


def train(recipe: Path, *overrides: str, command: str = "train") -> int:
    return run_command([command, str(recipe), *(part for one in overrides for part in ("--set", one))])


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


@pytest.fixture
def trained(runs: Path, recipe_file: Path, fixed_step_time: None) -> Any:
    """Return a function that trains the run with overrides in another folder over the same tokens."""

    def make(name: str, *overrides: str) -> Path:
        shutil.copytree(runs / "small", runs / name)
        assert train(recipe_file, f"run.dir={runs}", f"run.name={name}", *overrides) == 0
        return runs / name

    return make


def test_wsd_is_extended_from_before_its_decay_bit_for_bit(trained: Any, recipe_file: Path, tmp_path: Path) -> None:
    """Twice: with its checkpoints on a mirror only, and by the run directory, whose recipe is used."""
    on = *WSD, f"checkpoint.mirror={tmp_path / 'mirror'}"
    folder, straight = trained("on", *on), trained("straight", *WSD, "train.steps=40")
    assert steps(folder) == [18, 24], "the checkpoint before the decay is kept beside the newest"
    shutil.rmtree(folder / "checkpoints")
    assert train(recipe_file, f"run.dir={folder.parent}", "run.name=on", *on, "train.steps=32") == 0
    assert steps(folder) == [24, 32]
    assert train(folder, "train.steps=40") == 0
    assert training_result(folder) == training_result(straight)
    assert steps(folder) == steps(straight) == [30, 40]
    assert read_json(folder / "mixture.json") == read_json(straight / "mixture.json")
    rows = [row for row in read_json_lines(folder / "incidents.jsonl") if row["what"] == "recipe_changed"]
    changes = [(row["step"], row["cause"]) for row in rows]
    assert changes == [(18, "train.steps: 24 -> 32"), (24, "train.steps: 32 -> 40")]


def test_a_constant_rate_is_extended_bit_for_bit(trained: Any) -> None:
    folder, straight = trained("on", CONSTANT), trained("straight", CONSTANT, "train.steps=30")
    assert train(folder, f"train.tokens={30 * 256}") == 0
    assert training_result(folder) == training_result(straight)


@pytest.mark.fault(29)
@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("cosine", "train.steps=40"),
        ("constant", "run.seed=4"),
    ],
)
def test_another_recipe_is_an_error_that_suggests_a_new_run(
    trained: Any, capsys: pytest.CaptureFixture[str], kind: str, changed: str
) -> None:
    folder = trained("on", f"train.schedule.kind={kind}", "train.schedule.warmup_steps=3")
    before = training_result(folder), steps(folder), (folder / "recipe.toml").read_bytes()
    capsys.readouterr()
    assert train(folder, changed) == 2
    said = capsys.readouterr().err
    assert changed.partition("=")[0] in said and "train.start" in said
    assert before == (training_result(folder), steps(folder), (folder / "recipe.toml").read_bytes())


def test_keys_without_effect_on_weights_may_change(trained: Any) -> None:
    cut = trained("cut", CONSTANT)
    whole = weights_hash(cut)
    shutil.rmtree(cut / "checkpoints" / "step-00000024")
    changed = "train.log_every=2", "evaluate.top_k=3", "checkpoint.every=4", "guard.max_rollbacks=1"
    assert train(cut, *changed) == 0
    assert weights_hash(cut) == whole
    assert not any(row["what"] == "recipe_changed" for row in read_json_lines(cut / "incidents.jsonl"))


def test_a_missing_key_keeps_the_value_of_the_run(trained: Any, recipe_file: Path) -> None:
    """Simulate a program with other defaults: a trained run has its own in its recipe."""
    keys = CONSTANT, "train.optimizer.weight_decay=0.3", "train.schedule.warmup_steps=3"
    folder, straight = trained("on", *keys, "train.log_every=2", "guard.max_rollbacks=1"), trained("straight", *keys)
    shutil.rmtree(folder / "checkpoints" / "step-00000024")
    before = load(folder / "recipe.toml").train
    here = f"run.dir={folder.parent}", "run.name=on"
    assert train(recipe_file, *here) == 0
    assert weights_hash(folder) == weights_hash(straight)
    after = load(folder / "recipe.toml")
    assert (
        after.train.changed(log_every=2) == before
        and after.guard.max_rollbacks == load(recipe_file).guard.max_rollbacks
    )
    assert train(recipe_file, *here, "train.optimizer.weight_decay=0.2") == 2
    assert load(folder / "recipe.toml") == after


@pytest.mark.parametrize(
    ("kind", "changed", "checkpoints", "decision"),
    [
        ("cosine", {"steps": 40, "seed": 5}, [], Fresh()),
        ("cosine", {"steps": 24, "seed": 3}, [8, 16], Resume(16)),
        ("constant", {"steps": 40, "seed": 3}, [8, 24], Extend(24)),
        ("wsd", {"steps": 40, "seed": 3}, [8, 24], Extend(19)),
        ("constant", {"steps": 20, "seed": 3}, [16], "train.steps"),
        ("cosine", {"steps": 40, "seed": 3}, [16], "train.steps"),
        ("constant", {"steps": 24, "seed": 5}, [16], ""),
    ],
)
def test_resume_extend_or_reject_follows_from_recipe_and_checkpoints(
    recipe_file: Path, kind: str, changed: dict[str, int], checkpoints: list[int], decision: Any
) -> None:
    stored = recipe_defaults.resolve(load(recipe_file, [f"train.schedule.kind={kind}"]), 400)
    requested = stored.changed(train={"steps": changed["steps"]}, run={"seed": changed["seed"]})
    decided = decide(stored, requested, checkpoints)
    assert decided == decision or (isinstance(decided, Refuse) and decided.key == decision)
    assert decide(None, requested, checkpoints) == (Resume(checkpoints[-1]) if checkpoints else Fresh())


def test_the_table_of_changeable_keys_has_only_existing_keys() -> None:
    assert {*MAY_CHANGE, *EXTENDS} <= keys().keys()


def test_a_key_is_not_confused_with_one_that_has_it_as_prefix(recipe_file: Path) -> None:
    recipe = load(recipe_file)
    other = recipe.changed(tokens={"seed": 5, "workers": 3}, train={"steps": 25, "log_every": 7}, run={"name": "other"})
    assert [line.partition(":")[0] for line in resume_policy.changes(recipe, other)] == ["tokens.seed"]


def test_minutes_are_counted_at_the_pace_of_the_run(runs: Path, recipe_file: Path) -> None:
    from bessemer.workflow import extend

    folder = runs / "small"
    stored = recipe_defaults.resolve(load(recipe_file), 400)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": "train", "step": n, "step_seconds": 0.5}) + "\n" for n in range(1, 25))
    )
    requested = load(recipe_file, ["train.minutes=1"])
    assert requested.train.steps is None, "an override takes the place of what the recipe has"
    # 58.8 s, since 2% are for saving.
    assert extend._steps_of_minutes(requested, stored, RunDirectory(folder), 0) == 117
    again = load(recipe_file, ["train.minutes=1", "train.steps=24"])
    assert extend._steps_of_minutes(again, stored, RunDirectory(folder), 60) is None
    assert extend._steps_of_minutes(requested, again, RunDirectory(folder), 60) == 24


def test_a_run_without_a_checkpoint_before_the_decay_cannot_be_extended(trained: Any) -> None:
    folder = trained("on", *WSD)
    shutil.rmtree(folder / "checkpoints" / "step-00000018")
    assert train(folder, "train.steps=48") == 2
    assert steps(folder) == [24]


def test_a_run_with_max_epochs_cannot_be_extended(trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained("on", CONSTANT, "corpus.sources.code.max_epochs=0.5")
    assert train(folder, "train.steps=30") == 2
    assert "max_epochs" in capsys.readouterr().err and steps(folder)[-1] == 24


def test_a_trained_run_without_checkpoints_does_not_restart(trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained("on")
    before = (folder / "metrics.jsonl").read_text()
    for step in steps(folder):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")
    assert train(folder) == 2
    assert str(folder / "checkpoints") in capsys.readouterr().err
    shutil.rmtree(folder / "checkpoints")
    assert train(folder, command="evaluate") == 2
    assert "no checkpoint" in capsys.readouterr().err
    assert train(folder, "train.steps=30") == 2
    assert (folder / "metrics.jsonl").read_text() == before
