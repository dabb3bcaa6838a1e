import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from bessemer.checkpoint.protocol import checkpoint_steps
from bessemer.cli import run_command
from bessemer.guard import goodput
from bessemer.recipe import Optimizer
from bessemer.recipe.resolved import ResolvedSchedule as Schedule
from bessemer.recipe.resolved import load_resolved
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_lines, write_atomic
from bessemer.train import loop, setup
from bessemer.train import metrics as step_rates
from bessemer.train import run_length as horizons
from bessemer.train.schedule import batch_factor, learning_rate_share
from bessemer.train.state import Saver
from bessemer.train.trainer import Trainer
from tests.newest import training_result, weights_hash


def shares(schedule: Schedule, steps: int) -> list[float]:
    return [learning_rate_share(schedule, step, steps) for step in range(steps)]


def test_cosine_by_hand() -> None:
    found = shares(Schedule(kind="cosine", warmup_steps=4, final_share=0.1), 24)
    assert found[:4] == pytest.approx([1 / 5, 2 / 5, 3 / 5, 4 / 5])
    assert found[4:] == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * k / 19)) / 2 for k in range(20)])
    assert found[4] == 1.0, "the peak is reached"
    assert found[-1] == pytest.approx(0.1)


def test_wsd_by_hand() -> None:
    found = shares(Schedule(kind="wsd", warmup_steps=2, decay_share=0.25, final_share=0.0), 20)
    assert found[:2] == pytest.approx([1 / 3, 2 / 3])
    assert found[2:15] == [1.0] * 13
    assert found[15:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3, 100])
def test_any_length_ends_at_the_final_share(kind: str, steps: int) -> None:
    found = shares(Schedule(kind=kind, warmup_steps=0, final_share=0.2), steps)
    assert found[-1] == pytest.approx(0.2)
    assert all(0.2 - 1e-9 <= share <= 1.0 for share in found)


def test_linear_by_hand() -> None:
    found = shares(Schedule(kind="linear", warmup_steps=2, final_share=0.2), 10)
    assert found[:2] == pytest.approx([1 / 3, 2 / 3])
    assert found[2:] == pytest.approx([1 - 0.8 * k / 7 for k in range(8)])
    assert found[2] == 1.0, "the peak is reached"


def test_inverse_sqrt_by_hand() -> None:
    found = shares(Schedule(kind="inverse_sqrt", warmup_steps=4, final_share=0.3), 100)
    assert found[:5] == pytest.approx([1 / 5, 2 / 5, 3 / 5, 4 / 5, 1.0])
    assert found[19] == pytest.approx(0.5)  # four times the steps, half the rate
    assert found[44] == pytest.approx(1 / 3)
    assert found[60:] == pytest.approx([0.3] * 40)


def test_constant_stays() -> None:
    assert shares(Schedule(kind="constant", warmup_steps=1, final_share=0.1), 5) == pytest.approx([1 / 2, 1, 1, 1, 1])


def test_the_rate_follows_the_batch_as_asked() -> None:
    def factor(kind: str, tokens: int) -> float:
        return batch_factor(Optimizer(batch_scaling=kind, reference_batch_tokens=1000), tokens)  # type: ignore[arg-type]

    assert [factor("linear", tokens) for tokens in (250, 1000, 4000)] == [0.25, 1.0, 4.0]
    assert [factor("sqrt", tokens) for tokens in (250, 1000, 4000)] == [0.5, 1.0, 2.0]
    assert factor("none", 4000) == 1.0


CODE = """
from bessemer.train.schedule import RateSchedule

class Half(RateSchedule):
    is_extendable = True
    share_of_peak: float = 0.5

    def share(self, update):
        return self.share_of_peak
"""


def train(recipe: Path, folder: Path, code: str, *sets: str) -> int:
    (folder / "mine.py").write_text(code)
    kind = f"train.schedule.kind={folder / 'mine.py'}:Half"
    values = (f"run.dir={folder / 'runs'}", kind, "train.steps=8", "checkpoint.every=8", *sets)
    return run_command(["train", str(recipe), *(part for value in values for part in ("--set", value))])


