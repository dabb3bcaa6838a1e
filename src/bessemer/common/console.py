"""What a person sees while a command works: lines and progress bars on standard error.

Results go to standard output, so that they can be piped; everything here but warnings is silent for `--json`, and bars
are drawn only on a terminal. Elsewhere, as in a log file, long work prints a line now and then.
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
    from rich.table import Table

Advance = Callable[..., None]

FIRST_LINE_SECONDS, LINE_SECONDS = 10.0, 30.0  # of work, without a terminal, before a line about it, and between two
BAR_SECONDS = 0.5  # between two drawings in a notebook
# Environment variables, so that worker processes follow their parent: silent, and a file that lines are copied to.
QUIET, LOG = "BESSEMER_QUIET", "BESSEMER_LOG"
# Values of QUIET: nothing is shown or logged; warnings alone are shown, and all is logged.
SILENT, FOR_JSON = "1", "json"


class LastingStream:
    """Standard error that outlives its reader: what cannot be written is dropped, and the work goes on."""

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
    """Open the standard streams that were closed for this process, as a daemon's are, and have standard error last.

    Otherwise the next file would take the number of a closed stream, and libraries would write their messages into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 (for as long as the process lives)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    _make_lasting()


def _make_lasting() -> None:
    if not isinstance(sys.stderr, LastingStream):
        sys.stderr = cast(TextIO, LastingStream(sys.stderr))


def discard(stream: TextIO) -> None:
    """Send what is still to be written to a stream that cannot be written nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def console(silent_for: Sequence[str] = (SILENT, FOR_JSON)) -> Console:
    """Return a console on standard error. silent_for: values of QUIET with which it shows nothing."""
    from rich.console import Console

    _make_lasting()
    return Console(stderr=True, highlight=False, quiet=os.environ.get(QUIET) in silent_for)


def say(line: str = "") -> None:
    """One line for the person; rich markup is allowed, escape what comes from data."""
    line = printable(line)
    console().print(line, soft_wrap=True)
    if LOG in os.environ:
        from rich.text import Text

        log(Text.from_markup(line).plain)


def log(line: str) -> None:
    """Append one line, with its time (UTC), to the file that LOG names; a file that cannot be written stops nothing."""
    if (place := os.environ.get(LOG)) and line.strip() and os.environ.get(QUIET) != SILENT:
        with suppress(OSError), open(place, "a", encoding="utf-8", errors="replace") as file:
            file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}  {printable(redact(line)).strip()}\n")


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Copy the lines that are shown to a file, and the error that ends the block."""
    with variable(LOG, str(path.absolute())):
        try:
            yield
        except BaseException as error:
            log("stopped" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__)
            raise


def warn(line: str) -> None:
    """One line the person should not miss, `--json` or not."""
    from rich.markup import escape

    line = printable(redact(line))
    console(silent_for=(SILENT,)).print(f"[yellow]warning:[/] {escape(line)}", soft_wrap=True)
    log(f"warning: {line}")


def silence_libraries() -> None:
    """Keep what libraries warn their own developers of (deprecations, torch's hints) off the screen, unless Python was asked
    for warnings (-W, PYTHONWARNINGS)."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch(\.|$)")


@contextmanager
def progress(what: str, total: int | None = None, unit: str = "", begun: int = 0) -> Iterator[Advance]:
    """Show how far work is: a bar on a terminal or in a notebook; elsewhere a line after FIRST_LINE_SECONDS and then every
    LINE_SECONDS, while nothing within it reports. Yields `advance(amount, note="", total=None)`; a total takes the place of the
    one before.

    Args:
        what: The work; "" reports nothing, because other processes report it.
        total: In `unit`s; None when unknown.
        unit: "" for work of which nothing is counted, which a terminal does not show.
        begun: How much of it was done before.
    """
    shown, work = console(), _Work(what, total, unit, begun)
    if shown.quiet or (sys.stderr.isatty() and not unit):
        yield work.advance
    elif sys.stderr.isatty():
        from rich.live import Live

        with Live(get_renderable=work.bar, console=shown, refresh_per_second=10, transient=True):
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
    """Around work with an environment variable, here and in processes that are started."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def silent() -> AbstractContextManager[None]:
    """Around work whose lines are of no interest: nothing is shown."""
    return variable(QUIET, SILENT)


