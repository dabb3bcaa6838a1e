"""Writes report.html, the page of a run: one file that needs nothing but a browser.

Its text and tables are there without JavaScript; the curves need it.
"""

from __future__ import annotations

from pathlib import Path

from bessemer.report import corpus, parts, plan_page, planned, quality, results, summary, tokens
from bessemer.report import data as run_data
from bessemer.report.curves import curves, smoothing_control
from bessemer.report.data import RunData
from bessemer.report.parts import Block
from bessemer.run import RunFolder


def write(run: RunFolder) -> Path:
    """Write `run.report` from what lies in the run folder, atomically, and return where it lies.

    Raises InputError when the folder holds nothing of a run.
    """
    planned.write(run)
    return parts.write_page(run.report, render(run_data.read(run)))


def render(data: RunData) -> str:
    """The page as HTML."""
    return parts.render_page(
        data.name, "run report", summary.headline(data), sections(data),
        origin=summary.origin(data), notes=data.notes, tiles=summary.tiles(data),
    )  # fmt: skip


def sections(data: RunData) -> list[Block]:
    """What the page shows, in its order; what a run lacks is empty."""
    return [
        _curves(data), summary.plan_section(data), results.wall_time(data), plan_page.run_section(data),
        results.processes(data), results.samples(data), results.fill_ins(data), results.classes(data), corpus.section(data),
        quality.section(data), tokens.section(data), results.incidents(data), results.export(data), results.stages(data),
        results.environment(data), results.recipe(data),
    ]  # fmt: skip


def _curves(data: RunData) -> Block:
    drawn = curves(data)
    if not drawn:
        return {}
    return parts.section(
        "curves", "Curves", parts.finding(summary.curve_finding(data)), smoothing_control(len(data.train)),
        parts.plots(*drawn, wide=drawn[0]["id"] == "loss"), summary.validations(data),
    )  # fmt: skip
