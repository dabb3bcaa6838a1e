"""Runs that heal: poisoned data, faults of the machine, kills in the middle of it, and the journal that repeats it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bessemer.checkpoint import latest, save
from bessemer.cli import run_command
from bessemer.guard.detection import Alarm
from bessemer.guard.incidents import DRIFT, SHIFT, IncidentKind
from bessemer.guard.journal import Journal
from bessemer.parallel.mesh import SINGLE_PROCESS
from bessemer.recipe import Guard, load
from bessemer.run import published, read_json, read_json_lines
from bessemer.tokens import ledger
from bessemer.tokens.loader import Batch
from bessemer.tokens.mixture import Phase
from bessemer.tokens.shards import TokenStore
from bessemer.train import rollback
from bessemer.train.horizon import Horizon
from bessemer.train.measure import RunTiming
from bessemer.train.trainer import StepStats, Trainer
from tests.choose import long_but
from tests.newest import weights_hash
from tests.train.test_guarded import incidents, poison

STEPS, EVERY = 130, 10
SMALL = "model.layers=1", "train.micro_batch=8", "report.tensorboard=false"
POISONED = range(8 * 70, 8 * 82)  # samples of the steps 71 to 82


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bessemer.train.measure.time_run", lambda *arguments: RunTiming(0.01, 0.0, 0.0, 2))


def train(recipe_file: Path, runs: Path, *overrides: str, expected: int = 0) -> Path:
    values = (
        f"run.dir={runs}",
        f"train.steps={STEPS}",
        f"checkpoint.every={EVERY}",
        *SMALL,
        *overrides,
    )
    sets = [part for value in values for part in ("--set", value)]
    assert run_command(["train", str(recipe_file), *sets]) == expected
    return runs / "small"


def weights(folder: Path) -> str:
    saved = latest(folder / "checkpoints")
    assert saved is not None
    return f"{saved.step} {weights_hash(folder)}"


def copied(runs: Path, name: str) -> Path:
    """Another folder with runs that have the same tokens."""
    place = runs.with_name(name)
    shutil.copytree(runs, place)
    return place


@contextmanager
def broken(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool) -> Iterator[None]:
    """A kill before or after the first call of a function."""
    honest = getattr(owner, name)

    def dies(*arguments: Any, **more: Any) -> Any:
        if after:
            honest(*arguments, **more)
        raise SystemError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies)
        yield


def faulty(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool]) -> None:
    """The gradients' norm is not a number where is_bad says so of the number of calls before."""
    honest, calls = Trainer.forward_backward, iter(range(10**9))

    def forward_backward(self: Trainer, batch: Batch, scale: Any) -> StepStats:
        found = honest(self, batch, scale)
        return replace(found, grad_norm=math.nan) if is_bad(next(calls)) else found

    monkeypatch.setattr(Trainer, "forward_backward", forward_backward)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first sample of every batch that is trained on."""
    honest, found = Trainer.forward_backward, list[int]()

    def forward_backward(self: Trainer, batch: Batch, scale: Any) -> StepStats:
        found.append(batch.first)
        return honest(self, batch, scale)

    monkeypatch.setattr(Trainer, "forward_backward", forward_backward)
    return found


@pytest.mark.fault(19)
def test_a_poisoned_range_is_skipped_and_its_documents_are_named(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], read: list[int]
) -> None:
    healthy = train(recipe_file, copied(runs, "healthy"))
    read.clear()
    poison(monkeypatch, lambda first: first in POISONED)
    folder = train(recipe_file, runs, "guard.skip_spikes=false", "guard.skip_batches=30")
    journal, found = Journal.read(folder / "journal.jsonl"), incidents(folder)
    assert 1 <= journal.num_rollbacks <= 3
    first = journal.rollbacks[0]
    assert (first.what, first.onset, first.to) == ("diverged", 71, 60), "at least 8 steps before the first bad one"
    acted = next(row for row in found if row.get("rollback") == 1)
    assert acted["step"] <= 71 + 16 and "rolled back to step 60, which undoes steps 61 to " in acted["action"]
    assert "; 30 batches skipped, of steps 61 to 90;" in acted["action"]
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

    path = read[-(STEPS - journal.rollbacks[-1].to) :]
    assert not any(start in POISONED for start in path), "nothing of it is read on the path that the run took"
    audit = read_json(folder / "mixture.json")
    assert audit["follows_the_order"] and audit["skipped_samples"] >= len(POISONED)
    recipe, store = load(folder / "recipe.toml"), TokenStore.open(folder / "tokens")
    row = ledger.step_documents(recipe, store, folder / "corpus", STEPS, omitted=journal.omitted)[0]
    assert row["sample"] == path[-1]
    back = ledger.document_steps(recipe, store, folder / "corpus", row["document"], omitted=journal.omitted)
    assert (STEPS, path[-1]) in [(place["step"], place["sample"]) for place in back]

    end, of_healthy = (
        [row["loss"] for row in read_json_lines(run / "metrics.jsonl") if row["kind"] == "validation"][-1]
        for run in (folder, healthy)
    )
    assert end < 1.02 * of_healthy


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    long_but(
        [
            (Journal, "add_rollback", True),
            (rollback, "drop_newer", True),
            (Horizon, "roll_back", True),
        ],
        (Journal, "add_rollback", True),
    ),
)
def test_a_kill_during_a_rollback_changes_nothing(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    poison(monkeypatch, lambda first: first in POISONED)
    whole = train(recipe_file, copied(runs, "whole"))
    with broken(monkeypatch, owner, name, after=after), pytest.raises(SystemError):
        train(recipe_file, runs)
    resumed = train(recipe_file, runs)
    assert weights(resumed) == weights(whole)
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


def test_the_journal_repeats_a_run_whose_faults_do_not_come_again(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single step that is not finite, and later three in a row, to which the response is a rollback.

    Without its journal the run is refused: nothing else says which data it skipped.
    """
    again = copied(runs, "again")
    with monkeypatch.context() as patch:
        faulty(patch, lambda call: call in (20, 60, 61, 62))
        folder = train(recipe_file, runs)
    journal = Journal.read(folder / "journal.jsonl")
    assert [(found.what, found.onset, found.to) for found in journal.rollbacks] == [("nonfinite", 61, 50)]
    assert journal.skips_step(21) and not journal.skips_step(61), "that one was undone"
    shutil.copy(folder / "journal.jsonl", again / "small" / "journal.jsonl")
    repeated = train(recipe_file, again)
    assert weights(repeated) == weights(folder)
    (taken_over,) = read_json_lines(repeated / "incidents.jsonl")
    assert (taken_over["what"], taken_over["step"], taken_over["action"][:10]) == ("nonfinite", 63, "taken over")
    assert (repeated / "journal.jsonl").read_bytes() == (folder / "journal.jsonl").read_bytes()
    kept = (folder / "incidents.jsonl").read_text()
    (folder / "incidents.jsonl").unlink()  # as by a kill between the journal's line and this one's
    longer = copied(runs, "longer")
    train(recipe_file, longer, f"train.steps={STEPS + 10}")
    (found,) = [row for row in incidents(longer / "small") if "rollback" in row]
    assert (found["what"], found["onset"], found["action"]) == ("nonfinite", 61, "rolled back to step 50")
    assert "rolled back to step 50, before the training was killed" in capsys.readouterr().err
    (folder / "incidents.jsonl").write_text(kept)
    (folder / "journal.jsonl").unlink()
    before = sorted(path.name for path in (folder / "checkpoints").iterdir())
    train(recipe_file, runs, f"train.steps={STEPS + 10}", expected=2)
    assert "records 1 rollback, the journal 0: lines are missing" in capsys.readouterr().err
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == before
    shutil.rmtree(folder / "checkpoints")  # of a run that has no checkpoint which knows
    (folder / "mixture.json").unlink()
    train(recipe_file, runs, expected=2)
    assert "was trained, but no checkpoint is there" in capsys.readouterr().err, "it does not begin at step 1 again"
    (folder / "time.jsonl").unlink()
    train(recipe_file, runs, expected=2)
    assert "records 1 rollback, the journal 0: lines are missing" in capsys.readouterr().err


