"""Console output: lines, warnings and progress bars on standard error, and formats of numbers.

Results go to standard output, so that they can be piped. Under `--json` everything here except warnings is silent. A
line changes only on a terminal; elsewhere, such as in a log file, long work prints a line from time to time.
"""

from __future__ import annotations

import html
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO, cast

from bessemer.common.errors import redact

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[..., None]

FIRST_LINE_SECONDS, LINE_SECONDS = 10.0, 30.0  # progress lines without a terminal: the first, and the next ones
BAR_SECONDS = 0.5  # time between updates of a bar in a notebook
# Environment variables, inherited by worker processes: the silence level, and a file to which lines are copied
QUIET, LOG = "BESSEMER_QUIET", "BESSEMER_LOG"
# Values of QUIET: SILENT shows and logs nothing; FOR_JSON shows only warnings and logs everything.
SILENT, FOR_JSON = "1", "json"


class LastingStream:
    """A wrapper of standard error that drops output that cannot be written, so that the work continues."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # a closed pipe, terminal or file, a full disk
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def keep_streams() -> None:
    """Open standard streams that are closed, as in a daemon, and make standard error ignore write errors.

    Otherwise the next opened file would get the number of a closed stream, and libraries would write messages into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 (for as long as the process lives)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    sys.stderr = cast(TextIO, LastingStream(sys.stderr))


def discard(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def console(silent_for: Sequence[str] = (SILENT, FOR_JSON)) -> Console:
    """Return a console on standard error.

    It prints nothing if the environment variable BESSEMER_QUIET has one of the values in `silent_for`.
    """
    from rich.console import Console

    stream = cast(TextIO, LastingStream(sys.stderr))
    return Console(file=stream, stderr=True, highlight=False, quiet=os.environ.get(QUIET) in silent_for)


def say(line: str = "") -> None:
    """Print a line of rich markup and copy it to the log. The caller must escape text that comes from data."""
    line = printable(line)
    console().print(line, soft_wrap=True)
    if LOG in os.environ:
        from rich.text import Text

        log(Text.from_markup(line).plain)


def log(line: str) -> None:
    """Append a line with its time (UTC) to the file that `log_to` set, if any. Write errors are ignored."""
    if (path := os.environ.get(LOG)) and line.strip() and os.environ.get(QUIET) != SILENT:
        with suppress(OSError), open(path, "a", encoding="utf-8", errors="replace") as file:
            file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}  {printable(redact(line)).strip()}\n")


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Copy the lines printed within the block, and an exception that ends it, to a file."""
    with variable(LOG, str(path.absolute())):
        try:
            yield
        except BaseException as error:
            log("stopped" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__)
            raise


def warn(line: str) -> None:
    """Print a warning and copy it to the log; `--json` does not suppress it."""
    from rich.markup import escape

    line = printable(redact(line))
    console(silent_for=(SILENT,)).print(f"[yellow]warning:[/] {escape(line)}", soft_wrap=True)
    log(f"warning: {line}")


def silence_libraries() -> None:
    """Hide warnings meant for developers of libraries, unless Python was started with a warning option."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch(\.|$)")


@contextmanager
def progress(what: str, total: int | None = None, unit: str = "", begun: int = 0) -> Iterator[Advance]:
    """Show the progress of work: a changing line on a terminal, a bar in a notebook, else a line from time to time.

    Without a terminal, the first line comes after FIRST_LINE_SECONDS and the next every LINE_SECONDS, unless nested work
    reports. Yields `advance(amount, note="", total=None)`; a new total replaces the previous one.

    Args:
        what: Name of the work; with "", no lines are printed.
        total: Total amount in `unit`s; None if unknown.
        unit: Unit of the amounts; "" for work without one, which is not shown on a terminal.
        begun: Amount that was done before this call.
    """
    shown, work = console(), _Work(what, total, unit, begun)
    if shown.quiet or (sys.stderr.isatty() and not unit):
        yield work.advance
    elif sys.stderr.isatty():
        from rich.live import Live
        from rich.text import Text

        def line() -> Text:
            return Text(f"  {work.line()}", no_wrap=True, overflow="ellipsis")

        with Live(get_renderable=line, console=shown, refresh_per_second=10, transient=True):
            yield work.advance
    else:
        ended, display = threading.Event(), _notebook_display() if shown.is_jupyter and total else None
        thread = threading.Thread(target=work.report, args=(ended, display), daemon=True)
        _open.append(work)
        thread.start()
        try:
            yield work.advance
        finally:
            ended.set()
            thread.join()
            _open.remove(work)
            if display is not None:
                display.update({"text/html": ""}, raw=True)


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the block, for this process and processes that it starts."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def silent() -> AbstractContextManager[None]:
    """Suppress console output within the block."""
    return variable(QUIET, SILENT)


