"""The plan of a run compared with what was measured: whole time, step time and memory, with the plan's error."""

from __future__ import annotations

from typing import Any

from bessemer.common.console import duration, size, step_time
from bessemer.guard.goodput import TIME_KINDS
from bessemer.plan.measured_run import MeasuredRun, measured
from bessemer.report.data import Json, RunData, as_number, as_object, number_or_0, read
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_steps, write_json

SHORT_SECONDS = 60.0  # of training, which start-up, validation and saving rule


def against_measured(plan: Json, found: MeasuredRun, taken: Json | None = None, minutes: float | None = None) -> Json:
    """Compare planned and measured step time (seconds) and peak memory (bytes).

    Args:
        plan: The content of plan.json.
        found: Steps and memory of the run.
        taken: The line of metrics.jsonl about the time of the training, or of what came after its last resume.
        minutes: `train.minutes` of the run, whose steps follow from how long they take.

    Returns:
        The pairs by name, with the `error` of the plan as a share of the measured value, and the `spread` of the steps, their
        interquartile range as a share of the median.
    """

    def pair(planned: float, got: float, **more: Any) -> Json:
        return {"planned": planned, "measured": got, "error": planned / got - 1.0, **more}

    comparison: Json = {"steps": found.steps, "since": found.since}
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
        basis = plan.get("step_seconds_from")
        comparison["step_seconds"] = pair(step, found.seconds, spread=found.spread, **{"from": basis})
    if memory and found.memory:
        comparison["memory_bytes"] = pair(memory, found.memory, since=taken["resumed_at"] if taken else found.since)
    return comparison


def compare(run: RunDirectory, data: RunData) -> Json:
    """Compare the plan of a run directory with its log; empty when one of the two sides is not there (yet) or damaged."""
    rows = read_steps(run.metrics) if data.plan else []
    found, taken = measured(rows), [row for row in rows if row.get("kind") == "time"]
    if found is None:
        return {}
    plan, held = data.plan, [row for row in rows if row.get("kind") == "memory"]
    if held:  # planned with what the training process itself held
        plan = {**plan, "memory_bytes": {"total": held[-1].get("planned")}}
    minutes = as_number(data.recipe, "train", "minutes")
    comparison = against_measured(plan, found, taken[-1] if taken else None, minutes)
    if data.times:
        comparison["wall"] = data.times
    started = next((number_or_0(row, "seconds") for row in data.stages if row.get("name") == "train"), 0.0)
    is_one_life = as_number(data.times, "sessions") == 1  # else the stage's time is that of several
    if is_one_life and started and (whole := comparison.get("seconds")):
        whole["starting"] = max(started - whole["measured"], 0.0)
    return comparison


def write(run: RunDirectory, data: RunData | None = None) -> Json:
    """Write planned_against_measured.json where both sides are there, atomically, and return what it holds."""
    comparison = compare(run, data or read(run))
    if comparison:
        write_json(run.path / "planned_against_measured.json", comparison)
    return comparison


def rows(comparison: Json) -> dict[str, str]:
    """Describe the error of the whole time, a step, memory and the wall time, as far as they are known."""
    shown, total = {}, number_or_0(comparison, "wall", "total")
    forms = {"time": ("seconds", duration), "step": ("step_seconds", step_time), "memory": ("memory_bytes", size)}
    for name, (key, form) in forms.items():
        found = as_object(comparison, key)
        if not found:
            continue
        since = found.get("since", comparison["since"])
        after = f" after step {since:,}" if since else ""
        parts = [f"{duration(found[part])} {part}" for part in ("validation", "saving", "starting") if part in found]
        parts += [f"median of {comparison['steps']:,}"] if name == "step" else []
        of = f" ({', '.join(parts)})" if parts else ""
        error = f"planned {abs(found['error']):.1%} too {'much' if found['error'] > 0 else 'little'}"
        shown[name] = f"{form(found['planned'])} planned, {form(found['measured'])} measured{after}{of}: {error}"
        if name == "time" and found["measured"] < SHORT_SECONDS:
            shown[name] += ", which says little of so short a run"
    if total:
        wall = comparison["wall"]
        rest = sorted(((wall[kind], name) for kind, name in TIME_KINDS.items() if kind != "productive"), reverse=True)
        more = "".join(f", {value / total:.0%} {name}" for value, name in rest[:3] if value >= 0.01 * total)
        shown["wall"] = f"{duration(total)}, {wall['effective']:.0%} of it productive steps{more}"
    return shown
