"""Steps that went wrong in one way each, and what `bessemer diagnose` says of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.cli import run_command
from bessemer.recipe import load
from bessemer.run import RunFolder, read_json_lines
from bessemer.tokens.loader import Batch
from bessemer.train.diagnose import Diagnosis, _Tests, diagnose
from bessemer.train.replay import LossAndNorm, Replayed, WithNeighbours
from bessemer.train.trainer import StepStats, Trainer
from tests.train.test_guarded import poison
from tests.train.test_rollback import SMALL, _no_measurement, faulty, train  # noqa: F401


def diagnosed(folder: Path, step: int) -> Diagnosis:
    return diagnose(load(folder), RunFolder(folder), step)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_damaged_batch_is_named_data_and_the_run_is_only_read(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, lambda first: first == 8 * 70)
    folder = train(recipe_file, runs, "train.steps=90", "checkpoint.keep=9")
    before = contents(folder)
    capsys.readouterr()
    assert run_command(["diagnose", str(folder), "--step", "71", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert contents(folder) == before
    assert (found["kind"], found["first_difference"], found["replayed_from"]) == ("data", None, 70)
    assert found["figures"]["recorded"] == found["figures"]["again"]
    assert {one["sample"] for one in found["sequences"]} == set(range(560, 568))
    assert all(name in found["documents"] for name in found["sequences"][0]["documents"][:1])
    assert run_command(["diagnose", str(folder), "--step", "71"]) == 0
    said = capsys.readouterr().out
    assert (
        said.startswith("step 71: data: the batch is an outlier")
        and "with earlier weights it is an outlier too" in said
    )
    assert diagnosed(folder, 72).kind == "none"


def test_a_step_from_before_a_change_is_replayed_under_the_recipe_of_its_time(runs: Path, recipe_file: Path) -> None:
    train(recipe_file, runs, "train.steps=40", "checkpoint.keep=9")
    values = f"run.dir={runs}", "train.steps=60", "checkpoint.every=10", "checkpoint.keep=9", *SMALL
    sets = [part for value in (*values, "train.z_loss=0.1") for part in ("--set", value)]
    assert run_command(["train", str(recipe_file), *sets, "--accept-changes"]) == 0
    folder = runs / "small"
    for step in (35, 55):  # before the change and after it
        found = diagnosed(folder, step)
        assert (found.kind, found.first_difference) == ("none", None), found.findings


def test_the_worst_sequence_comes_first(runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.tokens.loader import Loader

    honest = Loader.batch

    def batch(self: Loader, first: int, count: int) -> Batch:
        read = honest(self, first, count)
        if not first <= 8 * 70 + 5 < first + count:
            return read
        read.inputs[8 * 70 + 5 - first] = read.targets[8 * 70 + 5 - first] = 3
        return read

    monkeypatch.setattr(Loader, "batch", batch)
    folder = train(recipe_file, runs, "train.steps=80")
    ranked = diagnosed(folder, 71).sequences
    losses = {one.sample: one.figures.loss for one in ranked}
    assert ranked[0].sample == 565 or losses[565] == min(x for x in losses.values() if x is not None)


@pytest.mark.fault(22)
def test_a_fault_of_the_machine_is_transient(runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        faulty(patch, lambda call: call == 54)
        folder = train(recipe_file, runs, "train.steps=70")
    found = diagnosed(folder, 55)
    assert found.kind == "transient" and found.first_difference is None
    assert found.incident is not None and found.incident["what"] == "nonfinite"


def test_a_rolled_back_step_is_looked_at_as_it_was(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 71 to 82 hold noise; the run goes back and passes over them, and so no longer has the batches of its alarm."""
    poison(monkeypatch, lambda first: first in range(8 * 70, 8 * 82))
    folder = train(recipe_file, runs, "guard.skip_spikes=false", "guard.skip_batches=30")
    (incident,) = (row for row in read_json_lines(folder / "incidents.jsonl") if "rollback" in row)
    found = diagnosed(folder, incident["onset"])
    assert found.kind == "data" and found.sequences[0].sample in range(8 * 70, 8 * 82)
    assert found.figures["recorded"] == found.figures["again"]


