"""Comparison of a run's plan with its measurements: total time, step time and memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from bessemer.common.console import duration, size, step_time
from bessemer.guard.goodput import TIME_KINDS
from bessemer.report.data import Column, Curves, Json, RunData, as_number, as_object, number_or_0
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_json

SHORT_SECONDS = 60.0  # a shorter training is dominated by start-up, validation and saving
START_SHARE, START_STEPS = 0.1, 3  # steps left out at the start, while caches, allocator and kernel selection settle
FEWEST = 3  # minimum number of steps for a median


def steady_seconds(train: Curves, since: float) -> Column:
    """Return the time in seconds of each training step after step `since`, without warmup; empty if fewer than a few remain.

    Steps at the start, and steps before the global batch has grown to its full size, are left out.
    """
    seconds, rates = (train.columns.get(key, np.zeros(len(train))) for key in ("step_seconds", "tokens_per_second"))
    known = (train.step > since) & (seconds > 0) & (rates > 0)
    sizes, seconds = np.round(seconds * rates)[known], seconds[known]
    full: Column = seconds[sizes >= 0.999 * sizes.max(initial=0.0)]
    start = min(max(START_STEPS, int(START_SHARE * len(full))), len(full) - FEWEST)
    return full[start:] if start >= 0 else full[:0]


def against_measured(data: RunData, seconds: Column, since: int = 0) -> Json:
    """Compare planned and measured time (seconds) and peak memory (bytes).

    Args:
        data: The run with its plan.
        seconds: Times of its steady steps.
        since: Step of the resume that these steps follow.

    Returns:
        Pairs of planned and measured values by name. Each has the `error` of the plan as a share of the measured value.
            `spread` is the interquartile range of step times as a share of the median.
    """

    def pair(planned: float, got: float, **more: Any) -> Json:
        return {"planned": planned, "measured": got, "error": planned / got - 1.0, **more}

    plan, time, held = data.plan, as_object(data.last_lines, "time"), as_object(data.last_lines, "memory")
    comparison: Json = {"steps": len(seconds), "since": since}
    whole, step = as_number(plan, "seconds"), as_number(plan, "step_seconds")
    # If the training process logged its own memory, compare with the plan that it logged.
    memory = as_number(held, "planned") if held else as_number(plan, "memory_bytes", "total")
    if time and whole:
        # Scale the planned time to the steps that were done, which may be fewer than planned.
        rest = whole * (time["step"] - time["resumed_at"]) / (as_number(plan, "steps") or time["step"])
        if (minutes := as_number(data.recipe, "train", "minutes")) and not time["resumed_at"]:
            rest = 60.0 * minutes
        between = {"validation": time["validation"], "saving": time["saving"]}
        comparison["seconds"] = pair(rest, time["seconds"], **between, since=time["resumed_at"])
        started = next((number_or_0(row, "seconds") for row in data.stages if row.get("name") == "train"), 0.0)
        if started and as_number(data.times, "sessions") == 1:  # with several sessions, the stage's time is their sum
            comparison["seconds"]["starting"] = max(started - time["seconds"], 0.0)
    if step:
        low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
        basis = plan.get("step_seconds_from")
        comparison["step_seconds"] = pair(step, middle, spread=(high - low) / middle, **{"from": basis})
    if memory and data.peak_memory:
        comparison["memory_bytes"] = pair(memory, data.peak_memory, since=time["resumed_at"] if time else since)
    return comparison | ({"wall": data.times} if data.times else {})


def compare(data: RunData) -> Json:
    """Compare a run's plan with its log as `against_measured` does; empty if either is missing or damaged.

    If there are enough steps after the last resume, only these count, because an earlier session may have used another
    number of processes.
    """
    resumed = int(number_or_0(data.last_lines, "resumed", "step"))
    for since in dict.fromkeys((resumed, 0)) if data.plan else ():
        if len(seconds := steady_seconds(data.train, since)):
            return against_measured(data, seconds, since)
    return {}


def write(run: RunDirectory, data: RunData) -> None:
    """Write planned_against_measured.json atomically, if both the plan and measurements exist."""
    if comparison := compare(data):
        write_json(run.path / "planned_against_measured.json", comparison)


def rows(comparison: Json) -> dict[str, str]:
    """Return sentences that compare planned and measured total time, step time, memory and wall time, by title.

    `comparison` is the result of `compare`; values that it lacks are left out.
    """
    shown, total = {}, number_or_0(comparison, "wall", "total")
    forms = {"time": ("seconds", duration), "step": ("step_seconds", step_time), "memory": ("memory_bytes", size)}
    for name, (key, form) in forms.items():
        values = as_object(comparison, key)
        if not values:
            continue
        since = values.get("since", comparison["since"])
        after = f" after step {since:,}" if since else ""
        parts = [f"{duration(values[part])} {part}" for part in ("validation", "saving", "starting") if part in values]
        parts += [f"median of {comparison['steps']:,}"] if name == "step" else []
        detail = f" ({', '.join(parts)})" if parts else ""
        error = f"planned {abs(values['error']):.1%} too {'much' if values['error'] > 0 else 'little'}"
        shown[name] = f"{form(values['planned'])} planned, {form(values['measured'])} measured{after}{detail}: {error}"
        if name == "time" and values["measured"] < SHORT_SECONDS:
            shown[name] += ", which says little of so short a run"
    if total:
        wall = comparison["wall"]
        rest = sorted(((wall[kind], name) for kind, name in TIME_KINDS.items() if kind != "productive"), reverse=True)
        more = "".join(f", {value / total:.0%} {name}" for value, name in rest[:3] if value >= 0.01 * total)
        shown["wall"] = f"{duration(total)}, {wall['effective']:.0%} of it productive steps{more}"
    return shown


def in_short(comparison: Json) -> str:
    """Return a phrase with the measured time and peak memory next to the planned ones; "" if unknown.

    `comparison` is the result of `compare`.
    """
    forms = {"seconds": duration, "memory_bytes": size}
    pairs = ((form, comparison[key]) for key, form in forms.items() if key in comparison)
    return ", ".join(f"{form(pair['measured'])} (planned {form(pair['planned'])})" for form, pair in pairs)
