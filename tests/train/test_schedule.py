import math
from pathlib import Path

import pytest

from bessemer.checkpoint.protocol import checkpoint_steps
from bessemer.cli import run_command
from bessemer.recipe import Optimizer
from bessemer.recipe.resolved import ResolvedSchedule as Schedule
from bessemer.recipe.resolved import load_resolved
from bessemer.train.schedule import batch_factor, learning_rate_share


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
