"""A run that is given minutes follows its own pace: what it decides is recorded, and a resumed run keeps to it bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.guard import goodput
from bessemer.recipe import Recipe, dump, load, parse
from bessemer.run import RunFolder, read_json_lines, write_atomic
from bessemer.train import horizon as horizons
from bessemer.train import loop, session
from bessemer.train import metrics as step_rates
from bessemer.train.learning_rate import learning_rate_share
from bessemer.train.measure import RunTiming
from bessemer.train.state import Saver
from bessemer.train.trainer import Trainer
from tests.choose import long_but
from tests.newest import weights_hash

PLANNED = 0.01  # seconds that a step is said to take
MINUTES = 0.02


def timing(recipe: Recipe, *more: Any) -> RunTiming:
    """What the plan is told: validation at a third of a step's time a token, a checkpoint a tenth of a step."""
    return RunTiming(PLANNED, PLANNED / 3 / (recipe.train.global_batch_tokens or 1), PLANNED / 10, 2)


@pytest.fixture
def trained(runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train a copy of the prepared run for MINUTES, on a clock by which each step takes as long as `seconds` says."""
    monkeypatch.setattr("bessemer.train.measure.time_run", timing)
    text = recipe_file.read_text().replace("steps = 24\n", f"minutes = {MINUTES}\n").replace("every = 8", "every = 5")
    text = text.replace("layers = 2", "layers = 1").replace(
        "micro_batch = 4", "micro_batch = 8"
    )  # the clock is none of theirs
    (runs.parent / "paced.toml").write_text(text)
    clock = {"now": 0.0}
    update = Trainer.update

    def timed(self: Trainer, step: int, *more: Any) -> float:
        clock["now"] += clock["later"] if step >= clock["changes_at"] else clock["seconds"]
        return update(self, step, *more)

    monkeypatch.setattr(Trainer, "update", timed)
    validate, save = loop.validate, Saver._write

    def validated(*arguments: Any) -> Any:
        clock["now"] += clock["between"]
        return validate(*arguments)

    def saved(self: Saver, state: Any) -> None:
        clock["now"] += clock["between"] / 10
        save(self, state)

    monkeypatch.setattr(loop, "validate", validated)
    monkeypatch.setattr(Saver, "_write", saved)
    for module in (horizons, loop, session, step_rates, goodput):
        monkeypatch.setattr(module, "perf_counter", lambda: clock["now"])

    def make(name: str, seconds: float, *overrides: str, between: float = 0.0, **changed: float) -> Path:
        """between: seconds of a validation; a checkpoint takes a tenth of it. changed: from step `changes_at` on a step takes
        `later` seconds."""
        clock.update({"between": between, "changes_at": 10**9, "later": seconds, **changed})
        if not (runs / name).exists():
            shutil.copytree(runs / "small", runs / name)
        clock["seconds"] = seconds
        sets = (f'run.dir="{runs}"', f"run.name={name}", "checkpoint.keep=100", *overrides)
        arguments = [part for given in sets for part in ("--set", given)]
        assert run_command(["train", str(runs.parent / "paced.toml"), *arguments]) == 0
        return runs / name

    return make


def rewind(folder: Path, step: int) -> None:
    """Leave a finished run as one that was killed after its checkpoint of `step`."""
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    write_atomic(folder / "checkpoints" / "latest", f"step-{step:08d}")
    (folder / "mixture.json").unlink()


def rates(folder: Path) -> dict[int, float]:
    rows = read_json_lines(folder / "metrics.jsonl")
    return {row["step"]: row["learning_rate"] for row in rows if row["kind"] == "train"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "decisions", "seconds"),
    [("wsd", 2, 0.02)],
)
def test_the_steps_follow_the_rate_and_so_does_a_resumed_run(
    trained: Any, kind: str, decisions: int, seconds: float
) -> None:
    kinds = (f"train.schedule.kind={kind}", "train.schedule.decay_share=0.5")
    whole = trained("whole", seconds, *kinds)
    run = RunFolder(whole)
    train, wanted = load(run.recipe).train, int(60 * MINUTES / seconds)
    assert 0.88 * wanted <= (train.steps or 0) <= wanted and len(train.revised) >= decisions
    assert train.revised[0].planned == json.loads(run.plan.read_text())["steps"]
    assert [row["step"] for row in read_json_lines(run.metrics) if row["kind"] == "steps"] == [
        r.at for r in train.revised
    ]
    # The rate of each step is that of the number of steps the run had then.
    peak = train.optimizer.learning_rate or 0.0
    for step, rate in rates(whole).items():
        had = next((one.planned for one in train.revised if step - 1 < one.at), train.steps)
        assert rate == peak * learning_rate_share(train.schedule, step - 1, had or 0)

    # Killed before the decision and after it, at another pace: the recorded decision holds, and the bits are the same.
    for at in (train.revised[0].at, train.revised[len(train.revised) // 2].at):
        left = at // 5 * 5 + (5 if at > train.revised[0].at else 0)
        again = whole.parent / f"again-{left}"
        shutil.copytree(whole, again)
        rewind(again, left)
        trained(again.name, 7 * seconds, *kinds)
        assert load(again / "recipe.toml").train == train
        assert weights_hash(again) == weights_hash(whole) and rates(again) == rates(whole)


def test_deferred_steps_are_revised_alike(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a step is revised when the passes of the next are enqueued, and before its update is."""
    kinds = ("train.schedule.kind=wsd", "train.schedule.decay_share=0.5", "checkpoint.every=40")
    changed = {"changes_at": 40, "later": 0.03}
    whole = trained("whole", 0.01, *kinds, **changed)
    monkeypatch.setattr("bessemer.train.trainer.DEFERRING", ("cpu",))
    deferred = trained("deferred", 0.01, *kinds, **changed)
    one, other = load(whole / "recipe.toml").train, load(deferred / "recipe.toml").train
    assert other == one and len(one.revised) > 1
    assert weights_hash(deferred) == weights_hash(whole) and rates(deferred) == rates(whole)


@pytest.mark.long
def test_a_machine_that_slows_down_leaves_the_decay_its_share(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times slower from step 30 on, after the first decision: without a look at the clock nearly nothing is left."""
    update = Trainer.update

    def slower(self: Trainer, step: int, norm: float, factor: float, *skip: Any) -> float:
        return update(self, step, update(self, step, norm, factor) if step > 30 else norm, factor)

    monkeypatch.setattr(Trainer, "update", slower)
    kinds = ("train.schedule.kind=wsd", "train.schedule.decay_share=0.5", "train.schedule.final_share=0.0")
    whole = trained("slower", 0.01, *kinds)
    train = load(whole / "recipe.toml").train
    start, steps = train.schedule.decay_at, train.steps
    assert start is not None and steps is not None and 0.3 * steps < start < 0.7 * steps
    found = rates(whole)
    assert found[start] == found[start - 1] == max(found.values())
    assert found[start + 1] > 0.7 * found[start]  # no fall from the peak to nearly nothing


@pytest.mark.long
@pytest.mark.parametrize("later", [0.005])
def test_within_the_decay_the_steps_follow_another_pace(trained: Any, later: float) -> None:
    """The decay begins where it began, a resumed run takes the same way, and a longer one does the decay again."""
    kinds = ("train.schedule.kind=wsd", "train.schedule.decay_share=0.5")
    whole = trained("late", 0.02, *kinds, changes_at=36, later=later)
    run = RunFolder(whole)
    train = load(run.recipe).train
    start = train.schedule.decay_at
    assert start is not None and start < train.revised[-1].at and len(train.revised) > 2
    told = [row for row in read_json_lines(run.metrics) if row["kind"] == "time"][-1]
    assert told["seconds"] == pytest.approx(60 * MINUTES, rel=0.1)
    peak, found = train.optimizer.learning_rate or 0.0, rates(whole)
    assert found[start] == peak > found[start + 1] and found[train.steps] == pytest.approx(0.1 * peak)

    again = whole.parent / "again"
    shutil.copytree(whole, again)
    rewind(again, start // 5 * 5 + 5)
    trained("again", 0.1, *kinds)
    assert load(again / "recipe.toml").train == train
    assert weights_hash(again) == weights_hash(whole) and rates(again) == found

    trained("late", 0.02, *kinds, f"train.steps={2 * (train.steps or 0)}")
    longer = load(run.recipe).train
    assert longer.schedule.decay_at is None
    assert longer.revised == tuple(one for one in train.revised if one.at < start)
    assert {step: rate for step, rate in rates(whole).items() if step <= start} == {
        step: rate for step, rate in found.items() if step <= start
    }
    assert rates(whole)[start + 1] == peak


@pytest.mark.long
def test_a_killed_run_keeps_to_its_minutes(trained: Any) -> None:
    """It goes on at a third of its pace after a third of its steps: no decision is recorded for what comes then."""
    kinds = ("train.schedule.kind=wsd", "train.schedule.decay_share=0.5")
    whole = trained("killed", 0.02, *kinds)
    recipe = load(whole / "recipe.toml")
    kept = [one for one in recipe.train.revised if one.at <= 20]
    later = recipe.train.revised[len(kept)]
    train = recipe.train.model_copy(
        update={
            "revised": tuple(kept), "steps": later.planned,
            "schedule": recipe.train.schedule.model_copy(update={"decay_at": None}),
        }
    )  # fmt: skip
    write_atomic(whole / "recipe.toml", dump(recipe.model_copy(update={"train": train})))
    rewind(whole, 20)
    trained("killed", 0.06, *kinds)
    # 20 steps of 0.06 s, as the resumed run must suppose, and the rest in what is left of 1.2 s: none too many.
    assert (load(whole / "recipe.toml").train.steps or 0) <= 0.5 * (recipe.train.steps or 0)


def test_a_run_on_time_and_one_that_is_given_steps_are_left_alone(trained: Any) -> None:
    on_time = RunFolder(trained("on-time", PLANNED, "checkpoint.every=40", between=PLANNED))
    assert abs((load(on_time.recipe).train.steps or 0) - json.loads(on_time.plan.read_text())["steps"]) <= 6
    given = load(RunFolder(trained("given", 0.1, "train.steps=30")).recipe).train
    assert given.steps == 30 and given.revised == ()


@pytest.mark.parametrize("seconds", long_but([0.005, 0.04], 0.04))
def test_validations_and_checkpoints_are_within_the_minutes(trained: Any, seconds: float) -> None:
    """Also where a validation takes much longer than its tokens let expect: that is measured and counted."""
    run = RunFolder(trained("between", seconds, "train.schedule.kind=wsd", between=0.06))
    told = [row for row in read_json_lines(run.metrics) if row["kind"] == "time"][-1]
    assert told["seconds"] == pytest.approx(60 * MINUTES, rel=0.1)
    validations = sum(row["kind"] == "validation" for row in read_json_lines(run.metrics))
    assert told["validation"] == pytest.approx(0.06 * validations) and told["saving"] > 0.0


def test_the_text_is_not_read_more_often_than_the_recipe_allows(trained: Any) -> None:
    folder = trained("capped", 0.001, "train.max_epochs=5.0", "checkpoint.every=1000")
    recipe, rows = load(folder / "recipe.toml"), read_json_lines(folder / "metrics.jsonl")
    read = max(row["tokens"] for row in rows if row["kind"] == "train")
    manifest = json.loads((folder / "tokens" / "manifest.json").read_text())
    unique = sum(source["train"]["tokens"] for source in manifest["sources"].values())
    assert 4.9 * unique < read < 5.1 * unique + (recipe.train.global_batch_tokens or 0)


def test_steps_at_a_step_are_those_the_run_had() -> None:
    text = '[run]\nname = "x"\n[train]\nsteps = 50\nminutes = 1.0\nrevised = [{at = 10, planned = 90}, {at = 30, planned = 70}]\n'
    train = parse(text, "x").train
    assert [train.steps_at(step) for step in (0, 9, 10, 29, 30, 49)] == [90, 90, 70, 70, 50, 50]
