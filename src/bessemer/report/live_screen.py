"""Terminal view of active runs, for `bessemer watch --terminal`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from time import sleep

import numpy as np

from bessemer.common.console import amount, one_line
from bessemer.report.data import Column, RunReader, as_text
from bessemer.report.live_page import WatchedRun, log_tail, read_runs
from bessemer.report.metrics import LOSS, METRICS, SCORES
from bessemer.report.story import story
from bessemer.run.directory import RunDirectory

EVERY_SECONDS = 2.0
EVENTS, LOG_LINES = 6, 8
LEVELS = "▁▂▃▄▅▆▇█"


def follow(runs: Sequence[RunDirectory]) -> None:
    """Show runs in the terminal until none is active, or until Ctrl-C. Print them once if standard output is no terminal."""
    readers = [RunReader(run) for run in runs]
    if not sys.stdout.isatty():
        print("\n\n".join(map(screen, read_runs(readers))))
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    live = Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="crop")
    with suppress(KeyboardInterrupt), live:
        while True:
            found = read_runs(readers)
            live.update(Text("\n\n".join(map(screen, found))), refresh=True)
            if not any(one.status.is_live for one in found):
                return
            sleep(EVERY_SECONDS)


def screen(one: WatchedRun) -> str:
    """Return the state of a run as lines of text."""
    data, status = one.data, one.status
    lines = [f"{one.name}  {status.sentence}"]
    if status.steps:
        done = round(status.share * 40)
        lines.append(f"  {'█' * done}{'░' * (40 - done)} {status.share:.0%}")
    for metric in (LOSS, *SCORES[:2], *METRICS):
        if (values := metric.values(data)) is not None:
            last = values[np.isfinite(values)][-1]
            now = f"{amount(last) if last >= 1000 else f'{last:.4g}'}{metric.axis.get('ticksuffix', '')}"
            lines.append(f"  {metric.title:<23} {now:>9}  {sparkline(values)}")
    blocks = (
        [f"  {one_line(when)}: {one_line(what)}" for when, what in story(data)[-EVENTS:]],
        [f"  note: {one_line(note)}" for note in data.notes],
        [
            f"  sample of step {sample['step']:,}: {one_line(as_text(sample, 'prompt') + as_text(sample, 'text'))[:200]}"
            for sample in data.samples[-1:]
        ],
        [f"  | {one_line(line)}" for line in log_tail(one.run.log)[-LOG_LINES:]],
    )
    lines += [line for block in blocks if block for line in ("", *block)]
    return "\n".join(lines)


def sparkline(values: Column, width: int = 40) -> str:
    """Draw a curve as one line of text, from the means of equal intervals between its minimum and maximum."""
    y = values[np.isfinite(values)]
    if not len(y):
        return ""
    shown = np.array([part.mean() for part in np.array_split(y, min(width, len(y)))])
    level = (shown - shown.min()) / (np.ptp(shown) or 1.0) * (len(LEVELS) - 1)
    return "".join(LEVELS[round(float(one))] for one in level)
