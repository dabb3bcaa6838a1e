"""Residuals behind the planner's 80% intervals, and the coverage of cases that were left out.

    python benchmarks/planner_intervals.py FOLDER [--write src/bessemer/plan/residuals.json]

Residuals are those of published cases that no constant was fitted to. "Given layouts" are all sets except nanotron's sweep, most
of whose layouts nobody would use. "Chosen layouts" are these and the planner's choices in the sweep, by model. "Unmeasured" plans
the same cases with the profile of the default program, for a program that nobody measured.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import planner_layouts
import planner_memory
import planner_mixtures
import planner_runs
import planner_sets
import planner_vendor
from planner_residuals import Residual, pooled
from planner_sets import Case

from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import Job
from bessemer.plan.estimate.step import refuse, step
from bessemer.plan.intervals import device_class

# Sets that constants were fitted to: two models of the sweep, with the network of its cluster; the single node, for all compute
# constants; MPT's A100 rows, for the rate of FlashAttention's first version.
FITTED = {
    "Megatron Bridge fp8",
    "A100 single node",
    "MPT A100 SXM 80GB",
    "MPT A100 SXM 40GB",
    *planner_layouts.SET_WITH,
}
SOURCES = {"A100": "vTrain", "SC'21": "SC'21", "MPT": "MPT"}  # sets with the same source, by their first word
MEMORY_SETS = ("torchtitan", "BLOOM", "B200", "Zero Bubble table 4", "nanotron")
DIGITS = 4


def source_of(name: str) -> str:
    """Return the source of a set."""
    return SOURCES.get(name.split()[0], name)


def steps(cases: Sequence[Case], program: str | None = None) -> list[Residual]:
    """Return the residuals of given layouts, planned with their own program or with `program`."""
    found = []
    for case in cases:
        job = case.job if program is None else as_program(case.job, program)
        if (
            case.seconds is None
            or case.left_out
            or case.set in FITTED
            or case.set.startswith(planner_layouts.SWEEP)
            or refuse(job) is not None
        ):
            continue
        found.append(Residual(source_of(case.set), case.name, log(case.seconds / step(job).seconds), device_class(job)))
    return found


def as_program(job: Job, program: str) -> Job:
    """Return the job with another program, with fewer stages per device if that program allows no stages without blocks."""
    job = replace(job, framework=frameworks.find(program))
    layout, most = job.layout, job.model.layers + job.framework.stages_without_blocks
    return job.with_layout(virtual=max(min(layout.virtual, most // layout.pipeline), 1))


def choices(cases: Sequence[Case], program: str | None = None) -> list[Residual]:
    """Return the residuals of the planner's choices in the sweep, for models that nothing was fitted to."""
    sweep = [case for case in cases if case.set.startswith(planner_layouts.SWEEP) and not case.left_out]
    if program is not None:
        sweep = [replace(case, job=replace(case.job, framework=frameworks.find(program))) for case in sweep]
    found = []
    for choice in planner_layouts.regrets(sweep):
        runs = [case for case in sweep if case.name == choice.chosen]
        seconds = [case.seconds for case in runs if case.seconds is not None]
        if not choice.fitted and seconds:
            off = log(min(seconds) / step(runs[0].job).seconds)
            found.append(Residual(runs[0].set, choice.group, off, device_class(runs[0].job)))
    return found


def memories(folder: Path) -> list[Residual]:
    """Return the residuals of peak memory, with the program as kind.

    From the sweep they include only models that nothing was fitted to, with tensor ranks inside a node.
    """
    rows, _ = planner_memory.compare(folder)
    return [
        Residual(row.set, row.name, log(row.measured / row.planned), row.program) for row in rows
        if row.set in MEMORY_SETS and not (row.set == "nanotron" and (
            "-tp16-" in row.name or "-tp32-" in row.name or row.name.startswith(("1.34B", "8.86B"))
        ))
    ]  # fmt: skip


