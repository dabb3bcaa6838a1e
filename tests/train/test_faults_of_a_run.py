"""Faults during a training of one process: rows of the fault matrix (tests/fault_matrix.toml)."""

import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.guard.journal import Journal
from bessemer.run.files import read_json, read_json_lines
from bessemer.tokens.loader import Batch
from bessemer.train.trainer import DeviceStats, Trainer
from tests.newest import training_result
from tests.train.faulty_runs import SMALL, change_steps, copied, replayed, train

Record = Callable[[str, object], None]


pytestmark = pytest.mark.usefixtures("fixed_step_time")


@pytest.mark.long
@pytest.mark.fault(22)
def test_losses_perturbed_once_are_classified_as_transient(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, is_thorough: bool, record_property: Record
) -> None:
    """Change loss and gradient norm of several steps of one run, as by a flipped bit; a repeated step is unchanged."""
    number = 20 if is_thorough else 3
    draw = random.Random(2)
    steps = [5 * place + draw.randint(1, 5) for place in range(5, 5 + number)]  # one between two checkpoints

    def perturbed(trainer: Trainer, batch: Batch, found: DeviceStats) -> DeviceStats:
        if batch.first // 8 + 1 not in steps:
            return found
        return replace(found, loss=found.loss * draw.choice((0.5, 1.001, 1.5, 3.0)), grad_norm=found.grad_norm * 2)

    with monkeypatch.context() as patch:
        change_steps(patch, perturbed)
        folder = train(
            recipe_file,
            runs,
            "guard.skip_spikes=false",
            "guard.max_rollbacks=0",
            "checkpoint.keep=100",
            "checkpoint.every=5",
        )
    kinds = [replayed(folder, step)["kind"] for step in steps]
    assert kinds == ["transient"] * number
    record_property("obtained", f"{kinds.count('transient')} of {number}")


@pytest.mark.long
@pytest.mark.fault(26)
def test_ten_stops_across_epochs_do_not_change_the_run(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """The text is read several times; the run stops at ten random steps, after some of which its last save is lost."""
    read, last = list[int](), [10**9]

    def recorded(trainer: Trainer, batch: Batch, found: DeviceStats) -> DeviceStats:
        read.append(batch.first)
        if batch.first >= last[0]:
            signal.raise_signal(signal.SIGTERM)
        return found

    change_steps(monkeypatch, recorded)
    sets = "train.steps=400", "checkpoint.every=25", "checkpoint.keep=3"
    whole = train(recipe_file, copied(runs, "whole"), *sets)
    audit = read_json(whole / "mixture.json")
    assert min(source["epochs"] for source in audit["sources"].values()) > 2, "over epoch edges"
    straight, draw = list(read), random.Random(3)
    read.clear()
    for stop in sorted(draw.sample(range(5, 395), 10)):
        last[0] = 8 * (stop - 1)
        sets_here = [part for value in (f"run.dir={runs}", *SMALL, *sets) for part in ("--set", value)]
        assert run_command(["train", str(recipe_file), *sets_here]) == 75
        if draw.random() < 0.3:  # as by a kill
            newest = (runs / "small" / "checkpoints" / "latest").read_text()
            if len(list((runs / "small" / "checkpoints").glob("step-*"))) > 1:
                shutil.rmtree(runs / "small" / "checkpoints" / newest)
    last[0] = 10**9
    resumed = train(recipe_file, runs, *sets)
    assert training_result(resumed) == training_result(whole)
    assert sorted(set(read)) == straight, "0 missing, 0 of another order"
    record_property("obtained", "10 stops, bit for bit")


@pytest.mark.long
@pytest.mark.fault(18)
def test_a_temporarily_too_high_learning_rate_is_undone(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """Make the rate of 6 updates from step 601 on 30 times too high.

    The guard skips those after the first, so that the fault still lasts after a rollback.
    """
    sets = "train.steps=1200", "checkpoint.every=25", "train.micro_batch=8"
    healthy = train(recipe_file, copied(runs, "healthy"), *sets)
    honest, updates = Trainer.update, list[int]()

    def update(self: Trainer, number: int, grad_norm: float, factor: float = 1.0, *skip: Any) -> float:
        if number >= 600 and len(updates) < 6:
            updates.append(number)
            factor *= 30
        return honest(self, number, grad_norm, factor)

    monkeypatch.setattr(Trainer, "update", update)
    folder = train(recipe_file, runs, *sets)
    journal = Journal.read(folder / "journal.jsonl")
    assert 1 <= journal.num_rollbacks <= 3
    first = journal.rollbacks[0]
    assert first.to <= 600 < first.onset, "from before the fault"
    noticed = first.at - 600
    assert noticed <= 16
    loss, expected = (
        [row["loss"] for row in read_json_lines(run / "metrics.jsonl") if row["kind"] == "validation"][-1]
        for run in (folder, healthy)
    )
    assert loss <= 1.01 * expected
    worse = 100 * (loss / expected - 1)
    record_property(
        "obtained",
        f"noticed after {noticed} steps, {journal.num_rollbacks} rollbacks, loss {worse:+.2f}% of the run without",
    )
