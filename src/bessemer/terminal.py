"""What a person sees while a command works: lines and progress bars on standard error.

Results go to standard output, so that they can be piped; everything here is silent for `--json`, and bars
are drawn only on a terminal.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

Advance = Callable[..., None]

QUIET = "BESSEMER_QUIET"  # an environment variable, so that worker processes are silent with their parent


def console() -> Console:
    """A console on standard error; silent when the command was asked for JSON."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, quiet=os.environ.get(QUIET) == "1")


def coloured() -> bool:
    """Whether results on standard output may have colours: on a terminal that has them, unless NO_COLOR is set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(line: str = "") -> None:
    """One line for the person; rich markup is allowed, escape what comes from data."""
    console().print(line, soft_wrap=True)


def warn(line: str) -> None:
    """One line the person should not miss."""
    from rich.markup import escape

    console().print(f"[yellow]warning:[/] {escape(line)}", soft_wrap=True)


def silence_libraries() -> None:
    """Keep what libraries warn their own developers of (deprecations, torch's hints) off the screen, unless Python was asked
    for warnings (-W, PYTHONWARNINGS)."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch(\.|$)")


@contextmanager
def progress(what: str, total: int | None, unit: str) -> Iterator[Advance]:
    """A bar with rate and time left. Yields `advance(amount, note="")`; `total` is in `unit`s, None when unknown."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    shown = console()
    if shown.quiet or not sys.stderr.isatty():
        yield lambda amount=1, note="": None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%" if total else "{task.completed:,.0f}"),
        _rate_column(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    with Progress(*columns, console=shown, transient=True) as bars:
        task = bars.add_task(what, total=total, note="")

        def advance(amount: float = 1, note: str = "") -> None:
            bars.update(task, advance=amount)
            if note:
                bars.update(task, note=note)

        yield advance


def _rate_column(unit: str) -> ProgressColumn:
    from rich.progress import ProgressColumn
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            if not speed:
                return Text(f"- {unit}/s", style="cyan")
            return Text(f"{size(speed) if unit == 'B' else f'{amount(speed)} {unit}'}/s", style="cyan")

    return RateColumn()


def amount(number: float) -> str:
    """A number as a person reads it: 950, 12.3k, 4.56M, 1.20B, 3.00T."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.0f}" if abs(number) >= 10 or number == int(number) else f"{number:.2g}"


def size(num_bytes: float) -> str:
    """Bytes as a person reads them: 512 B, 3.4 MB, 1.2 GB (decimal)."""
    for unit, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.1f} {suffix}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as a person reads them: 8.2 s, 4 min 10 s, 3 h 05 min, 12.4 days, 15 years."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    if seconds < 172_800:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    days = seconds / 86_400
    return f"{days:.1f} days" if days < 1000 else f"{days / 365.25:,.0f} years"


def rate(per_second: float) -> str:
    """FLOP/s as a person reads them: 203 GFLOP/s, 989 TFLOP/s."""
    return f"{per_second / 1e12:.3g} TFLOP/s" if per_second >= 1e12 else f"{per_second / 1e9:.3g} GFLOP/s"