def measured(cases: Sequence[Case]) -> dict[str, dict[str, int]]:
    """Return the number of measured steps by program and class of devices."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for case in cases:
        if case.seconds is not None and not case.left_out and refuse(case.job) is None:
            counts[case.job.framework.name][device_class(case.job)] += 1
    return {name: dict(sorted(found.items())) for name, found in sorted(counts.items())}


def mixtures(folder: Path) -> dict[str, Any]:
    """Return the measured steps of mixtures of experts by program and device class, and their spread.

    The spread is the root mean square of the logarithms of measured over planned, in the source where it is largest, since there
    are few. Nothing was fitted to them.
    """
    rows = [*planner_mixtures.bridge(), planner_mixtures.deepseek(), *planner_mixtures.simumax(folder)]
    rows = [row for row in rows if "memory" not in row.set]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row.job.framework.name][device_class(row.job)] += 1
    return {
        "mixtures": {name: dict(sorted(found.items())) for name, found in sorted(counts.items())},
        "mixture_spread": planner_mixtures.spread(rows),
    }


def table(folder: Path, cases: Sequence[Case]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of residuals.json, and the evidence: coverage by source, and the runs of both halves."""
    kept: dict[str, Any] = {"measured": measured(cases), **mixtures(folder)}
    shown: dict[str, Any] = {}
    for state, program in (("measured", None), ("unmeasured", "bessemer")):
        given = steps(cases, program)
        for question, found in (("step", given), ("chosen", given + choices(cases, program))):
            shown[f"{question}, {state}"] = pooled(found)
            kept.setdefault(question, {})[state] = shown[f"{question}, {state}"]
    shown["memory"] = kept["memory"] = pooled(memories(folder))
    rows = _runs(folder, kept)
    shown["run"] = kept["run"]
    scores = {
        f"{'named' if named else 'default'}, {part}": planner_runs.score(
            [row for row in rows if row["named"] == named], part
        )
        for named in (False, True)
        for part in ("fitted", "scored")
    }
    return _short(kept), {"kinds": shown, "runs": rows, "scores": scores}


def _runs(folder: Path, kept: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every run of both halves, planned with and without its program's name, and add `run` to `kept`.

    `rest` is the factor between the parts and the device-hours, fitted to one half. The interval around the expected hours comes
    from runs that were left out.
    """
    runs = planner_runs.read(folder)
    factors = {state: exp(kept["step"][state]["middle"]) for state in ("measured", "unmeasured")}
    fitting = planner_runs.half(runs, 0)
    around: list[Residual] = []
    answers: list[tuple[planner_runs.AskedRun, float]] = []
    rests: dict[str, float] = {}
    for state, named in (("unmeasured", False), ("measured", True)):
        some = [planner_runs.asked(run, named) for run in runs]
        factor = {one.program: factors["measured" if one.program in kept["measured"] else "unmeasured"] for one in some}
        rests[state], residuals = planner_runs.fit(some, factor, fitting)
        around += residuals
        answers += [(one, one.running * factor[one.program] * exp(rests[state])) for one in some]
    kept["run"] = {**pooled(around), "middle": 0.0, "rest": rests}
    low, high = exp(kept["run"]["low"]), exp(kept["run"]["high"])
    return [
        {
            "run": one.run.name, "named": one.named, "half": "fitted" if one.run.name in fitting else "scored",
            "devices": one.run.devices, "device": one.run.device, "program": one.program, "hours": one.run.hours,
            "ideal": one.ideal, "expected": expected, "low": expected * low, "high": expected * high,
        }
        for one, expected in answers
    ]  # fmt: skip


def _short(value: Any) -> Any:
    """Return the value rounded, without the evidence that planning does not need."""
    if isinstance(value, dict):
        return {
            key: _short(each)
            for key, each in value.items()
            if key not in ("by_source", "coverage_of_cases", "coverage_of_sources")
        }
    return round(value, DIGITS) if isinstance(value, float) else value


def show(shown: dict[str, Any]) -> str:
    """Format the tables of intervals and runs."""
    lines = [
        f"{'kind':<22}{'cases':>6}{'sources':>9}{'low':>8}{'middle':>8}{'high':>8}{'left-out sources':>18}{'cases':>8}"
    ]
    for name, row in shown["kinds"].items():
        figures = "".join(f"{exp(row[key]) - 1:>+8.0%}" for key in ("low", "middle", "high"))
        inside = f"{row['coverage_of_sources']:>18.0%}{row['coverage_of_cases']:>8.0%}"
        lines.append(f"{name:<22}{row['cases']:>6}{row['sources']:>9}{figures}{inside}")
    for name, row in shown["scores"].items():
        errors = f"median {row['median_absolute']:.0%}, mean {row['mean_absolute']:.0%}, bias {row['bias']:+.0%}"
        inside = f"inside {row['inside']:.0%}, high over low {row['width']:.2f}"
        lines.append(f"runs, {name}: {row['n']}, {errors} (ideal {row['ideal_bias']:+.0%}), {inside}")
    for row in shown["runs"]:
        figures = f"{row['hours']:>12,.0f}{row['ideal']:>12,.0f}{row['expected']:>12,.0f}"
        off = row["expected"] / row["hours"] - 1
        lines.append(f"  {row['run']:<22}{row['half']:<8}{row['program']:<24}{figures}{off:>+7.0%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="folder of the reference files")
    parser.add_argument("--write", type=Path, help="file for the residuals")
    arguments = parser.parse_args()
    kept, shown = table(arguments.folder, [*planner_sets.read(arguments.folder), *planner_vendor.cases()])
    print(show(shown))
    if arguments.write:
        arguments.write.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