def test_a_poison_that_does_not_end_stops_the_run_with_a_report(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step from 61 on is not finite, wherever the run goes. The run stops where it was healthy; another recipe goes on from
    there, with a count of rollbacks of its own."""
    honest = Trainer.forward_backward

    def forward_backward(self: Trainer, batch: Batch, scale: Any) -> StepStats:
        found = honest(self, batch, scale)
        return replace(found, loss=math.nan) if batch.first >= 8 * 60 else found

    monkeypatch.setattr(Trainer, "forward_backward", forward_backward)
    folder = train(recipe_file, runs, "guard.max_rollbacks=2", expected=1)
    journal = Journal.read(folder / "journal.jsonl")
    assert [(one.rate_factor, one.stops_run) for one in journal.rollbacks] == [(1.0, False), (0.9, False), (1.0, True)]
    actions = [row["action"] for row in incidents(folder) if row["action"] != "update skipped"]
    assert "; 16 batches skipped" in actions[0] and "; 40 batches skipped" in actions[1]
    assert actions[2] == "went back to step 40, run stopped"
    said = capsys.readouterr().err
    assert "it has not ended after 2 rollbacks" in said and "documents (" in said
    assert "a changed recipe goes on from step 40, to which the run went back" in said
    before = published(folder / "checkpoints")
    train(recipe_file, runs, "guard.max_rollbacks=2", expected=2)
    said = capsys.readouterr().err
    assert (
        "the guard stopped this recipe at step" in said and "nothing was changed since, so it would stop again" in said
    )
    assert published(folder / "checkpoints") == before, "each stop would go back to an older one"
    change = ["--set", "train.optimizer.learning_rate=0.002", "--accept-changes"]
    given = "guard.max_rollbacks=2", *SMALL
    values = [f"run.dir={runs}", f"train.steps={STEPS}", f"checkpoint.every={EVERY}", *given]
    sets = [part for value in values for part in ("--set", value)]
    assert run_command(["train", str(recipe_file), *sets, *change]) == 1
    said = capsys.readouterr().err
    assert "going on from step 40" in said and "learning rate is x" not in said
    monkeypatch.setattr(Trainer, "forward_backward", honest)
    assert run_command(["train", str(recipe_file), *sets, *change]) == 2, (
        "nothing is changed by what was accepted before"
    )
    assert run_command(["train", str(recipe_file), *sets, *change, "--set", "guard.max_rollbacks=3"]) == 0


def test_without_a_checkpoint_from_before_the_alarm_the_run_stops_at_the_oldest(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a slow alarm, whose onset is before all that are kept."""
    honest, real, calls = Trainer.forward_backward, rollback._checkpoint_before, []

    def forward_backward(self: Trainer, batch: Batch, scale: Any) -> StepStats:
        found = honest(self, batch, scale)
        return replace(found, loss=math.nan) if batch.first >= 8 * 60 else found

    def before(*given: Any) -> Any:
        calls.append(1)
        return real(*given) if len(calls) <= 2 else None

    monkeypatch.setattr(Trainer, "forward_backward", forward_backward)
    monkeypatch.setattr(rollback, "_checkpoint_before", before)
    folder = train(recipe_file, runs, "guard.max_rollbacks=2", expected=1)
    last, said = Journal.read(folder / "journal.jsonl").rollbacks[-1], capsys.readouterr().err
    steps = published(folder / "checkpoints")
    assert last.stops_run and [last.to] == steps and last.rate_factor == 1.0
    assert f"goes on from step {last.to}, to which the run went back, the oldest that is left" in said


def test_a_slow_alarm_goes_back_to_the_oldest_where_none_is_from_before_it(tmp_path: Path) -> None:
    for step in (50, 60, 70):
        save(tmp_path, step, {"model": {"a": torch.ones(3)}}, {}, keep=5)
    training: Any = SimpleNamespace(
        run=SimpleNamespace(checkpoints=tmp_path), trainer=SimpleNamespace(mesh=SINGLE_PROCESS),
        recipe=SimpleNamespace(guard=Guard()), horizon=SimpleNamespace(steps=160),
    )  # fmt: skip

    def goes_to(kind: IncidentKind, onset: int) -> int | None:
        found = rollback._checkpoint_before(training, Alarm(kind, onset, "it rises"))
        return None if found is None else found.step

    assert goes_to(DRIFT, 20) == 50 and goes_to(DRIFT, 75) == 60
    assert goes_to(SHIFT, 20) is None and goes_to(SHIFT, 55) == 50


def test_an_alarm_at_the_beginning_of_a_phase_says_so() -> None:
    phases = [Phase(0, (1, 1), (0, 0)), Phase(804, (1, 3), (402, 402), asked=1)]
    sizes = SimpleNamespace(first=lambda step: 8 * step, after=lambda step: 8 * step)
    training: Any = SimpleNamespace(
        horizon=SimpleNamespace(sizes=sizes), loader=SimpleNamespace(mixture=SimpleNamespace(phases=phases))
    )
    said = [rollback._phase_begun(training, Alarm(DRIFT, onset, "")) != "" for onset in (100, 101, 105, 106)]
    assert said == [False, True, True, False]
    assert "phase 2 of tokens.schedule" in rollback._phase_begun(training, Alarm(DRIFT, 103, ""))


def test_too_many_skipped_updates_stop_the_run(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty(monkeypatch, lambda call: call % 2 == 1)
    folder = train(recipe_file, runs, expected=1)
    assert [row["step"] for row in incidents(folder)] == list(range(2, 23, 2))
    assert "that was update 11 to be skipped (limit 10)" in capsys.readouterr().err


def test_without_rollbacks_the_run_stops(runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, lambda first: first in POISONED)
    folder = train(recipe_file, runs, "guard.roll_back=false", "guard.skip_spikes=false", expected=1)
    assert incidents(folder)[-1]["action"] == "run stopped" and not (folder / "journal.jsonl").exists()


def test_a_change_of_the_recipe_that_diverges_goes_back_to_the_change_and_stops(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped rate: the checkpoints from before it stay, and with the old recipe the run goes on as if nothing had been."""
    place = copied(runs, "straight")
    train(recipe_file, place, "train.schedule.kind=constant", "train.steps=60")
    straight = train(recipe_file, place, "train.schedule.kind=constant")
    first = copied(runs, "first")
    rate, right = "train.optimizer.learning_rate", load(straight).train.optimizer.learning_rate
    assert right is not None
    keys = "train.schedule.kind=constant", f"train.steps={STEPS}"
    sets = [part for value in (f"run.dir={first}", f"checkpoint.every={EVERY}", *SMALL, *keys)
            for part in ("--set", value)]  # fmt: skip

    def go_on(*given: str, flags: tuple[str, ...] = ("--accept-changes",), expected: int = 0) -> str:
        more = [part for value in given for part in ("--set", value)]
        assert run_command(["train", str(recipe_file), *sets, *more, *flags]) == expected
        return capsys.readouterr().err

    go_on("train.steps=60", flags=())
    at = 60
    said = go_on(f"{rate}=0.9", expected=1)
    assert f"it began after the recipe was changed at step {at}; the run went back to that step" in said
    folder = first / "small"
    saved = latest(folder / "checkpoints")
    assert saved is not None and saved.step == at
    assert f"another recipe ({rate}: 0.9 -> {right})" in go_on(flags=(), expected=2)
    said = go_on()  # the key is taken out: derived anew, as before
    assert f"going on from step {at} of {STEPS}" in said and "the learning rate is x" not in said
    assert weights(folder) == weights(straight)
    alarm = next(row for row in incidents(folder) if row["action"] == "went back to step 60, run stopped")
    assert run_command(["diagnose", str(folder), "--step", str(alarm["step"]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "unlike" and "the recipe was changed after step 60" in " ".join(found["findings"])


def test_rollbacks_after_hardware_faults_say_nothing_about_the_data() -> None:
    from types import SimpleNamespace

    from bessemer.guard.incidents import CORRUPTION
    from bessemer.guard.journal import Rollback
    from bessemer.train.rollback import _num_recent_rollbacks

    rollbacks = [
        Rollback(number, 10 * number, 5, what, 10 * number, (0, 0), 1.0, 1.0, 0)
        for number, what in enumerate((CORRUPTION.name, "spike", CORRUPTION.name), 1)
    ]
    training: Any = SimpleNamespace(
        trainer=SimpleNamespace(mesh=SimpleNamespace(broadcast=lambda value: value)),
        saver=SimpleNamespace(rollbacks_before_change=0), journal=SimpleNamespace(rollbacks=rollbacks),
    )  # fmt: skip
    assert _num_recent_rollbacks(training, 40) == 3, "all count towards the limit"
    assert _num_recent_rollbacks(training, 40, of_data=True) == 1
