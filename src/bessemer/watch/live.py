"""The live page: the fragments and figures that change, of one run or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from bessemer.errors import InputError
from bessemer.report import compare, results, story, summary
from bessemer.report.curves import DEFAULT_WINDOW, LISTED_INCIDENTS, WINDOWS, Detail, curves, smoothing_labels
from bessemer.report.data import Json, RunData, RunReader, file_version, number_or_0
from bessemer.report.parts import known, tile
from bessemer.report.template import PageParts, as_markup, environment
from bessemer.run import RunFolder
from bessemer.terminal import amount, duration
from bessemer.watch.status import RunStatus, status_of

FRAGMENTS = ("status", "frame", "story", "processes", "incidents", "samples", "wall_time", "log")
POINTS, SMOOTH_POINTS = 700, 300  # of a curve: a screen shows no more, and zooming asks for the part
LOG_LINES, LOG_BYTES = 40, 16_384
SAMPLES = 12
RATE_STEPS = 20  # whose median is the rate now


@dataclass(frozen=True)
class Watched:
    run: RunFolder
    name: str
    data: RunData
    status: RunStatus


class RunFollower:
    """Reads one run folder again when it has changed."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._reader, self._data = RunReader(run), RunData(run.path.name)
        self._version: tuple[Any, ...] = ()

    def version(self) -> tuple[Any, ...]:
        """Changes when something that is shown of the run does."""
        return (*self._reader.versions(), file_version(self.run.log), self.run.is_being_written())

    def watched(self) -> Watched:
        """The run now. A folder that holds nothing of a run yet is shown as empty."""
        if (version := self.version()) != self._version:
            self._version = version
            try:
                self._data = self._reader.read(is_growing=True)
            except InputError:
                self._data = RunData(self.run.path.resolve().name)
        return Watched(self.run, self._data.name, self._data, status_of(self.run, self._data))


@dataclass(frozen=True)
class View:
    """What a page asks for. run: which of several, None for all; window: place in the smoothing; steps: zoomed to."""

    run: int | None = None
    window: int = DEFAULT_WINDOW
    steps: tuple[float, float] | None = None


