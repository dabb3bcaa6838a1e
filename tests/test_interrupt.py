"""A stop that a library swallowed is not forgotten."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from bessemer import interrupt
from bessemer.errors import Stopped
from bessemer.recipe import load
from bessemer.run import RunFolder
from bessemer.stages import Session
from bessemer.train.loop import StopSignal


def test_a_swallowed_interrupt_is_remembered() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        interrupt.listen()
        interrupt.check()
        for number in before:
            with contextlib.suppress(KeyboardInterrupt):  # as the import of optional parts may
                os.kill(os.getpid(), number)
                raise AssertionError("the signal did not arrive")
            with pytest.raises(KeyboardInterrupt):
                interrupt.check()
            interrupt.listen()
            interrupt.check()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        interrupt.ASKED.clear()


def test_the_signal_that_the_command_received_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command passes every signal on to its processes as SIGUSR1."""
    monkeypatch.setenv(interrupt.NODE, str(tmp_path))
    assert interrupt.signal_name(signal.SIGUSR1) == "SIGUSR1"
    with pytest.raises(KeyboardInterrupt):
        interrupt.stop(signal.SIGTERM, None)
    interrupt.name_signal(tmp_path)
    assert interrupt.signal_name(signal.SIGUSR1) == "SIGTERM"
    assert interrupt.signal_name(signal.SIGINT) == "SIGINT"


def test_a_stop_before_the_first_checkpoint_says_that_nothing_is_saved(tmp_path: Path) -> None:
    def stopped() -> str:
        raise KeyboardInterrupt

    session = Session(load("demo"), RunFolder(tmp_path))
    for name in ("corpus", "tokens"):
        session.stage(name, lambda: "done")
    with pytest.raises(
        Stopped, match="stopped in train; corpus, tokens are kept, no step of the training is saved yet"
    ):
        session.stage("train", stopped)


def test_a_signal_that_is_repeated_after_a_stop_does_not_cover_what_the_stop_said() -> None:
    def stopped_twice() -> None:
        try:
            with StopSignal() as stop:
                signal.raise_signal(signal.SIGUSR1)
                assert stop.received() == "SIGUSR1"
                raise Stopped("everything is saved")
        finally:
            signal.raise_signal(signal.SIGUSR1)

    def interrupting(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupting)
    try:
        with pytest.raises(Stopped, match="everything is saved"):
            stopped_twice()
        signal.signal(signal.SIGUSR1, interrupting)
        with StopSignal():
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
