"""`bessemer ladder`, whole: what it writes, that a stop anywhere changes nothing, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.ladder.summary import sentences
from bessemer.run.files import read_json

pytestmark = pytest.mark.long

SMALL = ["--budget", "2.6e10", "--rungs", "5", "--seeds", "2"]


def ladder(wide: Path, *options: str) -> int:
    return run_command(["ladder", str(wide / "wide.toml"), *options])


def plain(folder: Path) -> dict[str, Any]:
    """ladder.json without what the clock said and where it lies."""
    found: dict[str, Any] = read_json(folder / "ladder.json")
    for rung in found["rungs"]:
        rung.pop("seconds")
    return {key: value for key, value in found.items() if key not in ("folder", "predicted_seconds")}


@pytest.fixture(scope="module")
def whole(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ladder that nothing stopped, in a folder of its own."""
    from bessemer.ladder import runs

    folder = tmp_path_factory.mktemp("whole") / "ladder"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "PROBE_SECONDS", 0.0)
        patch.setattr(runs, "MEASURE_SECONDS", 0.0)
        assert ladder(made, *SMALL, "--folder", str(folder)) == 0
    return folder


def test_what_a_ladder_holds(whole: Path) -> None:
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


def test_a_second_call_trains_nothing_and_finds_the_same(whole: Path, made: Path) -> None:
    before, when = plain(whole), {path: path.stat().st_mtime_ns for path in whole.glob("runs/*/metrics.jsonl")}
    assert ladder(made, *SMALL, "--folder", str(whole)) == 0
    assert plain(whole) == before
    assert {path: path.stat().st_mtime_ns for path in whole.glob("runs/*/metrics.jsonl")} == when


def test_stopped_between_and_inside_rungs_it_ends_the_same(
    whole: Path, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal inside a rung exits 75 with that step saved; a kill inside a rung loses what came after its checkpoint; one
    between rungs nothing."""
    from bessemer.train.loop import StopSignal

    steps = [0]

    def asked_at(step: int, does: Any) -> Any:
        def asked(self: StopSignal) -> str | None:
            steps[0] += 1
            return does() if steps[0] == step else None

        return asked

    def dies() -> None:
        raise RuntimeError("killed")

    folder = wide / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "received", asked_at(25, lambda: "SIGTERM"))
        assert ladder(wide, *SMALL, "--folder", str(folder)) == 75
    assert not (folder / "ladder.json").exists()
    first = next((folder / "runs").iterdir())
    assert (first / "checkpoints" / "latest").exists()
    steps[0] = 0
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "received", asked_at(150, dies))
        with pytest.raises(RuntimeError, match="killed"):
            ladder(wide, *SMALL, "--folder", str(folder))
    from bessemer.ladder import runs

    trained = runs._trained

    def between(*given: Any) -> Any:
        done = trained(*given)
        raise KeyboardInterrupt
        return done

    with monkeypatch.context() as patch:
        patch.setattr(runs, "_trained", between)
        assert ladder(wide, *SMALL, "--folder", str(folder)) == 75
    assert ladder(wide, *SMALL, "--folder", str(folder)) == 0
    assert plain(folder) == plain(whole)


def test_isoflop_says_which_size_is_best(
    wide: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command around runs whose losses are a law's, in place of training: the law comes back."""
    from bessemer.ladder import runs
    from bessemer.model.huggingface.config import model_config
    from bessemer.recipe import Recipe
    from tests.ladder.laws import Law

    law = Law(2.0, (60.0, 90.0), (0.4, 0.5))

    def by_law(made: list[tuple[str, Recipe]], tokens: Path) -> dict[str, runs.Score]:
        found = {}
        for name, recipe in made:
            size, steps = model_config(recipe, 400).matrix_parameters, recipe.train.steps
            assert steps is not None and recipe.train.global_batch_tokens is not None
            loss = float(law.loss(size, steps * recipe.train.global_batch_tokens))
            found[name] = runs.Score(loss, {"prose": loss, "code": loss}, 1.0)
        return found

    monkeypatch.setattr(runs, "train_all", by_law)
    longer = ["--set", "train.steps=8000"]
    given = ["--design", "isoflop", "--rungs", "10", "--budget", "3e11", "--seeds", "1", "--json", *longer]
    assert ladder(wide, *given) == 0
    found = json.loads(capsys.readouterr().out)
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
    assert ladder(wide, "--budget", "4e11", *longer) == 1, "a ladder of another design has its own folder"
    assert "cannot be compared with new ones" in capsys.readouterr().err


def test_rungs_of_an_earlier_budget_count_too(
    wide: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bessemer.ladder import runs
    from bessemer.recipe import Recipe
    from bessemer.run.directory import RunDirectory

    done: dict[str, runs.Score] = {}

    def trained(made: list[tuple[str, Recipe]], tokens: Path) -> dict[str, runs.Score]:
        for name, recipe in made:
            loss = 2.0 + 40.0 / (recipe.train.steps or 1) ** 0.5
            done[name] = runs.Score(loss, {"prose": loss, "code": loss}, 1.0)
        return {name: done[name] for name, _ in made}

    def scored(run: RunDirectory, steps: int) -> runs.Score | None:
        return done.get(run.path.name)

    monkeypatch.setattr(runs, "train_all", trained)
    monkeypatch.setattr(runs, "score", scored)
    assert ladder(wide, *SMALL, "--json") == 0
    first = {rung["name"] for rung in json.loads(capsys.readouterr().out)["rungs"]}
    assert ladder(wide, "--budget", "6e10", "--rungs", "6", "--json") == 0
    second = {rung["name"] for rung in json.loads(capsys.readouterr().out)["rungs"]}
    assert first < second and len(second) > 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rungs", "1"], "--rungs 1: a ratio ladder needs 5 rungs"),
        (["--budget", "1e7"], "too small; 6 rungs"),
        (["--budget", "soon"], "give a time as 5min"),
        (["--ratio", "0"], "above 0"),
        (["--rungs", "60", "--budget", "1e12"], "no room for 60 smaller rungs"),
        (["--seeds", "0"], "--seeds 0: of each of the smallest rungs"),
        (["--mixture", "--seeds", "2"], "leave out --design, --ratio and --seeds"),
        (["--target", "code"], "belong to --mixture"),
        (["--set", "train.objective=classify", "--set", "corpus.sources.prose.label=a", "--set",
          "corpus.sources.code.label=b"], "a classifier's loss"),
        (["--set", "train.start=elsewhere"], "train.start gives the weights"),
    ],
)  # fmt: skip
def test_wrong_input_is_told(options: list[str], words: str, wide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ladder(wide, *options) == 2
    assert words in capsys.readouterr().err
