import io
import re
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from bessemer.common import console


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (console.amount(0), "0"), (console.amount(7.25), "7.2"), (console.amount(950), "950"), (console.amount(12_345), "12.3k"),
        (console.amount(1.384e6), "1.38M"), (console.amount(6.74e9), "6.74B"), (console.amount(2e12), "2T"),
        (console.size(512), "512 B"), (console.size(3.44e6), "3.4 MB"), (console.size(1.2e9), "1.2 GB"),
        (console.duration(8.21), "8.2 s"), (console.duration(250), "4 min 10 s"), (console.duration(299.6), "5 min 00 s"), (console.duration(11_100), "3 h 05 min"),
        (console.counted(1, "step"), "1 step"), (console.counted(1200, "step"), "1,200 steps"), (console.counted(2, "batch"), "2 batches"),
        (console.duration(86_400 * 12.4), "12.4 days"), (console.duration(86_400 * 365.25 * 15), "15 years"),
        (console.duration(86_400 * 1361), "3.7 years"),
        (console.rate(2.03e11), "203 GFLOP/s"), (console.rate(9.89e14), "989 TFLOP/s"),
    ],
)  # fmt: skip
def test_numbers_are_formatted_for_people(shown: str, wanted: str) -> None:
    assert shown == wanted


class Terminal(io.StringIO):
    """Standard error that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_bars_show_rate_and_time_left_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(console.QUIET, raising=False)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    for stream, drawn in ((Terminal(), True), (io.StringIO(), False)):
        with redirect_stderr(stream), console.progress("reading", 4_000_000, "B") as advance:
            for _ in range(4):
                advance(1_000_000, note="a note")
        text = stream.getvalue()
        assert ("reading" in text and "/s" in text and "left" in text and "a note" in text) == drawn


def test_a_bar_is_one_line_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(console.QUIET, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with redirect_stderr(stream), console.progress("training", 40_000_000, "tok", begun=10_000_000) as advance:
        for _ in range(3):
            advance(9_000_000, note="loss 10.512  bpb 12.345 and more than fits here")
            time.sleep(0.15)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    drawn = re.split(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]", plain)
    assert max(map(len, drawn)) <= 80
    bars = [line for line in drawn if "training" in line]
    assert all(part in bars[-1] for part in ("92%", "tok/s", "left", "loss 10.512  bpb"))


def test_without_a_terminal_long_work_prints_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(console.QUIET, raising=False)
    monkeypatch.setattr(console, "FIRST_LINE_SECONDS", 0.05)
    monkeypatch.setattr(console, "LINE_SECONDS", 0.05)
    stream = io.StringIO()
    with redirect_stderr(stream):

        def until(text: str) -> None:
            deadline = time.monotonic() + 30
            while text not in stream.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert text in stream.getvalue()

        with console.progress("tokens"):
            until("  tokens, ")
            with console.progress("encoding", 4_000_000, "B", begun=2_000_000) as advance:
                until("  encoding: 50% of 4.0 MB, ")
                advance(1_000_000, note="a [note]")
                until("  encoding: 75% of 4.0 MB, ")
                until("left, a [note]")
                before = stream.getvalue().count("tokens, ")
                seen = stream.getvalue().count("encoding")
                while stream.getvalue().count("encoding") < seen + 3:
                    time.sleep(0.01)
                assert stream.getvalue().count("tokens, ") <= before + 1, "the innermost speaks"
            with console.progress("counting", None, "documents") as advance:
                advance(7)
                until("  counting: 7 documents, ")
        assert "so far" in stream.getvalue()
        stream.truncate(0)
        time.sleep(0.2)
        assert stream.getvalue() == "", "done is done"


def test_quiet_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    with redirect_stderr(stream):
        monkeypatch.setenv(console.QUIET, "1")
        console.say("something")
        console.warn("something")
        with console.progress("reading", 2, "tok") as advance:
            advance(1)
        assert stream.getvalue() == ""


def test_for_json_warnings_are_shown_and_everything_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    with redirect_stderr(stream):
        monkeypatch.setenv(console.QUIET, console.FOR_JSON)
        monkeypatch.setenv(console.LOG, str(tmp_path / "log.txt"))
        console.say("something done")
        console.warn("something odd")
        assert "something odd" in stream.getvalue() and "done" not in stream.getvalue()
        logged = (tmp_path / "log.txt").read_text()
        assert "something done" in logged and "warning: something odd" in logged
        with console.silent():
            console.warn("of a trial")
        assert "of a trial" not in stream.getvalue() + (tmp_path / "log.txt").read_text()


def test_names_cannot_send_control_sequences_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(console.LOG, str(tmp_path / "log.txt"))
    console.say("read \x1b[31mred\x1b]0;title\a.md")
    console.warn("not read: \x1b[31mred.md")
    for shown in (capsys.readouterr().err, (tmp_path / "log.txt").read_text()):
        assert "red" in shown and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