def _notebook_display() -> Any:
    """Return an IPython display handle for HTML in a notebook's output, which can be updated."""
    from IPython.display import display

    return display({"text/html": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]


class _Work:
    """The progress of one call of `progress`: the amount done and its speed, printed from time to time."""

    def __init__(self, what: str, total: int | None, unit: str, begun: int) -> None:
        self._what, self._total, self._unit, self._begun = what, total, unit, begun
        self._done, self._note, self._started = float(begun), "", monotonic()

    def advance(self, amount: float = 1, note: str = "", total: int | None = None) -> None:
        self._done, self._note, self._total = self._done + amount, note or self._note, total or self._total

    def report(self, ended: threading.Event, display: Any) -> None:
        """Print progress lines, or update a bar in a notebook, until the work has ended."""
        wait = BAR_SECONDS if display is not None else FIRST_LINE_SECONDS
        while not ended.wait(wait):
            if display is not None:
                bar = f'<progress value="{self._done}" max="{self._total}"></progress> {html.escape(self.line())}'
                display.update({"text/html": bar}, raw=True)
                continue
            if _open[-1] is self and self._what:
                console().print(f"  {self.line()}", soft_wrap=True, markup=False)
                log(self.line())
            wait = LINE_SECONDS

    def line(self) -> str:
        """Return the amount done, the speed and the remaining time as text."""
        seconds = monotonic() - self._started
        per_second = (self._done - self._begun) / max(seconds, 1e-9)
        parts = [self._what]
        if self._total:
            parts[0] += f": {self._done / self._total:.0%} of {_of_unit(self._total, self._unit)}"
        elif self._done:
            parts[0] += f": {_of_unit(self._done, self._unit)}"
        if per_second > 0:
            parts.append(f"{_of_unit(per_second, self._unit)}/s")
        if per_second > 0 and self._total:
            parts.append(f"{duration(max(self._total - self._done, 0) / per_second)} left")
        else:
            parts.append(f"{duration(seconds)} so far")
        return ", ".join([*parts, *filter(None, [self._note])])


_open: list[_Work] = []  # nested work in progress; only the innermost reports


def text_table(titles: Sequence[str], rows: Iterable[Sequence[str]], align: str = "l") -> list[str]:
    """Return the lines of a table with two spaces between columns.

    `align` has l or r for each column; missing letters mean r.
    """
    table = [list(row) for row in (titles, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = ["<" if side == "l" else ">" for side in align.ljust(len(widths), "r")]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in table
    ]


def _of_unit(number: float, unit: str) -> str:
    return size(number) if unit == "B" else f"{amount(number)} {unit}"


def amount(number: float) -> str:
    """Format a number for reading: 950, 12.3k, 4.56M, 1.20B, 3.00T, 1,650T."""
    if 0.9995e15 <= abs(number) < 1e18:
        return f"{number / 1e12:,.0f}T"
    for unit, suffix in ((1e18, ""), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * unit:  # 999.97 billion rounds to a trillion in three digits
            return f"{number / unit:.3g}{suffix}" if suffix else f"{number:.3g}"
    return f"{number:.0f}" if abs(number) >= 10 or number == int(number) else f"{number:.2g}"


def percent(share: float) -> str:
    """Format a share for reading: 12%, under 1%."""
    return f"{share:.0%}" if share >= 0.01 else "under 1%"


def score(number: float) -> str:
    """Format a score: 0.2500, 202.1000, or 5.16M for a very large perplexity."""
    return f"{number:.4f}" if abs(number) < 1e5 else amount(number) if abs(number) < 1e15 else f"{number:.1e}"


def interval(low: float | None, high: float | None) -> str:
    """Format the ends of a score's interval; empty if unknown."""
    return "" if low is None or high is None else f"{score(low)} to {score(high)}"


def printable(text: str) -> str:
    """Replace control characters, which could control the terminal, by spaces. Newlines and tabs stay."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else " " for sign in text)


def one_line(text: str) -> str:
    """Return printable text on one line, with single spaces."""
    return " ".join(printable(text).split())


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: 1 document, 12,345 documents, 2 processes."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def size(num_bytes: float) -> str:
    """Format a number of bytes in decimal units: 512 B, 3.4 MB, 1.2 GB."""
    for unit, suffix in ((1e18, "EB"), (1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.1f} {suffix}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Format seconds for reading: 8.2 s, 4 min 10 s, 3 h 05 min, 12.4 days, 3.7 years, 15 years."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    seconds = round(seconds)
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    if seconds < 172_800:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    days = seconds / 86_400
    years = days / 365.25
    return f"{days:.1f} days" if days < 1000 else f"{years:.1f} years" if years < 9.95 else f"{years:,.0f} years"


def step_time(seconds: float) -> str:
    """Format the seconds of a step: 12.3 µs, 15.5 ms, 1.40 s."""
    if seconds >= 60:
        return duration(seconds)
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} µs"


def rate(per_second: float) -> str:
    """Format FLOP/s: 203 GFLOP/s, 989 TFLOP/s."""
    if per_second >= 0.9995e15:
        return f"{per_second / 1e12:,.0f} TFLOP/s"
    return f"{per_second / 1e12:.3g} TFLOP/s" if per_second >= 1e12 else f"{per_second / 1e9:.3g} GFLOP/s"
