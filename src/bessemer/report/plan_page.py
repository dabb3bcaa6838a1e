"""The page of a plan, with the three figures of plan/pictures.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bessemer.common.console import amount, duration
from bessemer.plan import pictures
from bessemer.plan.outcome import PlanResult
from bessemer.plan.search import layout_line
from bessemer.plan.tables import plan_rows, what_if_columns
from bessemer.report import plan_figures
from bessemer.report.data import Json, as_object
from bessemer.report.template import render_page, write_page


def write(path: Path, of: PlanResult, **options: Any) -> Path:
    """Write the page of a planned job, atomically; options as in `render`."""
    return write_page(path, render(of, **options))


def render(of: PlanResult, *, name: str, beside: Sequence[PlanResult] = (), titles: Sequence[str] = ()) -> str:
    """The page as HTML. beside: what-ifs, with their titles."""
    columns = what_if_columns([of, *beside], ["as asked", *titles]) if beside else []
    names = [name for name in (columns[0] if columns else ()) if name]
    what_if = ["", *(f"n|{column['']}" for column in columns)], [[row, *(one[row] for one in columns)] for row in names]
    return compose(
        name, pictures.pictures(of), headline=_headline(of), rows=plan_rows(of), what_if=what_if,
        notes=[] if of.verdict.fits else ["This layout does not fit: " + "; ".join(of.verdict.reasons) + "."],
        origin=f"{layout_line(of.job)}; framework profile {of.job.framework.name}",
    )  # fmt: skip


def write_local(path: Path, plan: Json, rows: dict[str, str], *, name: str) -> Path:
    """Write the page of a plan of this machine, atomically: what its plan.json has. rows: as a person reads it."""
    held = {part: value for part, value in as_object(plan.get("memory_bytes_per_device")).items() if part != "total"}
    bar = {"name": "peak", "parts": held, "total": sum(held.values()), "fits": bool(plan.get("fits")), "own": True}
    drawn = {"memory": {"groups": [{"kind": "part", "bars": [bar]}]}}
    html = compose(
        name, drawn, origin=f"step time: {plan['step_seconds_from']}", rows=rows,
        headline=f"{amount(plan['parameters'])} parameters on {amount(plan['tokens'])} tokens take "
        f"{duration(plan['seconds'])} on {plan['device']}.",
        notes=[] if plan.get("fits") else ["This device has less free memory than a step takes."],
    )  # fmt: skip
    return write_page(path, html)


def compose(
    name: str, drawn: Json, *, headline: str = "", origin: str = "", notes: Sequence[str] = (),
    rows: dict[str, str] | None = None,
    what_if: tuple[Sequence[str], Sequence[Sequence[str]]] = ((), ()),
) -> str:  # fmt: skip
    """The page from plain values; what is missing or empty leaves its section out. drawn: the series of plan/pictures.py;
    what_if: columns and rows of the table of plans side by side."""
    values = {"drawn": drawn, "rows": rows, "what_if": what_if, "figures": plan_figures}
    return render_page("plan.html", name, "plan", headline, values, origin=origin, notes=notes)


def _headline(of: PlanResult) -> str:
    job, bill = of.job, of.bill
    money = f"${amount(bill.cost)}" if bill.cost is not None else f"{amount(bill.device_hours)} device-hours"
    return (
        f"{amount(job.model.parameters)} parameters on {amount(of.goal.tokens)} tokens are expected to take "
        f"{duration(of.expected.seconds.expected)} and {money} on {job.cluster.devices:,} {job.cluster.device.name}."
    )