def test_ruined_weights_are_state(runs: Path, recipe_file: Path) -> None:
    sets = ["run.dir=" + str(runs), "train.optimizer.learning_rate=0.9", "train.schedule.warmup_steps=0"]
    sets += ["train.optimizer.kind=lion"]
    assert run_command(["train", str(recipe_file), *(part for value in sets for part in ("--set", value))]) == 1
    (incident,) = read_json_lines(runs / "small" / "incidents.jsonl")[-1:]
    found = diagnosed(runs / "small", incident["step"])
    assert (found.kind, found.replayed_from, found.first_difference) == ("state", 0, None)


def test_what_more_precision_mends_is_numerics(runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Trainer.forward_backward

    def forward_backward(self: Trainer, batch: Batch, *scale: Any) -> StepStats:
        found = honest(self, batch, *scale)
        overflows = self.device.precision.name == "fp32" and batch.first == 8 * 50
        return replace(found, grad_norm=math.nan) if overflows else found

    monkeypatch.setattr(Trainer, "forward_backward", forward_backward)
    folder = train(recipe_file, runs, "train.steps=60", "train.precision=fp32")
    found = diagnosed(folder, 51)
    assert found.kind == "numerics" and found.figures["in more precision"].is_finite


def test_a_step_that_was_not_taken_is_refused(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train(recipe_file, runs, "train.steps=20")
    assert run_command(["diagnose", str(folder), "--step", "21"]) == 2
    assert "21 is not a step that this run has taken; it has taken steps 1 to 20" in capsys.readouterr().err


def test_damaged_tokens_and_a_cut_journal_are_refused(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, lambda first: first in range(8 * 70, 8 * 82))
    folder = train(recipe_file, runs, "guard.skip_spikes=false", "guard.skip_batches=30")
    journal = folder / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-40])
    assert run_command(["diagnose", str(folder), "--step", "60"]) == 2
    assert "lines are missing" in capsys.readouterr().err
    journal.write_bytes(whole)
    shard = folder / "tokens" / "prose-train-00000.bin"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    assert run_command(["diagnose", str(folder), "--step", "60"]) == 2
    assert "prose-train-00000.bin" in capsys.readouterr().err


def test_a_step_in_the_midst_of_a_divergence_is_sick(runs: Path, recipe_file: Path) -> None:
    sets = ["run.dir=" + str(runs), "train.optimizer.learning_rate=0.9", "train.schedule.warmup_steps=0"]
    sets += ["train.optimizer.kind=lion"]
    assert run_command(["train", str(recipe_file), *(part for value in sets for part in ("--set", value))]) == 1
    (incident,) = read_json_lines(runs / "small" / "incidents.jsonl")[-1:]
    alarmed = diagnosed(runs / "small", incident["step"])
    assert alarmed.kind == "state" and alarmed.figures["recorded"] == alarmed.figures["again"]
    found = diagnosed(runs / "small", incident["onset"] + 2)
    assert found.kind == "state" and found.incident == incident
    assert "learned next to nothing" in found.findings[-1]


@pytest.mark.parametrize(
    ("as_bad", "is_outlier_before", "kind"),
    [(0, True, "data"), (1, False, "data"), (5, False, "state"), (5, True, "data"), (9, True, "state")],
)
def test_a_batch_among_others_as_bad_is_data_only_where_it_was_an_outlier_before(
    as_bad: int, is_outlier_before: bool, kind: str
) -> None:
    usual = [LossAndNorm(2.0 + 0.01 * (number % 7), 1.0 + 0.02 * (number % 5)) for number in range(64)]
    bad = LossAndNorm(9.0, 3.0)
    current = WithNeighbours(bad, [*[bad] * as_bad, *usual[: 16 - as_bad]])
    earlier = WithNeighbours(bad if is_outlier_before else usual[3], usual[:16])
    replayed = Replayed(0, {}, current, bad, bad, earlier, usual, [], "fp32", torch.float32, 6.0)
    assert _Tests(replayed, bad, None, 0.0, True).verdict()[0] == kind