class LivePage:
    """Makes the page of some runs, and its changes."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self._followers = [RunFollower(run) for run in runs]
        self._environment, self._lock = environment(), RLock()
        self._made: dict[View, tuple[str, Json]] = {}

    def watched(self) -> list[Watched]:
        """The runs now, each with a name of its own."""
        with self._lock:
            found = [follower.watched() for follower in self._followers]
        names = compare.names_of([one.data for one in found], [one.run.path for one in found])
        return [Watched(one.run, name, one.data, one.status) for one, name in zip(found, names, strict=True)]

    def state(self, view: View, since: str = "") -> Json:
        """The fragments and the figures of a view, with their version; only the version where it is `since`.

        A page that nothing changes of costs a look at the files.
        """
        with self._lock:  # pages of the same view share one rendering
            version = f"{hash(tuple(follower.version() for follower in self._followers)) & (1 << 64) - 1:016x}"
            if version == since:
                return {"version": version}
            known = self._made.get(view)
            if known is None or known[0] != version:
                if len(self._made) > 16:
                    self._made.clear()
                known = self._made[view] = version, self._render(view)
            return {"version": version, **known[1]}

    def document(self, view: View) -> str:
        """The whole page, with its fragments filled in, so that something is seen before any script has run."""
        return self._environment.get_template("live.html").render(**self.state(view), markup=as_markup)

    def _render(self, view: View) -> Json:
        runs = self.watched()
        if view.run is None and len(runs) > 1:
            return self._side_by_side(runs, view)
        return self._one(runs, runs[view.run or 0], view)

    def _one(self, runs: Sequence[Watched], one: Watched, view: View) -> Json:
        data = one.data
        figures = curves(data, _detail(view))
        values = {
            "data": data, "status": one.status, "tiles": _tiles(one), "headline": summary.headline(data), "results": results,
            "tell": story.story, "log": log_tail(one.run.log), "listed": LISTED_INCIDENTS, "runs": _links(runs, view),
            "samples": list(reversed(data.samples[-SAMPLES:])),
        }  # fmt: skip
        return self._filled(FRAGMENTS, values, figures, len(data.train), one.name, [one])

    def _side_by_side(self, runs: Sequence[Watched], view: View) -> Json:
        datas, names = [one.data for one in runs], [one.name for one in runs]
        values = {
            "headline": compare.headline(datas, names), "runs": _links(runs, view),
            "differences": compare.differences(datas, names), "same": compare.same(datas, names),
            "outcome": compare.results(datas, names),
        }  # fmt: skip
        figures = compare.overlaid(datas, names, _detail(view))
        steps = max(len(data.train) for data in datas)
        return self._filled(("side_by_side", "frame"), values, figures, steps, " and ".join(names), runs)

    def _filled(
        self, fragments: Sequence[str], values: Json, figures: Sequence[Json], num_steps: int, name: str, runs: Sequence[Watched]
    ) -> Json:  # fmt: skip
        page = PageParts()
        values |= {"page": page, "markup": as_markup, "figures": figures, "default_window": DEFAULT_WINDOW,
                   "smoothing": smoothing_labels(num_steps)}  # fmt: skip
        html = {
            name: self._environment.get_template(f"live/{name}.html").render(**values).strip() for name in fragments
        }
        live = [one.status.is_live for one in runs]
        last = max((one.status.last or 0.0 for one in runs), default=0.0)
        return {"name": name, "fragments": html, "sections": page.sections, "figures": {one["id"]: one for one in figures},
                "live": any(live), "last": last}  # fmt: skip


def _detail(view: View) -> Detail:
    return Detail(POINTS, SMOOTH_POINTS, (WINDOWS[view.window],), view.steps)


def _links(runs: Sequence[Watched], view: View) -> list[Json]:
    """The runs, as links between their pages; nothing for one alone."""
    if len(runs) == 1:
        return []
    return [
        {"place": str(place), "name": one.name, "status": one.status, "is_shown": view.run == place}
        for place, one in enumerate(runs)
    ]


def _tiles(one: Watched) -> list[Json]:
    """Up to six key figures of a run that goes on."""
    data, status = one.data, one.status
    loss, tokens, rate = data.train.last("loss"), data.train.last("tokens"), rate_now(one)
    bits, memory = summary.score(data, "bits_per_byte"), data.peak_memory
    since = ", since the last start" if number_or_0(data.times, "sessions") > 1 else ""
    steps = f"of {status.steps:,}, {status.share:.0%}" if status.steps else ""
    found = [
        tile("Step", f"{status.step:,}", steps),
        tile("Time left", known(status.seconds_left, duration),
             "" if status.dollars_left is None else f"${status.dollars_left:,.2f}"),
        tile("Training loss", known(loss, "{:.3f}".format), data.loss_unit),
        tile("Held-out bits per byte", f"{bits:.3f}") if bits is not None else None,
        tile(f"Tokens per second{' lately' * (status.state == 'training')}", known(rate, amount),
             f"{amount(tokens)} tokens so far" if tokens else ""),
        tile("Memory", f"{memory / 1e9:.2f} GB", f"at the peak{since}") if memory else None,
    ]  # fmt: skip
    return [one for one in found if one is not None]


def rate_now(one: Watched) -> float | None:
    """Tokens per second: the median of the last lines of a run that trains, of all of another one, as in its report."""
    if one.status.state != "training":
        return one.data.train.median("tokens_per_second")
    recent = one.data.train.columns.get("tokens_per_second", np.empty(0))[-RATE_STEPS:]
    return float(np.nanmedian(recent)) if np.isfinite(recent).any() else None


def log_tail(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(file.seek(0, 2) - LOG_BYTES, 0))
            return file.read().decode("utf-8", errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []
