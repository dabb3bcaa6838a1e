import threading
import time

import pytest

from bessemer.corpus import engine
from bessemer.errors import BessemerError, InputError


def test_failures_of_the_engine_become_one_line() -> None:
    def fail() -> None:
        raise ValueError("first\nsecond")

    with pytest.raises(BessemerError, match=r"^corpus: the work failed: ValueError: first$"):
        engine.run(fail)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), InputError("what, where")])
def test_errors_that_speak_for_themselves_pass(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        engine.run(fail)
    assert caught.value is error


def test_an_interrupt_ends_the_wait_and_tells_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def work() -> None:
        while not engine.STOP.is_set():
            time.sleep(0.01)
        ended.set()

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bessemer.interrupt.check", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.run(work)
    assert ended.is_set()
