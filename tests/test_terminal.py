import io
import sys

import pytest

from bessemer import terminal


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (terminal.amount(0), "0"), (terminal.amount(7.25), "7.2"), (terminal.amount(950), "950"), (terminal.amount(12_345), "12.3k"),
        (terminal.amount(1.384e6), "1.38M"), (terminal.amount(6.74e9), "6.74B"), (terminal.amount(2e12), "2T"),
        (terminal.size(512), "512 B"), (terminal.size(3.44e6), "3.4 MB"), (terminal.size(1.2e9), "1.2 GB"),
        (terminal.duration(8.21), "8.2 s"), (terminal.duration(250), "4 min 10 s"), (terminal.duration(11_100), "3 h 05 min"),
        (terminal.duration(86_400 * 12.4), "12.4 days"), (terminal.duration(86_400 * 365.25 * 15), "15 years"),
        (terminal.rate(2.03e11), "203 GFLOP/s"), (terminal.rate(9.89e14), "989 TFLOP/s"),
    ],
)  # fmt: skip
def test_numbers_as_a_person_reads_them(shown: str, wanted: str) -> None:
    assert shown == wanted


class Terminal(io.StringIO):
    """Standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_bars_show_rate_and_time_left_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(terminal.QUIET, raising=False)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    for stream, drawn in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with terminal.progress("reading", 4_000_000, "B") as advance:
            for _ in range(4):
                advance(1_000_000, note="a note")
        text = stream.getvalue()
        assert ("reading" in text and "/s" in text and "left" in text and "a note" in text) == drawn


def test_quiet_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv(terminal.QUIET, "1")
    terminal.say("something")
    terminal.warn("something")
    with terminal.progress("reading", 2, "tok") as advance:
        advance(1)
    assert stream.getvalue() == ""
