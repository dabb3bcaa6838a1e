"""Training longer than planned: exact where the schedule allows it, re-planned and said so where it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.recipe import load
from bessemer.run import RunFolder, read_json, read_json_lines, write_json
from bessemer.train.measure import RunTiming
from tests.newest import weights_hash

WSD = ("train.schedule.kind=wsd", "train.schedule.decay_share=0.25", "checkpoint.keep=1")


def train(recipe: Path, *overrides: str, flags: tuple[str, ...] = (), command: str = "train") -> int:
    return run_command([command, str(recipe), *(part for one in overrides for part in ("--set", one)), *flags])


def weights(folder: Path) -> tuple[str, list[tuple[int, float]]]:
    """The newest checkpoint's hash of the weights, and every step's loss."""
    rows = [row for row in read_json_lines(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "every step stands once"
    return weights_hash(folder), [(row["step"], row["loss"]) for row in rows]


def rates(folder: Path) -> list[float]:
    return [row["learning_rate"] for row in read_json_lines(folder / "metrics.jsonl") if row["kind"] == "train"]


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


@pytest.fixture
def trained(runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains the run under overrides, in a folder of its own over the same tokens; gives the folder."""
    monkeypatch.setattr("bessemer.train.measure.time_run", lambda *arguments: RunTiming(0.01, 0.0, 0.0, 2))

    def make(name: str, *overrides: str) -> Path:
        shutil.copytree(runs / "small", runs / name)
        assert train(recipe_file, f"run.dir={runs}", f"run.name={name}", *overrides) == 0
        return runs / name

    return make


def test_wsd_goes_on_from_before_its_decay_bit_for_bit(
    trained: Any, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, straight = trained("on", *WSD), trained("straight", *WSD, "train.steps=32")
    assert steps(folder) == [18, 24], "the checkpoint before the decay is kept beside the newest"
    before = weights(folder)
    capsys.readouterr()
    # By its folder: the recipe is the one that lies in it.
    assert train(folder, "train.steps=32") == 0
    said = capsys.readouterr().err
    assert "24 planned steps become 32, from the checkpoint of step 18" in said
    assert weights(folder) == weights(straight)
    assert rates(folder) == rates(straight)
    assert steps(folder) == steps(straight) == [24, 32]
    kept = folder / "previous-1"
    assert weights(kept) == before
    assert load(kept / "recipe.toml").train.steps == 24
    assert read_json(kept / "mixture.json")["samples"] == 24 * 8
    assert read_json(folder / "mixture.json") == read_json(straight / "mixture.json")
    # The recipe file with the new number of steps: nothing is left to do.
    again = f"run.dir={folder.parent}", "run.name=on", *WSD, "train.steps=32"
    assert train(recipe_file, *again) == 0
    assert not (folder / "previous-2").exists()


def test_nothing_is_promised_after_a_change_of_the_recipe(
    trained: Any, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained("on", *WSD)
    changed = f"run.dir={folder.parent}", "run.name=on", *WSD, "train.z_loss=0.1"
    assert train(recipe_file, *changed, "train.steps=32", flags=("--accept-changes",)) == 0
    capsys.readouterr()
    assert train(recipe_file, *changed, "train.steps=40") == 0
    said = capsys.readouterr().err
    assert "32 planned steps become 40" in said and "the weights will be those of a run" not in said


def test_the_checkpoint_before_the_decay_is_fetched_from_the_mirror(
    trained: Any, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = f"checkpoint.mirror={tmp_path / 'mirror'}"
    folder, straight = trained("on", *WSD, mirror), trained("straight", *WSD, "train.steps=32")
    shutil.rmtree(folder / "checkpoints")
    on = f"run.dir={folder.parent}", "run.name=on", *WSD, mirror
    assert train(recipe_file, *on, "train.steps=32") == 0
    said = capsys.readouterr().err
    assert "the checkpoint of step 18 was fetched again" in said and "from the checkpoint of step 18" in said
    assert weights(folder) == weights(straight)


def test_a_constant_rate_goes_on_bit_for_bit(trained: Any) -> None:
    kind = "train.schedule.kind=constant"
    folder, straight = trained("on", kind), trained("straight", kind, "train.steps=30")
    assert train(folder, f"train.tokens={30 * 256}") == 0
    assert weights(folder) == weights(straight)
    assert (folder / "previous-1" / "checkpoints" / "step-00000024").is_dir()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.fault(29)
def test_cosine_and_linear_are_planned_anew_from_where_they_stand(
    trained: Any, recipe_file: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    choice = f"train.schedule.kind={kind}", "train.schedule.warmup_steps=3"
    folder, straight = trained("on", *choice), trained("straight", *choice, "train.steps=40")
    before = weights(folder)[1]
    on = f"run.dir={folder.parent}", "run.name=on", *choice, "train.steps=40"
    assert train(recipe_file, *on) == 0
    assert "the weights will not be those of such a run" in capsys.readouterr().err
    after = weights(folder)
    assert after[1][:24] == before
    assert rates(folder)[24] == pytest.approx(rates(folder)[23]), "it begins with the rate that the old plan ended with"
    assert rates(folder)[27:] == pytest.approx(rates(straight)[27:]), "after so many steps as the warmup it is there"
    # Killed on the way: the same command goes on bit for bit, although the recipe says nothing of the re-warm-up.
    for step in steps(folder)[1:]:
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")
    assert steps(folder) == [24] or steps(folder)[0] > 24
    assert train(recipe_file, *on) == 0
    assert weights(folder) == after


@pytest.mark.fault(29)
def test_fewer_steps_than_are_done_are_refused(trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained("on")
    before = weights(folder)
    for flags in ((), ("--accept-changes",)):
        assert train(folder, "train.steps=12", flags=flags) == 2
        said = capsys.readouterr().err
        assert "planned for 24 steps and 24 of them are done, but the recipe asks for 12" in said
    assert weights(folder) == before
    assert load(folder / "recipe.toml").train.steps == 24


def test_minutes_are_counted_at_the_pace_of_the_run(runs: Path, recipe_file: Path) -> None:
    from bessemer import longer
    from bessemer.defaults import derived_keys

    folder = runs / "small"
    stored = derived_keys.resolve(load(recipe_file), 400)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": "train", "step": n, "step_seconds": 0.5}) + "\n" for n in range(1, 25))
    )
    asked = load(recipe_file, ["train.minutes=1"])
    assert asked.train.steps is None, "an override takes the place of what the recipe has"
    assert longer.steps_of_minutes(asked, stored, RunFolder(folder), 0) == 117  # 58.8 s, as 2% are for saving
    again = load(recipe_file, ["train.minutes=1", "train.steps=24"])
    assert longer.steps_of_minutes(again, stored, RunFolder(folder), 60) is None
    assert longer.steps_of_minutes(asked, again, RunFolder(folder), 60) == 24


def test_fewer_minutes_are_refused_in_minutes(runs: Path, recipe_file: Path) -> None:
    from bessemer import changed_recipe
    from bessemer.defaults import derived_keys
    from bessemer.errors import InputError

    stored = derived_keys.resolve(load(recipe_file, ["train.minutes=2", "train.steps=24"]), 400)
    asked = derived_keys.resolve(load(recipe_file, ["train.minutes=1", "train.steps=12"]), 400)
    words = r"is a run of 2 minutes \(24 of 24 steps are done\), but the recipe asks for 1\. Give more steps"
    with pytest.raises(InputError, match=words):
        changed_recipe.refuse_fewer_steps(stored.train, asked.train, RunFolder(runs / "small"), 24, accept=False)


def test_what_a_longer_run_keeps_of_a_short_one_is_said(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bessemer import longer
    from bessemer.defaults import derived_keys

    kept = derived_keys.resolve(load(recipe_file), 400).train
    longer.report_kept_batch(kept, kept)
    assert not capsys.readouterr().err
    tokens = 4 * (kept.global_batch_tokens or 0)
    longer.report_kept_batch(kept.model_copy(update={"global_batch_tokens": tokens}), kept)
    assert f"a run of this length would begin with {tokens:,}" in capsys.readouterr().err


def test_without_the_checkpoint_before_the_decay_the_way_on_is_said(
    trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained("on", *WSD)
    shutil.rmtree(folder / "checkpoints" / "step-00000018")
    assert train(folder, "train.steps=48") == 2
    said = capsys.readouterr().err
    assert "no undamaged checkpoint left from before its decay, which began after step 18" in said
    whole = folder / "checkpoints" / "step-00000024" / "manifest.json"
    kept = whole.read_text()
    whole.write_text("{}")
    assert train(folder, "train.steps=48") == 2
    assert "all of the checkpoints (of steps 24) are damaged" in capsys.readouterr().err
    whole.write_text(kept)
    assert train(folder, "train.steps=48", flags=("--accept-changes",)) == 0
    found = rates(folder)
    assert found[24] == pytest.approx(found[23]) and found[25] == pytest.approx(0.01)


def test_shares_planned_over_the_whole_run_are_not_moved_silently(
    trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained("on", "train.schedule.kind=constant", "corpus.sources.code.max_epochs=0.5")
    assert train(folder, "train.steps=30") == 2
    assert "are planned over the whole run" in capsys.readouterr().err
    assert steps(folder)[-1] == 24
    assert train(folder, "train.steps=30", flags=("--accept-changes",)) == 0


def test_a_trained_run_without_its_checkpoints_does_not_start_over(
    trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained("on")
    before = (folder / "metrics.jsonl").read_text()
    for step in steps(folder):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")
    assert train(folder) == 2
    assert "this run was trained, but no checkpoint is there" in capsys.readouterr().err
    shutil.rmtree(folder / "checkpoints")
    assert train(folder, command="evaluate") == 2
    assert "this run was trained, but no checkpoint is there" in capsys.readouterr().err
    assert train(folder, "train.steps=30") == 2
    assert (folder / "metrics.jsonl").read_text() == before


@pytest.mark.long
def test_everything_is_done_again_after_longer_training(trained: Any) -> None:
    """A run folder that was moved: nothing is written where it lay."""
    more = "export.hf=false", "evaluate.ngram=false"
    folder = trained("on", *more, "train.schedule.kind=constant")
    assert train(folder, *more, command="run") == 0
    old = read_json(folder / "evaluation.json")
    write_json(folder / "marker.json", {})
    moved = folder.rename(folder.parent / "elsewhere")
    assert train(moved, *more, "train.steps=30", command="run") == 0
    assert not folder.exists()
    new = read_json(moved / "evaluation.json")
    assert (old["step"], new["step"]) == (24, 30)
    assert read_json(moved / "previous-1" / "evaluation.json") == old
    assert (moved / "previous-1" / "report.html").exists() and (moved / "report.html").exists()
