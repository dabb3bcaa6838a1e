"""A plan as a page of its own.

The page stands in the frame of the run report (frame.html): it loads nothing, its tables and bars are there without JavaScript,
and only its figures need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bessemer.errors import InputError
from bessemer.plan import here
from bessemer.plan import pictures as series
from bessemer.plan.assumptions import assumptions
from bessemer.plan.outcome import Outcome
from bessemer.plan.tables import layout_line, plan_rows, what_if_columns
from bessemer.plan.what_if import Point
from bessemer.report import page
from bessemer.report import planning_figures as figures
from bessemer.report import planning_parts as parts
from bessemer.report.data import table, text
from bessemer.run import write_atomic
from bessemer.terminal import amount, duration, rate, size


def writable(path: Path) -> Path:
    """The path, if a page can be written there. Raises InputError."""
    if path.is_dir():
        raise InputError(f"--html: {path} is a folder; give a file, for example {path / 'plan.html'}")
    if not path.parent.is_dir():
        raise InputError(f"--html: {path.parent}: no such folder to write the page in; make it first")
    return path


def write(
    path: Path, of: Outcome, *, name: str, curve: Sequence[Point] = (), beside: Sequence[Outcome] = (), titles: Sequence[str] = ()
) -> Path:  # fmt: skip
    """Write an outcome's page, atomically. curve: other numbers of devices; beside: what-ifs, with their titles."""
    html = render(of, name=name, curve=curve, beside=beside, titles=titles)
    write_atomic(writable(path), html.encode("utf-8", errors="replace"))
    return path


def render(
    of: Outcome, *, name: str, curve: Sequence[Point] = (), beside: Sequence[Outcome] = (), titles: Sequence[str] = ()
) -> str:  # fmt: skip
    """The page as HTML."""
    columns = what_if_columns([of, *beside], ["as asked", *titles]) if beside else []
    facts = {
        "headline": _headline(of),
        "origin": f"{layout_line(of.job)}; habits of {of.job.stack.name}",
        "notes": [] if of.verdict.fits else ["This layout does not fit: " + "; ".join(of.verdict.reasons) + "."],
        "tiles": _tiles(of),
        "facts": [{"name": key, "value": value} for key, value in plan_rows(of).items()],
        "verdict": parts.capitalised(of.standing.sentence),
        "assumptions": [asdict(one) for one in assumptions(of)],
        "columns": columns,
    }
    return compose(name, facts, series.pictures(of, curve))


def write_here(path: Path, plan: dict[str, Any], rows: dict[str, str], *, name: str) -> Path:
    """Write the page of a plan of this machine, atomically: what its plan.json has. rows: as a person reads it."""
    held = {part: value for part, value in table(plan.get("memory_bytes_per_device")).items() if part != "total"}
    bar = {"name": "peak", "parts": held, "total": sum(held.values()), "fits": bool(plan.get("fits")), "own": True}
    standing = table(plan.get("chinchilla"))
    facts = {
        "headline": f"{amount(plan['parameters'])} parameters on {amount(plan['tokens'])} tokens take "
        f"{duration(plan['seconds'])} on {plan['device']}.",
        "origin": f"step time: {plan['step_seconds_from']}",
        "notes": [] if plan.get("fits") else ["This device has less free memory than a step takes."],
        "facts": [{"name": key, "value": value} for key, value in rows.items()],
        "verdict": parts.capitalised(text(standing.get("sentence"))),
    }
    drawn = {"memory": {"groups": [{"kind": "part", "bars": [bar]}]}, **table(here.drawn(plan).get("pictures"))}
    write_atomic(writable(path), compose(name, facts, drawn).encode("utf-8", errors="replace"))
    return path


