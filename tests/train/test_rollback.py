"""Automatic recovery: poisoned data, machine faults, kills during recovery, and the journal that replays it."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.guard.journal import Journal
from bessemer.recipe import load, load_resolved
from bessemer.run.directory import checkpoint_steps
from bessemer.run.files import read_json, read_json_lines
from bessemer.tokens import trace
from bessemer.tokens.loader import Batch
from bessemer.tokens.shards import TokenStore
from bessemer.train import alarm_response
from bessemer.train.batch_stream import BatchStream
from bessemer.train.trainer import DeviceStats, Trainer
from tests.choose import long_but
from tests.newest import training_result
from tests.train.faulty_runs import (
    STEPS,
    change_steps,
    copied,
    faulty,
    incidents,
    poison,
    record_batches,
    replayed,
    train,
)

POISONED = range(8 * 70, 8 * 82)  # samples of steps 71 to 82


pytestmark = pytest.mark.usefixtures("fixed_step_time")


@contextmanager
def broken(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool) -> Iterator[None]:
    """Kill the process before or after the first call of a function."""
    honest = getattr(owner, name)

    def dies(*arguments: Any, **more: Any) -> Any:
        if after:
            honest(*arguments, **more)
        raise SystemError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies)
        yield


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Return the batches that are trained on."""
    return record_batches(monkeypatch)


