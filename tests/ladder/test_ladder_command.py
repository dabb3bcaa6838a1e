"""`bessemer ladder` end to end: its output, stops that change nothing, and errors."""

import json
import os
import signal
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.common import interrupt
from bessemer.common.errors import BessemerError
from bessemer.ladder import command
from bessemer.ladder.runs import Train
from bessemer.ladder.summary import sentences
from bessemer.model.huggingface.config import model_config
from bessemer.recipe import Recipe, load
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json
from bessemer.workflow import stages
from bessemer.workflow.prepare import prepare
from bessemer.workflow.session import Session
from tests.ladder.laws import Law

pytestmark = pytest.mark.long

SMALL = ["--budget", "2.6e10", "--rungs", "5", "--seeds", "2"]


def ladder(wide: Path, *options: str) -> int:
    return run_command(["ladder", str(wide / "wide.toml"), *options])


def plain(folder: Path) -> dict[str, Any]:
    """Return ladder.json without times and paths."""
    found: dict[str, Any] = read_json(folder / "ladder.json")
    for rung in found["rungs"]:
        rung.pop("seconds")
    return {key: value for key, value in found.items() if key not in ("folder", "predicted_seconds")}


@pytest.fixture(scope="module")
def whole(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ladder that nothing stopped, in its own folder."""
    folder = tmp_path_factory.mktemp("whole") / "ladder"
    assert ladder(made, *SMALL, "--folder", str(folder)) == 0
    return folder


def test_contents_of_a_ladder(whole: Path) -> None:
    found = read_json(whole / "ladder.json")
    assert [rung["seed"] for rung in found["rungs"]] == [0, 0, 0, 0, 0, 1, 1, 1]
    for rung, again in zip(found["rungs"], found["rungs"][5:], strict=False):
        assert again["name"] == f"{rung['name']}-seed1" and again["flops"] == rung["flops"]
        assert again["loss"] != rung["loss"], "another seed starts elsewhere"
    for rung in found["rungs"]:
        ratio = rung["tokens"] / rung["parameters"]
        assert ratio == pytest.approx(found["planned"]["tokens_per_parameter"], rel=0.02)
        assert rung["flops"] == pytest.approx(rung["tokens"] * rung["flops_per_token"])
        run = whole / "runs" / rung["name"]
        assert (run / "recipe.toml").exists() and (run / "tokens").is_symlink()
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        last = [row for row in rows if row["kind"] == "validation"][-1]
        assert last["loss"] == rung["loss"] and set(last["loss_by_source"]) == {"prose", "code"}
    assert sum(rung["flops"] for rung in found["rungs"]) <= 2.6e10
    losses = [rung["loss"] for rung in found["rungs"][:5]]
    assert losses[-1] < losses[0]
    assert set(found["fit"]["numbers"]) == {"E", "K", "gamma"}
    said = found["prediction"]
    assert said["low"] <= said["value"] <= said["high"] < losses[0]
    left = found["left_out"]
    assert left["name"] == found["rungs"][4]["name"] and left["measured"] == losses[-1]
    assert left["error"] == pytest.approx(left["predicted"]["value"] / losses[-1] - 1)
    assert left["covered"] == (left["predicted"]["low"] <= losses[-1] <= left["predicted"]["high"])
    assert found["answers"] == sentences(found) and len(found["rows"]) == len(found["rungs"])


def test_a_second_call_trains_nothing_and_gives_the_same_result(whole: Path, made: Path) -> None:
    before, when = plain(whole), {path: path.stat().st_mtime_ns for path in whole.glob("runs/*/metrics.jsonl")}
    assert ladder(made, *SMALL, "--folder", str(whole)) == 0
    assert plain(whole) == before
    assert {path: path.stat().st_mtime_ns for path in whole.glob("runs/*/metrics.jsonl")} == when


def call(wide: Path, train: Train, *sets: str, **options: Any) -> dict[str, Any]:
    """Call the ladder of wide.toml with a training function of the test."""
    interrupt.listen()
    recipe = load(wide / "wide.toml", list(sets))
    session = Session(recipe, RunDirectory(recipe.run.folder))
    return command.ladder(session.recipe, session.run, lambda: stages.planned_recipe(session), train, **options)


def write_result(run: RunDirectory, steps: int, loss: float) -> None:
    """Write the files of a trained run that a ladder reads."""
    (run.checkpoints / f"step-{steps:08d}").mkdir(parents=True)
    rows = [
        {"kind": "train", "step": steps, "step_seconds": 1.0 / steps},
        {"kind": "validation", "step": steps, "loss": loss, "loss_by_source": {"prose": loss, "code": loss}},
    ]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_ladder_stopped_between_or_inside_rungs_gives_the_same_result(whole: Path, wide: Path) -> None:
    """A signal inside a rung exits with 75 and its steps saved; a stop between two rungs loses nothing."""
    folder = wide / "stopped"

    def signal_in_first_rung() -> None:
        while not list(folder.glob("runs/*/metrics.jsonl")):
            sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=signal_in_first_rung, daemon=True).start()
    assert ladder(wide, *SMALL, "--folder", str(folder)) == 75
    assert not (folder / "ladder.json").exists()
    first = next((folder / "runs").iterdir())
    assert (first / "checkpoints" / "latest").exists()

    def stopped_after_rung(recipe: Recipe, run: RunDirectory) -> None:
        session = Session(recipe, run)
        stages.train(session, prepare(session, 0.0))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(wide, stopped_after_rung, budget="2.6e10", rungs=5, seeds=2, folder=folder)
    assert ladder(wide, *SMALL, "--folder", str(folder)) == 0
    assert plain(folder) == plain(whole)


def test_isoflop_finds_the_best_size(wide: Path) -> None:
    """Runs whose losses follow a known law replace training: the fit recovers the law."""
    law = Law(2.0, (60.0, 90.0), (0.4, 0.5))

    def by_law(recipe: Recipe, run: RunDirectory) -> None:
        size, steps = model_config(recipe, 400).matrix_parameters, recipe.train.steps
        assert steps is not None and recipe.train.global_batch_tokens is not None
        write_result(run, steps, float(law.loss(size, steps * recipe.train.global_batch_tokens)))

    longer = "train.steps=8000"
    found = call(wide, by_law, longer, design="isoflop", rungs=10, budget="3e11", seeds=1)
    assert [rung["group"] for rung in found["rungs"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    for group in (0, 1, 2):
        spent = [rung["flops"] for rung in found["rungs"] if rung["group"] == group]
        assert max(spent) / min(spent) < 1.05, "one amount of compute"
    numbers = found["fit"]["numbers"]
    for name, true in (("E", 2.0), ("alpha", 0.4), ("beta", 0.5)):
        assert 0.5 * true < numbers[name]["value"] < 2 * true
    planned, said = found["planned"], found["prediction"]
    true = float(law.loss(planned["parameters"], planned["tokens"]))
    assert said["low"] < true < said["high"] and said["value"] == pytest.approx(true, rel=0.03), "the prior on E"
    assert abs(found["left_out"]["error"]) < 0.01 and found["left_out"]["covered"]
    best, each = found["optimum"], planned["flops"] / planned["tokens"] / planned["parameters"]
    size, tokens = best["parameters"]["value"], best["tokens"]["value"]
    assert size * tokens * each == pytest.approx(planned["flops"])
    for other in (0.8, 1.25):
        assert law.loss(size * other, tokens / other) > law.loss(size, tokens)
    report = Path(found["page"]).read_text()
    assert '<section id="ladder">' in report and '"id":"ladder-loss"' in report
    with pytest.raises(BessemerError, match="--folder"):  # another design has another folder
        call(wide, by_law, longer, budget="4e11")


def test_rungs_of_an_earlier_budget_count_too(wide: Path) -> None:
    def trained(recipe: Recipe, run: RunDirectory) -> None:
        steps = recipe.train.steps or 1
        write_result(run, steps, 2.0 + 40.0 / steps**0.5)

    first = {rung["name"] for rung in call(wide, trained, budget="2.6e10", rungs=5, seeds=2)["rungs"]}
    second = {rung["name"] for rung in call(wide, trained, budget="6e10", rungs=6)["rungs"]}
    assert first < second and len(second) > 6


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--rungs", "1"], "--rungs 1"),
        (["--budget", "1e7"], "--budget 1e+07 FLOPs"),
        (["--budget", "soon"], "--budget soon"),
        (["--ratio", "0"], "--ratio 0"),
        (["--rungs", "60", "--budget", "1e12"], "--rungs 60"),
        (["--seeds", "0"], "--seeds 0"),
        (["--set", "train.objective=classify", "--set", "corpus.sources.prose.label=a", "--set",
          "corpus.sources.code.label=b"], "train.objective"),
        (["--set", "train.start=elsewhere"], "train.start"),
    ],
)  # fmt: skip
def test_wrong_input_is_an_error(options: list[str], key: str, wide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ladder(wide, *options) == 2
    assert key in capsys.readouterr().err
