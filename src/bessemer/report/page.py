"""Writer of report.html, the report of a run in one self-contained file.

Text and tables are visible without JavaScript; the curves need it.
"""

from __future__ import annotations

from pathlib import Path

from bessemer.common.console import warn
from bessemer.report import planned, summary
from bessemer.report.curves import curves
from bessemer.report.data import RunData, read
from bessemer.report.run_status import RunStatus, read_status
from bessemer.report.template import render_page, write_page
from bessemer.run.directory import RunDirectory


def write(run: RunDirectory) -> Path:
    """Write the report of a run atomically, and return its path.

    Raises InputError if the folder holds no file of a run.
    """
    data = read(run)
    for note in data.notes:
        warn(f"{run.path}: {note}")
    planned.write(run, data)
    return write_page(run.report, render(data, read_status(run, data)))


def render(data: RunData, status: RunStatus | None = None) -> str:
    """Return the report as HTML; sections without data are left out."""
    values = {"data": data, "drawn": curves(data), "planned": planned.rows(planned.compare(data))}
    return render_page(
        "run.html", data.name, "run report", summary.headline(data), values, origin=summary.origin(data), notes=data.notes,
        tiles=summary.tiles(data), status=status,
    )  # fmt: skip