@pytest.mark.fault(19)
def test_a_poisoned_range_is_skipped_and_its_documents_are_named(
    runs: Path,
    recipe_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    read: list[Batch],
) -> None:
    healthy = train(recipe_file, copied(runs, "healthy"), f"checkpoint.every={STEPS}")
    read.clear()
    poison(monkeypatch, lambda first: first in POISONED)
    folder = train(recipe_file, runs, "guard.skip_spikes=false", "guard.skip_batches=30")
    journal, found = Journal.read(folder / "journal.jsonl"), incidents(folder)
    assert 1 <= journal.num_rollbacks <= 3
    first = journal.rollbacks[0]
    assert (first.what, first.onset, first.to) == ("diverged", 71, 60), "at least 8 steps before the first bad one"
    acted = next(row for row in found if row.get("rollback") == 1)
    assert acted["step"] <= 71 + 16 and "rolled back to step 60; " in acted["action"]
    assert "; skipped batches: 30 of steps 61 to 90;" in acted["action"]
    assert acted["documents"][0]["sample"] == 560 and acted["documents"][0]["documents"]
    assert "rolled back to step 60" in capsys.readouterr().err

    rows = read_json_lines(folder / "metrics.jsonl")
    steps = [row["step"] for row in rows if row["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1)), "every step once"
    forks = read_json_lines(folder / "forks.jsonl")
    assert {row["fork"] for row in forks} == set(range(1, journal.num_rollbacks + 1))
    assert [row["step"] for row in forks if row["fork"] == 1 and row["kind"] == "train"] == list(range(61, first.at))
    rates = {row["step"]: row["learning_rate"] for row in rows if row["kind"] == "train"}
    assert rates[first.to + 1] < 0.3 * rates[first.to]

    taken = [batch.first for batch in read[-(STEPS - journal.rollbacks[-1].to) :]]
    assert not any(start in POISONED for start in taken), "nothing of it is read on the path that the run took"
    audit = read_json(folder / "mixture.json")
    assert audit["follows_the_order"] and audit["skipped_samples"] >= len(POISONED)
    recipe, store = load_resolved(folder / "recipe.toml"), TokenStore.open(folder / "tokens")
    row = trace.step_documents(recipe, store, folder / "corpus", STEPS, omitted=journal.omitted)[0]
    assert row["sample"] == taken[-1]
    back = trace.document_steps(recipe, store, folder / "corpus", row["document"], omitted=journal.omitted)
    assert (STEPS, taken[-1]) in [(place["step"], place["sample"]) for place in back]

    end, of_healthy = (
        [row["loss"] for row in read_json_lines(run / "metrics.jsonl") if row["kind"] == "validation"][-1]
        for run in (folder, healthy)
    )
    assert end < 1.02 * of_healthy

    # The run no longer has the batches of its alarm. Damaged tokens and a truncated journal are errors.
    found = replayed(folder, acted["onset"])
    assert found["kind"] == "data" and next(iter(found["sequences"])) in POISONED
    assert found["figures"]["recorded"] == found["figures"]["again"]
    path, shard = folder / "journal.jsonl", folder / "tokens" / "prose-train-00000.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    assert run_command(["trace", str(folder), "--step", "60", "--replay"]) == 2
    path.write_bytes(whole)
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    assert run_command(["trace", str(folder), "--step", "60", "--replay"]) == 2
    assert "prose-train-00000.bin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    long_but(
        [(Journal, "add_rollback", True), (alarm_response, "drop_newer", True), (BatchStream, "roll_back", True)],
        (Journal, "add_rollback", True),
    ),
)
def test_a_kill_during_a_rollback_does_not_change_the_run(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    poison(monkeypatch, lambda first: first in POISONED)
    whole = train(recipe_file, copied(runs, "whole"), "train.steps=100")
    with broken(monkeypatch, owner, name, after=after), pytest.raises(SystemError):
        train(recipe_file, runs, "train.steps=100")
    resumed = train(recipe_file, runs, "train.steps=100")
    assert training_result(resumed) == training_result(whole)
    assert Journal.read(resumed / "journal.jsonl").rollbacks == Journal.read(whole / "journal.jsonl").rollbacks
    for kind in ("metrics", "forks"):
        ours, theirs = (
            [
                (row.get("fork"), row["step"], row["loss"])
                for row in read_json_lines(run / f"{kind}.jsonl")
                if row["kind"] == "train"
            ]
            for run in (resumed, whole)
        )
        assert ours == theirs, kind


def test_the_journal_replays_a_run_without_its_faults(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single non-finite step, and later three in a row, to which the response is a rollback.

    Without its journal the run is an error: nothing else records which data it skipped.
    """
    again, kind = copied(runs, "again"), ("train.schedule.kind=constant", "train.steps=80")
    with monkeypatch.context() as patch:
        faulty(patch, lambda call: call in (20, 60, 61, 62))
        folder = train(recipe_file, runs, *kind)
    journal = Journal.read(folder / "journal.jsonl")
    assert [(found.what, found.onset, found.to) for found in journal.rollbacks] == [("nonfinite", 61, 50)]
    assert journal.skips_step(21) and not journal.skips_step(61), "that one was undone"
    shutil.copy(folder / "journal.jsonl", again / "small" / "journal.jsonl")
    repeated = train(recipe_file, again, *kind)
    assert training_result(repeated) == training_result(folder)
    (taken_over,) = read_json_lines(repeated / "incidents.jsonl")
    assert (taken_over["what"], taken_over["step"], taken_over["rollback"]) == ("nonfinite", 63, 1)
    assert (repeated / "journal.jsonl").read_bytes() == (folder / "journal.jsonl").read_bytes()
    kept = (folder / "incidents.jsonl").read_text()
    (folder / "incidents.jsonl").unlink()  # as by a kill between the journal's line and this one
    longer = copied(runs, "longer")
    train(recipe_file, longer, *kind, "train.steps=90")
    (found,) = [row for row in incidents(longer / "small") if "rollback" in row]
    assert (found["what"], found["onset"], found["action"]) == ("nonfinite", 61, "rolled back to step 50")
    (folder / "incidents.jsonl").write_text(kept)
    (folder / "journal.jsonl").unlink()
    before = sorted(path.name for path in (folder / "checkpoints").iterdir())
    train(recipe_file, runs, *kind, "train.steps=90", expected=2)
    assert "journal.jsonl: lines are missing" in capsys.readouterr().err
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == before
    shutil.rmtree(folder / "checkpoints")  # of a run without a checkpoint that has the state
    (folder / "mixture.json").unlink()
    train(recipe_file, runs, *kind, expected=2)
    assert str(folder / "checkpoints") in capsys.readouterr().err, "it does not begin at step 1 again"
    (folder / "time.jsonl").unlink()
    train(recipe_file, runs, *kind, expected=2)
    assert "journal.jsonl: lines are missing" in capsys.readouterr().err


def test_endless_bad_data_stops_the_run_with_a_report(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step from 61 on is non-finite, wherever the run continues. A new run starts from the checkpoint before that."""
    with monkeypatch.context() as patch:
        change_steps(patch, lambda trainer, batch, found: (
            replace(found, loss=found.loss * math.nan) if batch.first >= 8 * 60 else found))  # fmt: skip
        for _ in range(2):
            folder = train(recipe_file, runs, "guard.max_rollbacks=2", expected=1)
            journal = Journal.read(folder / "journal.jsonl")
            assert [(one.number, one.rewarm_steps) for one in journal.rollbacks] == [(1, 8), (2, 8)], (
                "the same one stops again"
            )
            assert incidents(folder)[-1]["action"] == "run stopped"
    assert all("; skipped batches: 16 of" in row["action"] for row in incidents(folder) if row.get("rollback"))
    said = capsys.readouterr().err
    assert "after 2 rollbacks" in said and "the documents of the batches from step" in said
    healthy = checkpoint_steps(folder / "checkpoints")[-1]
    assert healthy <= 60 and f"--set train.start={folder} --set train.start_step={healthy}" in " ".join(said.split())
    train(recipe_file, runs, "guard.max_rollbacks=2")


def test_too_many_skipped_updates_stop_the_run(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty(monkeypatch, lambda call: call % 2 == 1)
    folder = train(recipe_file, runs, expected=1)
    assert [row["step"] for row in incidents(folder)] == list(range(2, 23, 2))
    assert "skipped update 11 (limit 10)" in capsys.readouterr().err


def test_a_new_phase_of_the_mixture_resets_the_windows(runs: Path, recipe_file: Path) -> None:
    recipe = load(recipe_file)
    text = recipe_file.read_text()
    text += "\n[[tokens.schedule]]\nfrom = 0.0\nweights = { prose = 1, code = 0 }\n"
    text += "[[tokens.schedule]]\nfrom = 0.5\nweights = { prose = 0, code = 1 }\n"
    changed = recipe_file.with_name("phases.toml")
    changed.write_text(text)
    assert recipe.train.steps == 24
    folder = train(changed, runs, "model.layers=2", "train.steps=120", "checkpoint.every=60")
    from bessemer.tokens.loader import open_loader

    loader = open_loader(load_resolved(folder / "recipe.toml"), TokenStore.open(folder / "tokens"))
    starts = [phase.first for phase in loader.mixture.phases]
    assert len(starts) == 2 and 400 < starts[1] < 560
    assert incidents(folder) == []


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.fault(17)
def test_a_damaged_batch_is_skipped_named_and_classified_as_data(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The replay changes nothing in the run."""
    poison(monkeypatch, lambda first: first == 8 * 70)
    folder = train(recipe_file, runs, "train.steps=90", "checkpoint.keep=9")
    (incident,) = incidents(folder)
    assert [incident[key] for key in ("what", "step", "onset", "action")] == ["spike", 71, 71, "update skipped"]
    assert {sample["sample"] for sample in incident["documents"]} == set(range(560, 568))
    assert all(sample["documents"] for sample in incident["documents"])
    rows = [row for row in read_json_lines(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert rows[70]["learning_rate"] == 0.0 and rows[70]["loss"] > rows[69]["loss"] + 0.5
    assert rows[71]["loss"] < rows[69]["loss"] + 0.5
    before = contents(folder)
    capsys.readouterr()
    assert run_command(["trace", str(folder), "--step", "71", "--replay", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert contents(folder) == before
    assert (found["kind"], found["first_difference"], found["replayed_from"]) == ("data", None, 70)
    assert found["figures"]["recorded"] == found["figures"]["again"]
    assert (
        set(found["sequences"]) == {str(row["sample"]) for row in found["documents"]} == set(map(str, range(560, 568)))
    )
    assert run_command(["trace", str(folder), "--step", "71", "--replay"]) == 0
    assert capsys.readouterr().out.startswith("step 71: data: ")
    assert replayed(folder, 72)["kind"] == "none"
    assert run_command(["trace", str(folder), "--step", "91", "--replay"]) == 2
    assert run_command(["trace", str(folder), "--document", "0" * 32, "--replay"]) == 2


@pytest.mark.fault(22)
def test_a_machine_fault_is_classified_as_transient(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        faulty(patch, lambda call: call == 54)
        folder = train(recipe_file, runs, "train.steps=70")
    found = replayed(folder, 55)
    assert (found["kind"], found["first_difference"], found["incident"]["what"]) == ("transient", None, "nonfinite")
    assert found["figures"]["recorded"]["grad_norm"] is None


def test_ruined_weights_are_classified_as_state(runs: Path, recipe_file: Path) -> None:
    sets = [f"run.dir={runs}", "train.optimizer.learning_rate=0.9", "train.schedule.warmup_steps=0"]
    sets += ["train.optimizer.kind=lion"]
    assert run_command(["train", str(recipe_file), *(part for value in sets for part in ("--set", value))]) == 1
    (incident,) = read_json_lines(runs / "small" / "incidents.jsonl")[-1:]
    for step in (incident["step"], incident["onset"] + 2):
        found = replayed(runs / "small", step)
        assert (found["kind"], found["replayed_from"], found["first_difference"]) == ("state", 0, None)
        assert found["incident"] == incident and found["figures"]["recorded"] == found["figures"]["again"]


def test_faults_fixed_by_more_precision_are_classified_as_numerics(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(trainer: Trainer, batch: Batch, found: DeviceStats) -> DeviceStats:
        overflows = trainer.device.precision.name == "fp32" and batch.first == 8 * 50
        return replace(found, grad_norm=found.grad_norm * math.nan) if overflows else found

    change_steps(monkeypatch, overflow)
    found = replayed(train(recipe_file, runs, "train.steps=60", "train.precision=fp32"), 51)
    assert found["kind"] == "numerics" and found["figures"]["in higher precision"]["grad_norm"] is not None
