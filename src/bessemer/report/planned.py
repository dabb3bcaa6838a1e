"""The plan of a run compared with what was measured: whole time, step time and memory, with the plan's error."""

from __future__ import annotations

from typing import Any

import numpy as np

from bessemer.common.console import duration, size, step_time
from bessemer.guard.goodput import TIME_KINDS
from bessemer.report.data import Column, Curves, Json, RunData, as_number, as_object, number_or_0
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_json

SHORT_SECONDS = 60.0  # of training, which start-up, validation and saving rule
START_SHARE, START_STEPS = 0.1, 3  # steps left out at the start: caches, the allocator and the kernel's choices settle
FEWEST = 3  # steps that a median is taken of


def steady_seconds(train: Curves, since: float) -> Column:
    """Return the time of each steady step of the full batch after the step `since`; empty for too few.

    Steps of a batch that is still growing, and those at the start, are left out.
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
        data: The run, with its plan.
        seconds: Time of its steady steps.
        since: Step of the resume after which these are.

    Returns:
        The pairs by name, with the `error` of the plan as a share of the measured value, and the `spread` of the steps, their
        interquartile range as a share of the median.
    """

    def pair(planned: float, got: float, **more: Any) -> Json:
        return {"planned": planned, "measured": got, "error": planned / got - 1.0, **more}

    plan, taken, held = data.plan, as_object(data.last_lines, "time"), as_object(data.last_lines, "memory")
    comparison: Json = {"steps": len(seconds), "since": since}
    whole, step = as_number(plan, "seconds"), as_number(plan, "step_seconds")
    # Where the training process logged what it held itself, the plan that it did so by.
    memory = as_number(held, "planned") if held else as_number(plan, "memory_bytes", "total")
    if taken and whole:
        # Of the steps that were planned, which may be more than those that were done.
        rest = whole * (taken["step"] - taken["resumed_at"]) / (as_number(plan, "steps") or taken["step"])
        if (minutes := as_number(data.recipe, "train", "minutes")) and not taken["resumed_at"]:
            rest = 60.0 * minutes
        between = {"validation": taken["validation"], "saving": taken["saving"]}
        comparison["seconds"] = pair(rest, taken["seconds"], **between, since=taken["resumed_at"])
        started = next((number_or_0(row, "seconds") for row in data.stages if row.get("name") == "train"), 0.0)
        if started and as_number(data.times, "sessions") == 1:  # else the stage's time is that of several
            comparison["seconds"]["starting"] = max(started - taken["seconds"], 0.0)
    if step:
        low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
        basis = plan.get("step_seconds_from")
        comparison["step_seconds"] = pair(step, middle, spread=(high - low) / middle, **{"from": basis})
    if memory and data.peak_memory:
        comparison["memory_bytes"] = pair(memory, data.peak_memory, since=taken["resumed_at"] if taken else since)
    return comparison | ({"wall": data.times} if data.times else {})


def compare(data: RunData) -> Json:
    """Compare the plan of a run with its log; empty when one of the two sides is not there (yet) or damaged.

    The steps are those after the last resume, where there are enough: another process took the others, perhaps of another size.
    """
    resumed = int(number_or_0(data.last_lines, "resumed", "step"))
    for since in dict.fromkeys((resumed, 0)) if data.plan else ():
        if len(seconds := steady_seconds(data.train, since)):
            return against_measured(data, seconds, since)
    return {}


def write(run: RunDirectory, data: RunData) -> None:
    """Write planned_against_measured.json where both sides are there, atomically."""
    if comparison := compare(data):
        write_json(run.path / "planned_against_measured.json", comparison)


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


def in_short(comparison: Json) -> str:
    """Return measured time and peak memory with the planned ones; empty where they are not known."""
    forms = {"seconds": duration, "memory_bytes": size}
    pairs = ((form, comparison[key]) for key, form in forms.items() if key in comparison)
    return ", ".join(f"{form(pair['measured'])} (planned {form(pair['planned'])})" for form, pair in pairs)
