"""The page of a plan, with its table and figures (plan/figures.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bessemer.common.console import amount, duration
from bessemer.plan import figures
from bessemer.plan.plan_result import PlanResult
from bessemer.plan.search import layout_line
from bessemer.plan.tables import plan_rows
from bessemer.report import parts
from bessemer.report.data import Json, as_object
from bessemer.report.parts import Block, Figure
from bessemer.report.template import render_page


def render(plan: PlanResult, *, name: str) -> str:
    """Return the page of a planned job as HTML."""
    job, bill = plan.job, plan.bill
    money = f"${amount(bill.cost)}" if bill.cost is not None else f"{amount(bill.device_hours)} device-hours"
    headline = (
        f"{job.model.size} on {amount(plan.goal.tokens)} tokens are expected to take "
        f"{duration(plan.expected.seconds.expected)} and {money} on {job.cluster.devices:,} {job.cluster.device.name}."
    )
    notes = [] if plan.fits else [f"This layout does not fit: {'; '.join(plan.excess)}."]
    origin = f"{layout_line(job)}; framework profile {job.framework.name}"
    return compose(name, figures.figure_series(plan), headline, origin, notes, rows=plan_rows(plan))


def render_local(plan: Json, rows: Mapping[str, str], *, name: str) -> str:
    """Return the page of a plan for this machine as HTML.

    Args:
        plan: Content of plan.json.
        rows: The plan's values as text, by the label that the command line prints.
        name: Name of the run, for the title.
    """
    held = {part: value for part, value in as_object(plan.get("memory_bytes_per_device")).items() if part != "total"}
    bar = {"name": "peak", "parts": held, "total": sum(held.values()), "fits": bool(plan.get("fits")), "own": True}
    origin = f"step time: {plan['step_seconds_from']}"
    headline = (
        f"{plan['model_size']} on {amount(plan['tokens'])} tokens take {duration(plan['seconds'])} on {plan['device']}."
    )
    notes = [] if plan.get("fits") else ["This device has less free memory than a step takes."]
    return compose(name, {"memory": {"groups": [{"kind": "part", "bars": [bar]}]}}, headline, origin, notes, rows=rows)


def compose(
    name: str, drawn: Json, headline: str = "", origin: str = "", notes: Sequence[str] = (), **table: object
) -> str:
    """Return the page of a plan as HTML.

    Args:
        name: Name of the plan, for the title.
        drawn: Data of the figures, as `figures.figure_series` of the planner returns it. Sections without data are left
            out.
        headline: Sentence at the top.
        origin: Sentence on where the values come from.
        notes: Sentences with warnings.
        table: `rows`, the plan's values as text by label.
    """
    values = {"drawn": drawn, "layouts": layouts, **table}
    return render_page("plan.html", name, "plan", headline, values, origin=origin, notes=notes)


def layouts(search: Json) -> Figure | None:
    """Return the figure of speed over memory for the layouts that fit; None for fewer than two.

    `search` has the layouts as `rows` and the memory of a device in bytes as `capacity`.
    """
    rows = search["rows"]
    if len(rows) < 2:
        return None

    def points(chosen: list[Json], name: str, ink: str, **style: Any) -> Block:
        x, y = [row["memory"] / 1e9 for row in chosen], [row["tokens_per_second_per_device"] for row in chosen]
        hover = "%{y:,.0f} tokens/s, %{x:.1f} GB<br>%{text}<extra></extra>"
        return parts.trace(name, x, y, ink, hover=hover, text=[row["layout"] for row in chosen], **style)

    front = sorted((row for row in rows if row["front"]), key=lambda row: row["memory"])
    best = points(front, "fastest for their memory", "source-1", marks=7)
    traces = [
        points([row for row in rows if not row["front"]], "others that fit", "raw", lines=False, marks=5),
        {**best, "line": {"width": 1.5, "shape": "hv"}},
    ]
    if own := [row for row in rows if row["own"]]:
        traces.append(points(own[:1], "this plan", "accent", lines=False, marks=12, symbol="diamond"))
    capacity = search["capacity"] / 1e9
    x = parts.axis("GB on the fullest device", range=[0, 1.04 * capacity])
    y = parts.axis("tokens/s a device", rangemode="tozero", tickformat=",.3~s")
    return parts.figure(
        "layouts", "Layouts that fit", traces, x, y, shapes=[parts.vertical(capacity, "dash")], hovermode="closest",
        note="Dashed: the device's memory.",
    )  # fmt: skip
