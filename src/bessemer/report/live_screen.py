"""`bessemer watch --terminal`: the same as text, for a machine one reaches by a terminal alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import sleep

import numpy as np

from bessemer.common.console import amount, one_line, size
from bessemer.report.curves import smooth
from bessemer.report.data import Column, as_text
from bessemer.report.live_page import RunFollower, WatchedRun, log_tail, read_runs
from bessemer.report.metrics import LOSS, METRICS, SCORES
from bessemer.report.story import story
from bessemer.run.directory import RunDirectory

EVERY_SECONDS = 2.0
EVENTS, LOG_LINES = 6, 8
METRIC = {metric.key: metric for metric in METRICS}
ROWS = (
    ("loss", LOSS, ""),
    *(("held out", score.metric, f" {score.unit}") for score in SCORES[:2]),
    ("gradient", METRIC["grad_norm"], ""),
    ("tokens/s", METRIC["tokens_per_second"], ""),
)
LEVELS = "▁▂▃▄▅▆▇█"


def follow(runs: Sequence[RunDirectory]) -> None:
    """Show runs until none goes on, or until Ctrl-C; once where standard output is no terminal."""
    followers = [RunFollower(run) for run in runs]
    if not sys.stdout.isatty():
        print("\n\n".join(map(screen, read_runs(followers))))
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="crop") as shown:
        while True:
            found = read_runs(followers)
            shown.update(Text("\n\n".join(map(screen, found))), refresh=True)
            if not any(one.status.is_live for one in found):
                return
            try:
                sleep(EVERY_SECONDS)
            except KeyboardInterrupt:
                return


def screen(one: WatchedRun) -> str:
    """A run as text."""
    data, status = one.data, one.status
    lines = [f"{one.name}  {status.sentence}"]
    if status.steps:
        done = round(status.share * 40)
        lines.append(f"  {'█' * done}{'░' * (40 - done)} {status.share:.0%}")
    for label, metric, unit in ROWS:
        values = metric.values(data)
        if values is not None:
            last = values[np.isfinite(values)][-1]
            now = amount(last) if last >= 1000 else f"{last:.4g}"
            lines.append(f"  {label:<9} {now:>8}  {sparkline(values, metric.lines == 'train')}{unit}")
    if data.peak_memory:
        lines.append(f"  {'memory':<9} {size(data.peak_memory):>8}")
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


def sparkline(values: Column, is_smoothed: bool, width: int = 40) -> str:
    """A curve in one line of text, from its lowest to its highest value."""
    if is_smoothed and len(values) > 2 * width:
        values = smooth(values, max(len(values) // width, 1))
    y = values[np.isfinite(values)]
    if not len(y):
        return ""
    shown = np.interp(np.linspace(0, len(y) - 1, min(width, len(y))), np.arange(len(y)), y)
    level = (shown - shown.min()) / (np.ptp(shown) or 1.0) * (len(LEVELS) - 1)
    return "".join(LEVELS[round(float(one))] for one in level)
