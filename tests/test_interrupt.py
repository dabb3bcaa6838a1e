"""A stop that a library swallowed is not forgotten."""

import contextlib
import os
import signal

import pytest

from bessemer import interrupt


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
