"""Steps that went wrong in one way each, and what `bessemer trace --replay` says of them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.run.files import read_json_lines
from bessemer.tokens.loader import Batch
from bessemer.train.trainer import DeviceStats, Trainer
from tests.train.faulty_runs import change_steps, faulty, poison, replayed, train

pytestmark = pytest.mark.usefixtures("fixed_step_time")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_damaged_batch_is_data_and_the_run_is_only_read(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, lambda first: first == 8 * 70)
    folder = train(recipe_file, runs, "train.steps=90", "checkpoint.keep=9")
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
    assert run_command(["trace", str(folder), "--token", "prose-train-00000:1", "--replay"]) == 2


@pytest.mark.fault(22)
def test_a_fault_of_the_machine_is_transient(runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        faulty(patch, lambda call: call == 54)
        folder = train(recipe_file, runs, "train.steps=70")
    found = replayed(folder, 55)
    assert (found["kind"], found["first_difference"], found["incident"]["what"]) == ("transient", None, "nonfinite")
    assert found["figures"]["recorded"]["grad_norm"] is None


def test_a_rolled_back_step_is_replayed_as_it_was(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps 71 to 82 hold noise; the run goes back and passes over them, and so no longer has the batches of its alarm."""
    poison(monkeypatch, lambda first: first in range(8 * 70, 8 * 82))
    folder = train(recipe_file, runs, "guard.skip_spikes=false", "guard.skip_batches=30")
    (incident,) = (row for row in read_json_lines(folder / "incidents.jsonl") if "rollback" in row)
    found = replayed(folder, incident["onset"])
    assert found["kind"] == "data" and next(iter(found["sequences"])) in range(8 * 70, 8 * 82)
    assert found["figures"]["recorded"] == found["figures"]["again"]
    # Damaged tokens and a cut journal are rejected.
    journal, shard = folder / "journal.jsonl", folder / "tokens" / "prose-train-00000.bin"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-40])
    assert run_command(["trace", str(folder), "--step", "60", "--replay"]) == 2
    journal.write_bytes(whole)
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    assert run_command(["trace", str(folder), "--step", "60", "--replay"]) == 2
    assert "prose-train-00000.bin" in capsys.readouterr().err


def test_ruined_weights_are_state(runs: Path, recipe_file: Path) -> None:
    sets = [f"run.dir={runs}", "train.optimizer.learning_rate=0.9", "train.schedule.warmup_steps=0"]
    sets += ["train.optimizer.kind=lion"]
    assert run_command(["train", str(recipe_file), *(part for value in sets for part in ("--set", value))]) == 1
    (incident,) = read_json_lines(runs / "small" / "incidents.jsonl")[-1:]
    for step in (incident["step"], incident["onset"] + 2):
        found = replayed(runs / "small", step)
        assert (found["kind"], found["replayed_from"], found["first_difference"]) == ("state", 0, None)
        assert found["incident"] == incident and found["figures"]["recorded"] == found["figures"]["again"]


def test_what_more_precision_fixes_is_numerics(runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(trainer: Trainer, batch: Batch, found: DeviceStats) -> DeviceStats:
        overflows = trainer.device.precision.name == "fp32" and batch.first == 8 * 50
        return replace(found, grad_norm=found.grad_norm * math.nan) if overflows else found

    change_steps(monkeypatch, overflow)
    found = replayed(train(recipe_file, runs, "train.steps=60", "train.precision=fp32"), 51)
    assert found["kind"] == "numerics" and found["figures"]["in higher precision"]["grad_norm"] is not None