@pytest.mark.parametrize(
    ("code", "sets", "names"),
    [
        (CODE.replace("share(self, update)", "share(self)"), "", ["Half.share", "update"]),
        (CODE.replace("def share", "def rate"), "", ["Half", "share"]),
        (CODE, "train.schedule.settings.share=1", ["train.schedule.settings.share", "share_of_peak"]),
        (CODE, "train.schedule.settings.share_of_peak=x", ["train.schedule.settings.share_of_peak", "a number"]),
        (CODE, "train.schedule.kind=cosin", ["train.schedule.kind", "did you mean cosine?"]),
        (CODE, "train.schedule.kind=none.py:Half", ["train.schedule.kind", "none.py"]),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_used_is_one_error(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, sets: str, names: list[str]
) -> None:  # fmt: skip
    assert train(recipe_file, tmp_path, code, *filter(None, [sets])) == 2
    [said] = capsys.readouterr().err.strip().splitlines()
    assert all(name in said for name in names), said


@pytest.mark.parametrize(
    ("body", "what"), [("1 / 0", "ZeroDivisionError"), ("-1.0", "returned -1.0"), ("'much'", "TypeError")]
)
def test_a_schedule_that_fails_does_so_before_the_training(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, what: str
) -> None:
    assert train(recipe_file, tmp_path, CODE.replace("self.share_of_peak", body)) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path / 'mine.py'}" in said and "Half.share" in said and what in said
    assert not (tmp_path / "runs" / "small" / "metrics.jsonl").exists()


def test_settings_of_a_built_in_schedule(runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("--set", f"run.dir={runs}", "--set", "train.schedule.settings.a=1")
    assert run_command(["plan", str(recipe_file), *sets]) == 2
    assert "train.schedule: settings has no effect" in capsys.readouterr().err


def test_a_run_resumes_with_the_same_code_alone(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "small"
    assert train(recipe_file, tmp_path, CODE) == 0
    assert load_resolved(run / "recipe.toml").train.schedule.code is not None
    assert train(recipe_file, tmp_path, CODE + "\n", "train.steps=12") == 2
    assert "train.schedule.code" in capsys.readouterr().err
    assert train(recipe_file, tmp_path, CODE, "train.steps=12") == 0, "it is extendable"
    assert checkpoint_steps(run / "checkpoints")[-1] == 12
    (tmp_path / "mine.py").unlink()
    assert run_command(["report", str(run)]) == 0
    assert run_command(["evaluate", str(run)]) == 0


PLANNED = 0.01  # seconds that a step is planned to take
MINUTES = 0.02
WSD = "train.schedule.kind=wsd", "train.schedule.decay_share=0.5"


@pytest.fixture
def trained(runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train a copy of the prepared run for MINUTES, on a clock by which each step takes as long as `seconds` says."""
    monkeypatch.setattr("bessemer.train.measure.step_seconds", lambda *arguments: PLANNED)
    text = recipe_file.read_text().replace("steps = 24\n", f"minutes = {MINUTES}\n").replace("every = 8", "every = 5")
    text = text.replace("layers = 2", "layers = 1").replace("micro_batch = 4", "micro_batch = 8")
    (runs.parent / "paced.toml").write_text(text)
    clock = {"now": 0.0}
    update, validate, save = Trainer.update, loop.validate, Saver._write

    def timed(self: Trainer, *more: Any) -> float:
        clock["now"] += clock["seconds"]
        return update(self, *more)

    def validated(*arguments: Any) -> Any:
        clock["now"] += clock["between"]
        return validate(*arguments)

    def saved(self: Saver, state: Any) -> None:
        clock["now"] += clock["between"] / 10
        save(self, state)

    monkeypatch.setattr(Trainer, "update", timed)
    monkeypatch.setattr(loop, "validate", validated)
    monkeypatch.setattr(Saver, "_write", saved)
    for module in (horizons, loop, setup, step_rates, goodput):
        monkeypatch.setattr(module, "perf_counter", lambda: clock["now"])

    def make(name: str, seconds: float, *overrides: str, between: float = 0.0) -> Path:
        """between: seconds of a validation; a checkpoint takes a tenth of it."""
        clock.update({"between": between, "seconds": seconds})
        if not (runs / name).exists():
            shutil.copytree(runs / "small", runs / name)
        sets = (f'run.dir="{runs}"', f"run.name={name}", "checkpoint.keep=100", "report.tensorboard=false", *overrides)
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


def test_the_decay_follows_the_clock_and_a_resumed_run_the_recipe(trained: Any) -> None:
    """Steps of twice the planned time: the decay begins earlier, and keeps its share."""
    seconds = 2 * PLANNED
    whole = trained("whole", seconds, *WSD)
    run = RunDirectory(whole)
    train = load_resolved(run.recipe).train
    start, steps = train.schedule.decay_at, train.steps
    assert start is not None
    assert 60 * MINUTES * 0.93 <= steps * seconds <= 60 * MINUTES and start == pytest.approx(steps / 2, abs=2)
    assert [row["steps"] for row in read_json_lines(run.metrics) if row["kind"] == "steps"] == [steps]
    assert json.loads(run.plan.read_text())["steps"] == pytest.approx(60 * MINUTES / PLANNED, rel=0.15)
    peak, found = train.optimizer.learning_rate, rates(whole)
    for step, rate in found.items():
        assert rate == peak * learning_rate_share(train.schedule, step - 1, steps)
    assert found[start] == peak > found[start + 1]

    # Killed before the decay and within it, and resumed at another pace: what was recorded holds, and the bits are the same.
    for left in (start // 5 * 5 - 5, start // 5 * 5 + 5):
        again = whole.parent / f"again-{left}"
        shutil.copytree(whole, again)
        rewind(again, left)
        trained(again.name, 7 * seconds, *WSD)
        assert load_resolved(again / "recipe.toml").train == train
        assert training_result(again) == training_result(whole)


def test_a_run_that_was_killed_before_its_decay_keeps_to_its_minutes(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is resumed at a third of its pace, before anything was recorded."""
    with monkeypatch.context() as killed:
        killed.setattr(horizons.Horizon, "begin_decay", lambda self, step: step == 31 and pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            trained("killed", PLANNED, *WSD)
    folder = trained("killed", 3 * PLANNED, *WSD)
    steps = load_resolved(folder / "recipe.toml").train.steps
    # 30 steps at the pace that the resumed run measures, and the rest in what is left.
    assert steps == pytest.approx(60 * MINUTES / (3 * PLANNED), abs=3)


def test_the_decay_begins_at_the_same_step_however_seldom_steps_are_logged(trained: Any) -> None:
    kinds = (*WSD, "checkpoint.every=40")
    whole, seldom = trained("whole", 0.02, *kinds), trained("seldom", 0.02, *kinds, "train.log_every=10")
    one, other = load_resolved(whole / "recipe.toml").train, load_resolved(seldom / "recipe.toml").train
    assert other.steps == one.steps and other.schedule == one.schedule and one.schedule.decay_at is not None
    assert weights_hash(seldom) == weights_hash(whole) and rates(seldom).items() <= rates(whole).items()


def test_other_schedules_and_given_steps_keep_the_plan(trained: Any) -> None:
    run = RunDirectory(trained("cosine", 0.1, "checkpoint.every=200"))
    train = load_resolved(run.recipe).train
    assert train.steps == json.loads(run.plan.read_text())["steps"] > 60 * MINUTES / 0.1
    given = load_resolved(RunDirectory(trained("given", 0.1, *WSD, "train.steps=30")).recipe).train
    assert given.steps == 30 and given.schedule.decay_at is None


def test_validations_and_checkpoints_are_within_the_minutes(trained: Any) -> None:
    """Also where a validation takes much longer than its tokens let expect: that is measured and counted."""
    run = RunDirectory(trained("between", 0.04, "train.schedule.kind=wsd", between=0.06))
    told = [row for row in read_json_lines(run.metrics) if row["kind"] == "time"][-1]
    assert told["seconds"] == pytest.approx(60 * MINUTES, rel=0.1)
    validations = sum(row["kind"] == "validation" for row in read_json_lines(run.metrics))
    assert told["validation"] == pytest.approx(0.06 * validations) and told["saving"] > 0.0


def test_the_text_is_not_read_more_often_than_the_recipe_allows(trained: Any) -> None:
    folder = trained("capped", 0.001, *WSD, "train.max_epochs=5.0", "checkpoint.every=1000")
    recipe, rows = load_resolved(folder / "recipe.toml"), read_json_lines(folder / "metrics.jsonl")
    read = max(row["tokens"] for row in rows if row["kind"] == "train")
    manifest = json.loads((folder / "tokens" / "manifest.json").read_text())
    unique = sum(source["train"]["tokens"] for source in manifest["sources"].values())
    assert 4.9 * unique < read < 5.1 * unique + (recipe.train.global_batch_tokens or 0)
