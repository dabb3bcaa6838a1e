"""The live page: HTML fragments and figures of one active run, or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from bessemer.report import comparison
from bessemer.report.curves import curves
from bessemer.report.data import Json, RunData, RunReader, file_version
from bessemer.report.run_status import RunStatus, read_status
from bessemer.report.template import environment
from bessemer.run.directory import RunDirectory

FRAGMENTS: tuple[str, ...] = ("status", "frame", "story", "processes", "incidents", "samples", "wall_time", "log")
POINTS = 700  # per curve; a screen shows no more
LOG_LINES, LOG_BYTES = 40, 16_384
SAMPLES = 12


@dataclass(frozen=True)
class WatchedRun:
    """The current state of a run on the live page, under a name unique to the page."""

    run: RunDirectory
    name: str
    data: RunData
    status: RunStatus


def read_runs(readers: Sequence[RunReader]) -> list[WatchedRun]:
    """Read the current state of the runs. A folder without any file of a run is shown as empty."""
    datas = [reader.read(is_growing=True) for reader in readers]
    named = comparison.name_runs(datas, [reader.run.path for reader in readers])
    return [
        WatchedRun(one.run, name, data, read_status(one.run, data))
        for one, (name, data) in zip(readers, named.items(), strict=True)
    ]


class LivePage:
    """The live page of some runs, rendered again when their files change."""

    def __init__(self, runs: Sequence[RunDirectory]) -> None:
        self._readers = [RunReader(run) for run in runs]
        self._lock = RLock()
        self._made: dict[int | None, tuple[str, Json]] = {}

    def state(self, run: int | None = None, since: str = "") -> Json:
        """Return a dict with the version of the page and its content, as `_make` returns it.

        `run` is the index of the run to show; None shows all side by side. The version changes if a file of a run does. If
        it still equals `since`, only the version is returned.
        """
        with self._lock:  # clients of the same page share one rendering
            files = [(*one.versions(), file_version(one.run.log), one.run.is_locked()) for one in self._readers]
            version = f"{hash(tuple(files)) & (1 << 64) - 1:016x}"
            if version == since:
                return {"version": version}
            if self._made.get(run, ("", {}))[0] != version:
                self._made[run] = version, self._make(run)
            return {"version": version, **self._made[run][1]}

    def document(self, run: int | None = None) -> str:
        """Return the whole HTML page of one run (None: of all), readable before any script runs."""
        return environment().get_template("live.html").render(self.state(run))

    def _make(self, number: int | None) -> Json:
        """Return the content of the page for the run with index `number`, or for all side by side if it is None.

        The dict has the HTML `fragments` and the `figures` by name, `sections` for the navigation, the `name` of the runs,
        `live` (True if one is active) and `last`, the time of the last progress.
        """
        page: Json = {"sections": [], "figures": []}
        runs = read_runs(self._readers)
        shown, fragments = runs if number is None else [runs[number]], FRAGMENTS
        values: Json = {"runs": runs, "shown": number, "page": page, **vars(shown[0])}
        if len(shown) > 1:
            fragments = ("side_by_side", "frame")
            values |= comparison.page_values({run.name: run.data for run in shown}, POINTS)
        else:
            data = shown[0].data
            values |= {"figures": curves(data, POINTS), "num_steps": len(data.train)}
            values |= {"log": log_tail(shown[0].run.log), "samples": data.samples[: -SAMPLES - 1 : -1]}
        html = {name: environment().get_template(f"live/{name}.html").render(values).strip() for name in fragments}
        return {
            "name": " and ".join(run.name for run in shown), "fragments": html, "sections": page["sections"],
            "figures": {figure["id"]: figure for figure in values["figures"]}, "live": any(run.status.is_live for run in shown),
            "last": max(run.status.last or 0.0 for run in shown),
        }  # fmt: skip


def log_tail(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(file.seek(0, 2) - LOG_BYTES, 0))
            return file.read().decode("utf-8", errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []
