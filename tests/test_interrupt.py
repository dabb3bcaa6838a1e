"""A stop that a library swallowed is not forgotten."""

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
            try:
                os.kill(os.getpid(), number)
                raise AssertionError("the signal did not arrive")
            except BaseException as error:  # as an import of optional parts does
                assert isinstance(error, KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                interrupt.check()
            interrupt.listen()
            interrupt.check()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        interrupt.ASKED.clear()
