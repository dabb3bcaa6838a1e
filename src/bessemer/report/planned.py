"""The plan of a run held against what was measured: memory and step time, side by side, with the error."""

from __future__ import annotations

from typing import Any

from bessemer.errors import BessemerError
from bessemer.plan.estimate.points import MeasuredRun, measured
from bessemer.report.data import number, table
from bessemer.run import RunFolder, read_json, read_json_lines, write_json
from bessemer.terminal import duration, size


def against_measured(plan: dict[str, Any], found: MeasuredRun, taken: dict[str, Any] | None = None) -> dict[str, Any]:
    """Planned and measured step time (seconds) and peak memory (bytes); error: of the plan, as a share of what was measured.

    spread: interquartile range of the steps as a share of their median; interval: in which the plan expected a step; taken: the
    line of metrics.jsonl about the time of the whole training, or of what came after its last resume.
    """
    comparison: dict[str, Any] = {"steps": found.steps}
    whole = number(plan.get("seconds"))
    if taken and whole:
        part = whole * (taken["step"] - taken["resumed_at"]) / taken["step"]
        comparison["seconds"] = {
            "planned": part, "measured": taken["seconds"], "error": part / taken["seconds"] - 1.0,
            "validation": taken["validation"], "saving": taken["saving"],
        }  # fmt: skip
    seconds, memory = number(plan.get("step_seconds")), number(table(plan.get("memory_bytes")).get("total"))
    if seconds:
        comparison["step_seconds"] = {
            "planned": seconds, "measured": found.seconds, "error": seconds / found.seconds - 1.0, "spread": found.spread,
            "interval": plan.get("step_interval"), "from": plan.get("step_seconds_from"),
        }  # fmt: skip
    if memory and found.memory:
        comparison["memory_bytes"] = {"planned": memory, "measured": found.memory, "error": memory / found.memory - 1.0}
    return comparison


def of_run(run: RunFolder) -> dict[str, Any] | None:
    """The same of a run folder; None when one of the two sides is not there (yet) or damaged."""
    try:
        plan = read_json(run.plan) if run.plan.exists() else None
    except BessemerError:
        return None
    rows = [row for row in read_json_lines(run.metrics) if isinstance(row, dict)] if plan else []
    found, taken = measured(rows), [row for row in rows if row.get("kind") == "time"]
    if not isinstance(plan, dict) or found is None:
        return None
    comparison = against_measured(plan, found, taken[-1] if taken else None)
    if (whole := comparison.get("seconds")) and (started := stage_seconds(run, "train")):
        whole["starting"] = max(started - whole["measured"], 0.0)
    return comparison


def stage_seconds(run: RunFolder, name: str) -> float | None:
    """How long a stage took, with all that it does before its work begins."""
    try:
        rows = read_json(run.path / "stages.json")["stages"]
    except (BessemerError, OSError, KeyError):
        return None
    return next((row["seconds"] for row in rows if row["name"] == name), None)


def write(run: RunFolder) -> dict[str, Any] | None:
    """Write planned_against_measured.json where both sides are there, atomically, and return what it holds."""
    comparison = of_run(run)
    if comparison is not None:
        write_json(run.path / FILE, comparison)
    return comparison


FILE = "planned_against_measured.json"


def lines(comparison: dict[str, Any]) -> list[str]:
    """For the terminal: one line each for the whole time, a step and memory, those that are known."""
    shown = []
    if found := comparison.get("seconds"):
        parts = f"{duration(found['validation'])} validation and {duration(found['saving'])} saving in it"
        if found.get("starting", 0.0) >= 1.0:
            parts += f", {duration(found['starting'])} before it to start"
        times = f"{duration(found['planned'])} planned, {duration(found['measured'])} taken ({parts})"
        shown.append(f"time    {times}: {found['error']:+.1%}")
    if found := comparison.get("step_seconds"):
        times = f"{seconds(found['planned'])} planned, {seconds(found['measured'])} measured (median of {comparison['steps']:,})"
        shown.append(f"step    {times}: {found['error']:+.1%}")
    if found := comparison.get("memory_bytes"):
        shown.append(
            f"memory  {size(found['planned'])} planned, {size(found['measured'])} measured: {found['error']:+.1%}"
        )
    return shown


def seconds(value: float) -> str:
    """A step's time as a person reads it."""
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"