def _notebook_display() -> Any:
    """Return a place in the output of a notebook that can be written again."""
    from IPython.display import display

    return display({"text/html": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]


class _Work:
    """How far work is, as a line, and as a bar before the line."""

    def __init__(self, what: str, total: int | None, unit: str, begun: int) -> None:
        self._what, self._total, self._unit, self._begun = what, total, unit, begun
        self._done, self._note, self._started = float(begun), "", monotonic()

    def advance(self, amount: float = 1, note: str = "", total: int | None = None) -> None:
        self._done, self._note, self._total = self._done + amount, note or self._note, total or self._total

    def bar(self) -> Table:
        """Return one line of a terminal; where it is narrow, the end is cut."""
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table
        from rich.text import Text

        row = Table.grid(
            Column(width=8), Column(no_wrap=True, overflow="ellipsis", ratio=1), padding=(0, 1), expand=True
        )
        row.add_row(ProgressBar(self._total, self._done, pulse=not self._total), Text(self._line()))
        return row

    def report(self, ended: threading.Event, display: Any) -> None:
        """Print a line now and then, or draw a bar on the display of a notebook, until the work has ended."""
        wait = BAR_SECONDS if display is not None else FIRST_LINE_SECONDS
        while not ended.wait(wait):
            if display is not None:
                bar = f'<progress value="{self._done}" max="{self._total}"></progress> {html.escape(self._line())}'
                display.update({"text/html": bar}, raw=True)
                continue
            if _open[-1] is self and self._what:
                console().print(f"  {self._line()}", soft_wrap=True, markup=False)
                log(self._line())
            wait = LINE_SECONDS

    def _line(self) -> str:
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


_open: list[_Work] = []  # the work that is under way; the last one reports


def text_table(titles: Sequence[str], rows: Iterable[Sequence[str]], align: str = "l") -> list[str]:
    """The lines of a table, two spaces between columns as wide as their widest cell. align: l or r for each column; r for those
    that are not named."""
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
    """A number as a person reads it: 950, 12.3k, 4.56M, 1.20B, 3.00T, 1,650T."""
    if 0.9995e15 <= abs(number) < 1e18:
        return f"{number / 1e12:,.0f}T"
    for unit, suffix in ((1e18, ""), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * unit:  # 999.97 billion in three digits are a trillion
            return f"{number / unit:.3g}{suffix}" if suffix else f"{number:.3g}"
    return f"{number:.0f}" if abs(number) >= 10 or number == int(number) else f"{number:.2g}"


def percent(share: float) -> str:
    """A share as a person reads it: 12%, under 1%."""
    return f"{share:.0%}" if share >= 0.01 else "under 1%"


def score(number: float) -> str:
    """A score: 0.2500, 202.1000, or of a perplexity without bounds 5.16M."""
    return f"{number:.4f}" if abs(number) < 1e5 else amount(number) if abs(number) < 1e15 else f"{number:.1e}"


def interval(low: float | None, high: float | None) -> str:
    """The ends of a score's interval; empty for one that is not known."""
    return "" if low is None or high is None else f"{score(low)} to {score(high)}"


def printable(text: str) -> str:
    """Text without control characters, which a document could send to the terminal, but for line ends and tabs."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else " " for sign in text)


def one_line(text: str) -> str:
    """Printable text on one line, with single spaces."""
    return " ".join(printable(text).split())


def counted(number: int, noun: str) -> str:
    """A number of things: 1 document, 12,345 documents, 2 processes."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def size(num_bytes: float) -> str:
    """Bytes as a person reads them: 512 B, 3.4 MB, 1.2 GB (decimal)."""
    for unit, suffix in ((1e18, "EB"), (1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.1f} {suffix}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as a person reads them: 8.2 s, 4 min 10 s, 3 h 05 min, 12.4 days, 3.7 years, 15 years."""
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
    """Seconds of a step as a person reads them: 12.3 µs, 15.5 ms, 1.40 s."""
    if seconds >= 60:
        return duration(seconds)
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} µs"


def rate(per_second: float) -> str:
    """FLOP/s as a person reads them: 203 GFLOP/s, 989 TFLOP/s."""
    if per_second >= 0.9995e15:
        return f"{per_second / 1e12:,.0f} TFLOP/s"
    return f"{per_second / 1e12:.3g} TFLOP/s" if per_second >= 1e12 else f"{per_second / 1e9:.3g} GFLOP/s"
