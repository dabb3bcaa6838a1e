"""The plan of a run compared with what was measured: whole time, step time and memory, with the plan's error."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bessemer.errors import BessemerError
from bessemer.guard.goodput import TIME_KINDS, accounts, sessions
from bessemer.plan.estimate.points import MeasuredRun, measured
from bessemer.report.data import as_number, as_object, as_objects
from bessemer.run import RunFolder, read_json, read_steps, write_json
from bessemer.terminal import duration, size, step_time

SHORT_SECONDS = 60.0  # of training, in which the steps' time says little
FILE = "planned_against_measured.json"


def against_measured(
    plan: dict[str, Any], found: MeasuredRun, taken: dict[str, Any] | None = None, minutes: float | None = None
) -> dict[str, Any]:
    """Planned and measured step time (seconds) and peak memory (bytes); error: of the plan, as a share of what was measured.

    spread: interquartile range of the steps as a share of their median; interval: in which the plan expected a step; taken: the
    line of metrics.jsonl about the time of the whole training, or of what came after its last resume; minutes: that the run was
    given, whose steps follow from how long they take.
    """

    def pair(planned: float, got: float, **more: Any) -> dict[str, Any]:
        return {"planned": planned, "measured": got, "error": planned / got - 1.0, **more}

    comparison: dict[str, Any] = {"steps": found.steps, "since": found.since}
    whole, step = as_number(plan.get("seconds")), as_number(plan.get("step_seconds"))
    memory = as_number(as_object(plan.get("memory_bytes")).get("total"))
    if taken and whole:
        # Of the steps that were planned, which may be more than those that were done.
        rest = whole * (taken["step"] - taken["resumed_at"]) / (as_number(plan, "steps") or taken["step"])
        if minutes and not taken["resumed_at"]:
            rest = 60.0 * minutes
        between = {"validation": taken["validation"], "saving": taken["saving"]}
        comparison["seconds"] = pair(rest, taken["seconds"], **between, since=taken["resumed_at"])
    if step:
        more = {"interval": plan.get("step_interval"), "from": plan.get("step_seconds_from")}
        comparison["step_seconds"] = pair(step, found.seconds, spread=found.spread, **more)
    if memory and found.memory:
        comparison["memory_bytes"] = pair(memory, found.memory, since=taken["resumed_at"] if taken else found.since)
    return comparison


def of_run(run: RunFolder) -> dict[str, Any] | None:
    """The same of a run folder; None when one of the two sides is not there (yet) or damaged."""
    plan = _read(run.plan, read_json)
    rows = read_steps(run.metrics) if plan else []
    found, taken = measured(rows), [row for row in rows if row.get("kind") == "time"]
    if not isinstance(plan, dict) or found is None:
        return None
    minutes = as_number(_read(run.recipe, _toml), "train", "minutes")
    comparison = against_measured(plan, found, taken[-1] if taken else None, minutes)
    if (wall := accounts(sessions(run.times), (rows[-1].get("step", 0), rows[-1].get("time", "")))) is not None:
        comparison["wall"] = wall
    is_one_life = wall is not None and wall["sessions"] == 1  # else the stage's time is that of several
    stages = as_objects(_read(run.path / "stages.json", read_json), "stages")
    started = next((row["seconds"] for row in stages if row["name"] == "train"), None)
    if is_one_life and started and (whole := comparison.get("seconds")):
        whole["starting"] = max(started - whole["measured"], 0.0)
    return comparison


def _read(path: Path, load: Callable[[Path], Any]) -> Any:
    """What a file of the run holds; None where it is missing or damaged."""
    try:
        return load(path)
    except (BessemerError, OSError, ValueError):
        return None


def _toml(path: Path) -> Any:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def write(run: RunFolder) -> dict[str, Any] | None:
    """Write planned_against_measured.json where both sides are there, atomically, and return what it holds."""
    comparison = of_run(run)
    if comparison is not None:
        write_json(run.path / FILE, comparison)
    return comparison


def lines(comparison: dict[str, Any]) -> list[str]:
    """For the terminal: one line each for the whole time, a step and memory, those that are known."""
    shown, of = [], f", of the steps after {comparison['since']:,}" if comparison.get("since") else ""
    if found := comparison.get("seconds"):
        since = f" for the steps after {found['since']:,}" if found.get("since") else ""
        more = f"{duration(found['validation'])} validation and {duration(found['saving'])} saving in it"
        start = f" after {duration(found['starting'])} of start-up" if found.get("starting", 0.0) >= 1.0 else ""
        times = f"{duration(found['planned'])} planned{since}, {duration(found['measured'])} taken{start} ({more})"
        besides = found["validation"] + found["saving"] + found.get("starting", 0.0)
        is_short = found["measured"] < SHORT_SECONDS and abs(found["error"]) > 0.1 and 2 * besides >= found["measured"]
        short = "so short a run is mostly start-up, validation and saving"
        shown.append(f"time    {times}: {short if is_short else error(found['error'])}")
    if found := comparison.get("step_seconds"):
        times = f"{step_time(found['planned'])} planned, {step_time(found['measured'])} measured"
        shown.append(f"step    {times} (median of {comparison['steps']:,}{of}): {error(found['error'])}")
    if found := comparison.get("memory_bytes"):
        times = f"{size(found['planned'])} planned, {size(found['measured'])} measured"
        times += f" after step {found['since']:,}" if found.get("since") else ""
        shown.append(f"memory  {times}: {error(found['error'])}")
    if found := comparison.get("wall"):
        rest = sorted(((found[kind], name) for kind, name in TIME_KINDS.items() if kind != "productive"), reverse=True)
        total = found["total"]
        more = ", ".join(f"{value / total:.0%} {name}" for value, name in rest[:3] if value >= 0.01 * total)
        several = f" in {found['sessions']} sessions" if found["sessions"] > 1 else ""
        wall = f"{duration(total)}{several}, {found['effective']:.0%} of it productive steps"
        shown.append(f"wall    {wall}{more and f'; {more}'}")
    return shown


def error(relative: float) -> str:
    """The error of a plan, (planned - measured) / measured, in words."""
    return f"planned {abs(relative):.1%} too {'much' if relative > 0 else 'little'}"
