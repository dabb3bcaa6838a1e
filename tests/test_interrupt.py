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


def test_a_swallowed_interrupt_is_remembered() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
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
