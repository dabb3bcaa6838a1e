"""The live page: the fragments and figures that change, of one run or of several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from typing import Any

from bessemer.common.errors import InputError
from bessemer.report import compare, results, story, summary
from bessemer.report.curves import DEFAULT_WINDOW, LISTED_INCIDENTS, curves, smoothing_labels
from bessemer.report.data import Json, RunData, RunReader, file_version
from bessemer.report.run_status import RunStatus, status_of
from bessemer.report.template import PageParts, as_markup, environment
from bessemer.run.directory import RunDirectory

FRAGMENTS = ("status", "frame", "story", "processes", "incidents", "samples", "wall_time", "log")
POINTS = 700  # of a curve: a screen shows no more
LOG_LINES, LOG_BYTES = 40, 16_384
SAMPLES = 12


@dataclass(frozen=True)
class Watched:
    run: RunDirectory
    name: str
    data: RunData
    status: RunStatus


class RunFollower:
    """Reads one run folder again when it has changed."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._reader, self._data = RunReader(run), RunData(run.path.name)
        self._version: tuple[Any, ...] = ()

    def version(self) -> tuple[Any, ...]:
        """Changes when something that is shown of the run does."""
        return (*self._reader.versions(), file_version(self.run.log), self.run.is_locked())

    def watched(self) -> Watched:
        """The run now. A folder that holds nothing of a run yet is shown as empty."""
        if (version := self.version()) != self._version:
            self._version = version
            try:
                self._data = self._reader.read(is_growing=True)
            except InputError:
                self._data = RunData(self.run.path.resolve().name)
        return Watched(self.run, self._data.name, self._data, status_of(self.run, self._data))


def watched(followers: Iterable[RunFollower]) -> list[Watched]:
    """The runs now, each with a separate name."""
    found = [follower.watched() for follower in followers]
    names = compare.names_of([one.data for one in found], [one.run.path for one in found])
    return [replace(one, name=name) for one, name in zip(found, names, strict=True)]


class LivePage:
    """Makes the page of some runs, and its changes."""

    def __init__(self, runs: Sequence[RunDirectory]) -> None:
        self._followers = [RunFollower(run) for run in runs]
        self._environment, self._lock = environment(), RLock()
        self._made: dict[int | None, tuple[str, Json]] = {}

    def state(self, run: int | None = None, since: str = "") -> Json:
        """The fragments and the figures of a run, or of all side by side, with a version; the version alone where it is `since`.

        A page that nothing changes of costs a look at the files.
        """
        with self._lock:  # pages of the same run share one rendering
            version = f"{hash(tuple(follower.version() for follower in self._followers)) & (1 << 64) - 1:016x}"
            if version == since:
                return {"version": version}
            if self._made.get(run, ("", {}))[0] != version:
                runs = watched(self._followers)
                is_one = run is not None or len(runs) == 1
                self._made[run] = version, self._one(runs, run) if is_one else self._side_by_side(runs)
            return {"version": version, **self._made[run][1]}

    def document(self, run: int | None = None) -> str:
        """The whole page, with its fragments filled in, so that something is seen before any script has run."""
        return self._environment.get_template("live.html").render(**self.state(run), markup=as_markup)

    def _one(self, runs: Sequence[Watched], run: int | None) -> Json:
        one = runs[run or 0]
        data = one.data
        values = {
            "data": data, "status": one.status, "tiles": summary.tiles(data), "headline": summary.headline(data),
            "results": results, "tell": story.story, "log": log_tail(one.run.log), "listed": LISTED_INCIDENTS,
            "runs": runs if len(runs) > 1 else [], "shown": run, "samples": list(reversed(data.samples[-SAMPLES:])),
        }  # fmt: skip
        return self._filled(FRAGMENTS, values, curves(data, POINTS), len(data.train), one.name, [one])

    def _side_by_side(self, runs: Sequence[Watched]) -> Json:
        datas, names = [one.data for one in runs], [one.name for one in runs]
        values = {
            "headline": compare.headline(datas, names), "runs": runs,
            "differences": compare.differences(datas, names),
            "outcome": compare.results(datas, names),
        }  # fmt: skip
        figures = compare.overlaid(datas, names, POINTS)
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


def log_tail(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(file.seek(0, 2) - LOG_BYTES, 0))
            return file.read().decode("utf-8", errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []
