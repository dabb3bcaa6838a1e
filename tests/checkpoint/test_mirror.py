"""The mirror of checkpoints: published ones are copied, damaged ones restored, and a fresh machine resumes from it."""

import shutil
from pathlib import Path

import pytest
import torch

from bessemer.checkpoint import SavedCheckpoint, latest, save
from bessemer.checkpoint import mirror as mirror_module
from bessemer.checkpoint.mirror import Mirror, refetch, restore_missing
from bessemer.checkpoint.protocol import drop_newer
from bessemer.cli import run_command
from bessemer.common.errors import BessemerError, InputError
from bessemer.distributed.mesh import SINGLE_PROCESS
from bessemer.guard.journal import Journal
from bessemer.recipe import load, parse
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_lines
from bessemer.train.setup import run_checkpoint
from tests.corpus.object_store import Store
from tests.newest import training_result


def saved(run: RunDirectory, step: int, keep: int = 2) -> SavedCheckpoint:
    tensors = {"model": {"a": torch.full((300, 10), float(step)), "b": torch.arange(step)}}
    return save(run.checkpoints, step, tensors, {"samples": step}, keep=keep)


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("step-*/*")}


@pytest.mark.parametrize("remote", [False, True])
def test_the_mirror_has_the_checkpoints_that_the_run_keeps(tmp_path: Path, bucket: Store, remote: bool) -> None:
    url, place = ("s3://b/deep", bucket.folder / "b" / "deep") if remote else (str(tmp_path / "m"), tmp_path / "m")
    run = RunDirectory(tmp_path / "run")
    mirror = Mirror(url, "name", run)
    assert mirror.steps() == []
    failures: list[str] = []
    for step in (10, 20, 30):
        saved(run, step)
        run.journal.write_text(f"{step}\n")
        (run.path / "gated-1.jsonl").write_text(f"{step}\n")
        mirror.follow(failures.append)
        assert mirror.finish()
    assert not failures and mirror.steps() == [20, 30]
    assert files(place / "name") == files(run.checkpoints)
    assert (place / "name" / "journal.jsonl").read_text() == "30\n"
    drop_newer(run.checkpoints, 20)  # after a rollback step 30 is saved again, with other weights
    saved(run, 30).folder.rename(run.checkpoints / "x")
    shutil.rmtree(run.checkpoints / "x")
    mirror.update()
    assert mirror.steps() == [20]
    # On a fresh machine a damaged checkpoint of the mirror is skipped.
    saved(run, 40)
    mirror.update()
    damaged = next((place / "name" / "step-00000040").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\7")
    fresh = RunDirectory(tmp_path / "fresh")
    again = Mirror(url, "name", fresh)
    assert again.restore_newest() == 20
    found = latest(fresh.checkpoints)
    assert found is not None and found.step == 20 and found.facts == {"samples": 20}
    assert fresh.journal.read_text() == (fresh.path / "gated-1.jsonl").read_text() == "30\n"
    saved(fresh, 50, keep=1)
    again.update()
    assert again.steps() == [50], "what it was restored from is its own to remove"


def test_the_mirror_of_another_training_is_not_touched(tmp_path: Path) -> None:
    one, two, three = (RunDirectory(tmp_path / name) for name in ("one", "two", "three"))
    mine, theirs, late = (Mirror(str(tmp_path / "m"), "name", run) for run in (one, two, three))
    saved(one, 10)
    mine.update()
    before = files(tmp_path / "m")
    saved(two, 10)
    with pytest.raises(InputError, match=str(tmp_path / "m")):
        theirs.update()
    recipe = parse(f'run.name = "name"\ncheckpoint.mirror = "{tmp_path / "m"}"\n', "r.toml")
    assert not refetch(recipe, two, 10) and refetch(recipe, one, 10)
    assert files(tmp_path / "m") == before
    assert late.restore_newest() == 10  # a machine without checkpoints resumes the training in the mirror
    shutil.rmtree(three.checkpoints / "step-00000010")
    shutil.rmtree(tmp_path / "m")
    theirs.update()
    with pytest.raises(InputError, match=str(tmp_path / "m")):
        late.restore_newest()


def test_a_checkpoint_replaced_during_its_copy_still_belongs_to_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    mirror, copy = Mirror(str(tmp_path / "m"), "name", run), mirror_module.copy
    saved(run, 10)

    def and_train(source: Path, target: Path) -> None:
        copy(source, target)
        if target.name == "manifest.json" and "00000010" in str(target):
            saved(run, 20)
            saved(run, 30)

    with monkeypatch.context() as patched:
        patched.setattr(mirror_module, "copy", and_train)
        mirror.update()
    assert mirror.steps() == [10] and not (run.checkpoints / "step-00000010").exists()
    mirror.update()
    saved(run, 40)
    mirror.update()
    assert mirror.steps() == [30, 40]


def test_a_failed_upload_is_reported_and_retried(tmp_path: Path, bucket: Store) -> None:
    run, said = RunDirectory(tmp_path / "run"), list[str]()
    mirror = Mirror("s3://b/deep", "name", run)
    for step, fail in ((10, bucket.refuse), (30, bucket.fail)):
        saved(run, step)
        fail()
        said.clear()
        mirror.follow(said.append)
        assert mirror.finish() and len(said) == 1
        bucket.answer()
        mirror.follow(said.append)
        assert mirror.finish() and step in mirror.steps() and len(said) == 1


def test_failures_of_the_mirror_are_reported_and_do_not_stop_training(tmp_path: Path, bucket: Store) -> None:
    run, said = RunDirectory(tmp_path / "run"), list[str]()
    saved(run, 10)
    mirror = Mirror("s3://b/deep", "name", run)
    bucket.refuse()
    mirrored = parse('run.name = "name"\ncheckpoint.mirror = "s3://b/deep"\n', "r.toml")
    with pytest.raises(InputError, match=r"^checkpoint\.mirror: s3://b/deep/name"):
        restore_missing(mirrored, RunDirectory(tmp_path / "fresh"))
    mirror.follow(said.append)
    assert mirror.finish()
    assert len(said) == 1 and said[0].startswith("s3://b/deep/name: ") and "a-secret" not in said[0]
    (run.checkpoints / "step-00000010" / "model.safetensors").write_bytes(b"x")
    mine = Mirror(str(tmp_path / "n"), "name", run)
    mine.follow(said.append)
    mine.finish()
    assert "SHA-256" in said[-1] and mine.steps() == []


@pytest.mark.usefixtures("fixed_step_time")
def test_a_fresh_machine_resumes_from_the_mirror(
    recipe_file: Path, runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fresh, straight = tmp_path / "fresh", tmp_path / "straight"
    shutil.copytree(runs, fresh)
    shutil.copytree(runs, straight)

    def train(place: Path, *overrides: str, expected: int = 0, flags: tuple[str, ...] = ()) -> str:
        values = f"run.dir={place}", "report.tensorboard=false", "train.schedule.kind=wsd", *overrides
        sets = [part for value in values for part in ("--set", value)]
        assert run_command(["train", str(recipe_file), *sets, *flags]) == expected
        return capfd.readouterr().err

    (tmp_path / "file").write_text("")
    for place, says in (("/proc/nope", "/proc cannot be written"), (tmp_path / "file", "file")):
        said = train(runs, f"checkpoint.mirror={place}", expected=2)
        assert "checkpoint.mirror: " in said and says in said
        assert not (runs / "small" / "metrics.jsonl").exists()
    mirrored = f"checkpoint.mirror={tmp_path / 'mirror'}"
    there = tmp_path / "mirror" / "small"
    train(runs, mirrored)
    assert files(there) == files(runs / "small" / "checkpoints")
    other = shutil.copytree(straight, tmp_path / "other") / "small"
    train(other.parent, mirrored, "train.optimizer.learning_rate=0.02", expected=2)
    assert not files(other / "checkpoints") and not list(other.glob("*.jsonl")) and not (other / "recipe.toml").exists()
    shutil.rmtree(there / "step-00000024")  # the machine was lost before its last save
    said = train(fresh, mirrored)
    assert f"from {there}" in said and "from step 19 of 24" in said
    assert training_result(fresh / "small") == training_result(runs / "small")
    (incident,) = read_json_lines(fresh / "small" / "incidents.jsonl")
    assert incident["what"] == "restored" and incident["step"] == 19
    # A damaged checkpoint is restored from the mirror.
    run = RunDirectory(fresh / "small")
    whole = files(run.checkpoints)
    (run.checkpoints / "step-00000024" / "model.safetensors").write_bytes(b"x")
    found = run_checkpoint(run, Journal.read(run.journal), SINGLE_PROCESS, load(run.recipe))
    assert found is not None and found.step == 24 and files(run.checkpoints) == whole
    assert "replaced by the copy in the mirror" in capfd.readouterr().err
    for path in run.checkpoints.glob("step-*/model.safetensors"):
        path.write_bytes(b"x")
    found = run_checkpoint(run, Journal.read(run.journal), SINGLE_PROCESS, load(run.recipe))
    assert found is not None and found.step == 24, "also where none is whole"
    shutil.rmtree(there)
    for path in run.checkpoints.glob("step-*/model.safetensors"):
        path.write_bytes(b"x")
    with pytest.raises(BessemerError, match=str(run.checkpoints)):
        run_checkpoint(run, Journal.read(run.journal), SINGLE_PROCESS, load(run.recipe))
    train(runs, mirrored, "train.steps=30")
    said = train(runs, mirrored, flags=("--restart",), expected=2)
    assert "has checkpoints of the earlier training, the newest of step 30" in said
    said = train(straight, "checkpoint.mirror=relative", expected=2)
    assert "checkpoint.mirror" in said and "give an absolute folder" in said
    # A damaged checkpoint is also restored before a run is extended.
    before_decay = runs / "small" / "checkpoints" / "step-00000024"
    (before_decay / "model.safetensors").write_bytes(b"x")
    said = train(runs, mirrored, "train.steps=36")
    assert "replaced by the copy in the mirror" in said
    # A failure after that stops nothing.
    said = train(straight, expected=0)
    said = train(straight, f"checkpoint.mirror={tmp_path / 'file'}", "train.steps=26")
    incidents = read_json_lines(straight / "small" / "incidents.jsonl")
    assert "mirror" in said and {row["what"] for row in incidents} >= {"mirror_failed"}