def compose(name: str, facts: dict[str, Any], drawn: dict[str, Any]) -> str:
    """The page from plain values; what is missing or empty leaves its section out.

    facts: headline, origin, notes, tiles, facts, verdict, assumptions, columns; drawn: the series of plan/pictures.py.
    """
    found = {
        "roofline": figures.roofline(table(drawn.get("roofline"))),
        "surface": figures.loss_surface(table(drawn.get("surface"))),
        "checkpoints": figures.checkpoints(table(drawn.get("checkpoints"))),
        "layouts": figures.layouts(table(drawn.get("layouts"))),
    }
    devices = figures.by_devices(table(drawn.get("devices")))
    columns = facts.get("columns") or []
    context: dict[str, Any] = {
        "name": name,
        "kind": "plan",
        "headline": facts.get("headline", ""),
        "origin": facts.get("origin", ""),
        "notes": facts.get("notes", []),
        "tiles": facts.get("tiles", []),
        "facts": facts.get("facts", []),
        "verdict": facts.get("verdict", ""),
        "assumptions": facts.get("assumptions", []),
        "what_if": {
            "titles": [column[""] for column in columns],
            "rows": [{"name": key, "cells": [column[key] for column in columns]} for key in columns[0] if key],
        }
        if columns
        else {},
        "memory": parts.memory_rows(table(drawn.get("memory"))),
        "step": parts.step_lanes(table(drawn.get("timeline"))),
        "pipeline": parts.pipeline_part(table(drawn.get("pipeline"))),
        "layouts": parts.layout_rows(table(drawn.get("layouts"))),
        "devices": parts.device_rows(table(drawn.get("devices"))),
        "device_figures": devices,
        "laws": parts.law_rows(drawn.get("laws")),
        "beyond": parts.beyond(table(drawn.get("surface"))),
        "saving": parts.saving(table(drawn.get("checkpoints"))),
        "figure": found,
    }
    present = {
        "facts": ("The plan", context["facts"]),
        "what-if": ("What if", context["what_if"]),
        "memory": ("Memory", context["memory"]),
        "step": ("One step", context["step"]),
        "pipeline": ("Pipeline", context["pipeline"]),
        "layouts": ("Layouts", context["layouts"]),
        "devices": ("Devices", context["devices"]),
        "scaling": ("Scaling laws", found["surface"] or context["laws"]),
        "saving": ("Checkpoints", context["saving"]),
        "assumptions": ("Assumptions", context["assumptions"]),
    }
    shown = {key: title for key, (title, content) in present.items() if content}
    drawings = [figure for figure in (*found.values(), *devices) if figure]
    return page.compose(
        "planning.html", {**context, "sections": shown, "figures": {figure["id"]: figure for figure in drawings}}
    )


def _headline(of: Outcome) -> str:
    job, running, bill = of.job, of.running, of.bill
    money = f" and ${amount(bill.cost)}" if bill.cost is not None else f" and {amount(bill.device_hours)} device-hours"
    return (
        f"{amount(job.model.parameters)} parameters on {amount(of.goal.tokens)} tokens take {duration(running.seconds)}{money} "
        f"on {job.cluster.devices:,} {job.cluster.device.name}, at {of.step.mfu:.0%} of their peak."
    )


def _tiles(of: Outcome) -> list[dict[str, str]]:
    job, bill, running = of.job, of.bill, of.running
    device, count = job.cluster.device, job.cluster.devices
    cost = (
        {"label": "Cost", "value": f"${amount(bill.cost)}", "note": f"${bill.price:.2f} a device-hour"}
        if bill.cost is not None
        else {"label": "Device-hours", "value": amount(bill.device_hours), "note": "no price known"}
    )
    return [
        {"label": "Time with failures", "value": duration(running.seconds), "note": f"{duration(of.seconds)} without"},
        cost,
        {"label": "One step", "value": parts.short_time(of.step.seconds), "note": f"{amount(job.tokens)} tokens"},
        {
            "label": "Tokens/s a device", "value": amount(of.tokens_per_second / count),
            "note": f"MFU {of.step.mfu:.1%}, {rate(of.step.model_flops / of.step.seconds / count)}",
        },
        {
            "label": "Memory", "value": size(of.memory.total),
            "note": f"of {size(device.memory)}" + ("" if of.verdict.fits else ": too much"),
        },
        {
            "label": "Tokens a parameter", "value": f"{of.standing.tokens_per_parameter:,.3g}",
            "note": of.standing.sentence.partition(":")[0],
        },
    ]  # fmt: skip
