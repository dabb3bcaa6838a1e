"""Stop requests anywhere: finished work is saved, no later stage runs, and the exit code is 75."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bessemer.check import trial
from bessemer.cli import run_command
from bessemer.common import interrupt
from bessemer.common.errors import Stopped
from bessemer.evaluate import final
from bessemer.export import export_run
from bessemer.recipe import load
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_json, read_json_lines
from bessemer.train import loop
from bessemer.train.run_spec import RunSpec
from bessemer.train.state import Saver
from bessemer.train.stop import StopSignal
from tests.newest import training_result

SETS = (
    "train.steps=6",
    "train.validate_every=3",
    "checkpoint.every=4",
    "evaluate.ngram=false",
    "report.tensorboard=false",
)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Restore the signal handlers after the test."""
    before = {number: signal.getsignal(number) for number in interrupt.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    interrupt.RECEIVED.clear()


def run(recipe_file: Path, runs: Path, *sets: str) -> int:
    given = [part for one in (f"run.dir={runs}", *SETS, *sets) for part in ("--set", one)]
    return run_command(["run", str(recipe_file), *given])


def results(folder: Path) -> tuple[Any, ...]:
    """Return what a run trained, validated and scored."""
    rows = read_json_lines(folder / "metrics.jsonl")
    validations = [(row["step"], row["loss"]) for row in rows if row["kind"] == "validation"]
    kinds = sorted(row["kind"] for row in rows if row["kind"] in ("time", "memory"))
    return training_result(folder), validations, kinds, read_json(folder / "evaluation.json")["bits_per_byte"]


@pytest.fixture(scope="module")
def whole(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """The results of an uninterrupted run."""
    import shutil

    place = tmp_path_factory.mktemp("whole")
    shutil.copytree(prepared / "runs", place / "runs")
    assert run(prepared / "small.toml", place / "runs") == 0
    return results(place / "runs" / "small")


def at_step(patch: pytest.MonkeyPatch, step: int, number: int) -> None:
    honest = getattr(loop, "completed_steps")  # noqa: B009

    def completed_steps(training: Any, stop: Any) -> Iterator[Any]:
        for one in honest(training, stop):
            if one.state.step == step:
                signal.raise_signal(number)
            yield one

    patch.setattr(loop, "completed_steps", completed_steps)


def before(owner: Any, name: str, call: int = 1) -> Callable[[pytest.MonkeyPatch, int], None]:
    """Send a signal when a function is called for the nth time."""

    def set_up(patch: pytest.MonkeyPatch, number: int) -> None:
        honest, calls = getattr(owner, name), list[int]()

        def called(*arguments: Any, **named: Any) -> Any:
            calls.append(1)
            if len(calls) == call:
                signal.raise_signal(number)
            return honest(*arguments, **named)

        patch.setattr(owner, name, called)

    return set_up


def swallowed(patch: pytest.MonkeyPatch, number: int) -> None:
    """Make a library swallow the KeyboardInterrupt, in the last stage but one."""
    honest = getattr(export_run, "export")  # noqa: B009

    def export(*arguments: Any) -> Any:
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)
        return honest(*arguments)

    patch.setattr(export_run, "export", export)


def saved_twice(patch: pytest.MonkeyPatch, number: int) -> None:
    """Make the scheduler repeat its signal while the checkpoint is saved."""
    at_step(patch, 5, number)
    before(Saver, "save_now")(patch, number)


PLACES: dict[str, tuple[Callable[[pytest.MonkeyPatch, int], None], int, list[str]]] = {
    "the last step": (lambda patch, number: at_step(patch, 6, number), 6, []),
    "a validation": (before(loop, "validate", 1), 3, []),
    "two signals": (saved_twice, 5, []),
    "the evaluation": (before(final, "validate"), 6, ["train"]),
    "the export": (swallowed, 6, ["train", "evaluate", "export"]),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.fault(9)
def test_a_stop_anywhere_saves_and_does_not_change_the_results(
    place: str, whole: tuple[Any, ...], runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = interrupt.SIGNALS[list(PLACES).index(place) % len(interrupt.SIGNALS)]
    set_up, step, made = PLACES[place]
    with monkeypatch.context() as patch:
        set_up(patch, number)
        assert run(recipe_file, runs) == 75
    folder = runs / "small"
    assert checkpoint_steps(folder / "checkpoints")[-1] == step, "no finished step is lost"
    done = {row["name"] for row in read_json(folder / "stages.json")["stages"]}
    assert [name for name in ("train", "evaluate", "export", "report") if name in done] == made
    assert run(recipe_file, runs) == 0
    assert results(folder) == whole
    assert (folder / "export" / "config.json").exists() and (folder / "report.html").exists()


def test_a_stop_before_the_first_step_of_a_continued_training_saves_nothing(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute the score of the initial weights again with the same command."""
    assert run(recipe_file, runs) == 0
    sets = ("run.name=next", f"train.start={runs / 'small'}", "export.hf=false")
    with monkeypatch.context() as patch:
        before(loop, "validate")(patch, signal.SIGTERM)
        assert run(recipe_file, runs, *sets) == 75
    assert not checkpoint_steps(runs / "next" / "checkpoints")
    assert run(recipe_file, runs, *sets) == 0
    validations = [
        row["step"] for row in read_json_lines(runs / "next" / "metrics.jsonl") if row["kind"] == "validation"
    ]
    assert validations == [0, 3, 6]


@pytest.mark.long
def test_ranks_stopped_in_their_last_step_stop_together(runs: Path, recipe_file: Path, tmp_path: Path) -> None:
    """One of two ranks gets the signal: both stop, and the resumed training ends like an uninterrupted one."""
    sets = [*SETS, f"run.dir={runs}", "parallel.shard=2"]
    given = [part for one in sets for part in ("--set", one)]
    assert run_command(["train", str(recipe_file), *given]) == 0
    straight = training_result(runs / "small")
    spec = RunSpec.read(RunDirectory(runs / "small"))
    laid_out = trial.lay_out(tmp_path, "stopped", spec, runs / "small" / "tokens")
    trial.train(laid_out, load(laid_out.recipe), 6)
    assert training_result(laid_out.path) == straight
    rows = read_json_lines(laid_out.metrics)
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [3, 6]
    assert [row["step"] for row in rows if row["kind"] == "resumed"] == [6]


@pytest.mark.parametrize("number", interrupt.SIGNALS)
def test_a_swallowed_interrupt_is_remembered(number: int) -> None:
    interrupt.listen()
    interrupt.check()
    with contextlib.suppress(KeyboardInterrupt):  # as the import of optional packages may
        os.kill(os.getpid(), number)
        raise AssertionError("the signal did not arrive")
    with pytest.raises(KeyboardInterrupt):
        interrupt.check()
    interrupt.listen()
    interrupt.check()


def test_a_repeated_signal_does_not_interrupt_the_stop() -> None:
    interrupt.listen()
    done = []

    def stopped() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGTERM)
            raise Stopped("stopped") from None
        finally:
            signal.raise_signal(signal.SIGHUP)
            done.append("cleaned up")

    with pytest.raises(Stopped):
        stopped()
    assert done
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt.listen()
    signal.raise_signal(signal.SIGHUP)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.requested is None
    interrupt.check()


def test_a_crash_is_reported_before_a_stop_signal_ends_the_process() -> None:
    interrupt.handle(signal.SIG_DFL)
    with pytest.raises(RuntimeError), StopSignal():
        raise RuntimeError("connection closed by peer")
    signal.raise_signal(signal.SIGTERM)
