"""Further cases for planner_accuracy.py, scored blind: steps and whole runs in JSON files.

A file is an object with `set` (a name for its cases) and `steps`, `runs` or both:

    {"set": "my cluster",
     "steps": [{"case": "7B on 64", "model": "llama-2-7b", "sequence": 4096, "device": "H100 SXM", "devices": 64,
                "framework": "megatron-core", "precision": "bf16", "batch": 512, "seconds": 5.1, "memory_bytes": 61e9,
                "layout": {"shard": 32, "tensor": 2, "zero": 1, "micro_batch": 2, "recompute": "selective"}}],
     "runs": [{"run": "7B", "params": 6.7e9, "tokens": 1e12, "device": "H100 SXM", "devices": 64, "hours": 31000}]}

Keys of a step:

- `model`: the name of a published shape, or an object with keys of ModelConfig (layers, width, heads, kv_heads, head_dim,
  mlp_width, vocabulary).
- `batch`: sequences per step.
- `layout`: keys of Layout; the others keep its defaults.
- `seconds`, `memory_bytes`: one or both. Memory is all memory used on the device.
- `inter_bandwidth`, `intra_bandwidth`: bytes/s, where they differ from the catalogue.

Keys of a run:

- `hours`: device-hours in total.
- `batch` (in tokens), `sequence`, `framework`: optional.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import planner_runs
from planner_sets import Case

from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.plan import devices, plan_request, plan_result, shapes
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import ClusterSpec, Job, Layout
from bessemer.plan.estimate.memory import memory
from bessemer.plan.estimate.step import refuse, step
from bessemer.plan.intervals import interval
from bessemer.workflow.choose_layout import planning_goal

STEP_KEYS = {
    "case", "model", "sequence", "device", "devices", "framework", "precision", "batch", "layout", "seconds", "memory_bytes",
    "inter_bandwidth", "intra_bandwidth",
}  # fmt: skip
RUN_KEYS = {"run", "params", "tokens", "device", "devices", "hours", "batch", "sequence", "framework"}
OPTIONAL = {"seconds", "memory_bytes", "inter_bandwidth", "intra_bandwidth", "batch", "sequence", "framework"}


@dataclass(frozen=True)
class FurtherCases:
    """Cases to score blind: steps like those of planner_sets.py, and whole runs."""

    steps: tuple[Case, ...] = ()
    runs: tuple[planner_runs.PublishedRun, ...] = ()


def read(folder: Path) -> FurtherCases:
    """Return all cases of a folder's *.json files.

    Raises:
        InputError: A file or case is invalid; the message names it.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InputError(f"--cases {folder}: no .json files; see benchmarks/planner_cases.py for the format")
    steps, runs = [], []
    for path in files:
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{path}: not JSON ({error})") from None
        if not isinstance(whole, dict) or "set" not in whole or not {"steps", "runs"} & set(whole):
            raise InputError(f'{path}: must be an object with "set" and "steps" or "runs"')
        _known(path, whole, {"set", "steps", "runs"})
        steps += [
            _step(row, whole["set"], f"{path}: step {number}") for number, row in enumerate(whole.get("steps", ()), 1)
        ]
        runs += [_run(row, f"{path}: run {number}") for number, row in enumerate(whole.get("runs", ()), 1)]
    return FurtherCases(tuple(steps), tuple(runs))


def _known(where: object, row: Mapping[str, Any], keys: set[str], optional: set[str] | None = None) -> None:
    if unknown := sorted(set(row) - keys):
        raise InputError(f"{where}: unknown key {unknown[0]}; the keys are {', '.join(sorted(keys))}")
    if missing := sorted(keys - set(row) - optional) if optional is not None else []:
        raise InputError(f"{where}: missing keys {', '.join(missing)}")


def _step(row: dict[str, Any], name: str, where: str) -> Case:
    _known(where, row, STEP_KEYS, OPTIONAL - {"batch", "sequence", "framework"})
    if not {"seconds", "memory_bytes"} & set(row):
        raise InputError(f"{where}: no measurement to compare with; give seconds or memory_bytes")
    shape = row["model"]
    if isinstance(shape, str):
        model = shapes.model(shape, None, row["sequence"])
    else:
        _known(f"{where}: model", shape, {each.name for each in fields(ModelConfig)})
        model = ModelConfig(**shape, sequence_length=row["sequence"])
    _known(f"{where}: layout", row["layout"], {each.name for each in fields(Layout)})
    cluster = ClusterSpec.of(devices.find(row["device"]), row["devices"])
    cluster = replace(cluster, **{key: row[key] for key in ("inter_bandwidth", "intra_bandwidth") if key in row})
    job = Job(
        model, Layout(**row["layout"]), cluster, row["batch"], row["precision"], frameworks.find(row["framework"])
    )
    if (why := refuse(job)) is not None:
        raise InputError(f"{where}: {why}")
    return Case(row["case"], name, job, row.get("seconds"), row.get("memory_bytes"), row)


def _run(row: dict[str, Any], where: str) -> planner_runs.PublishedRun:
    _known(where, row, RUN_KEYS, OPTIONAL)
    known = {key: row[key] for key in ("batch", "sequence", "framework") if key in row}
    device = devices.find(row["device"]).name
    return planner_runs.PublishedRun(
        row["run"], row["params"], row["tokens"], row["hours"], device, row["devices"], known
    )


def compared(of: FurtherCases) -> list[tuple[str, str, float, float, float, float]]:
    """Return (question, case, measured, low, expected, high) for every figure, as the program itself predicts it."""
    rows = []
    for case in of.steps:
        if case.seconds is not None:
            found = interval("step", case.job, step(case.job).seconds)
            rows.append(("step", case.name, case.seconds, found.low, found.expected, found.high))
        if case.memory is not None:
            found = interval("memory", case.job, memory(case.job).total)
            rows.append(("memory", case.name, case.memory, found.low, found.expected, found.high))
    for run in of.runs:
        words = {
            "params": repr(float(run.params)),
            "tokens": str(int(run.tokens)),
            "gpus": f"{run.devices}x{run.device}",
        }
        shorts = {"batch": "batch", "sequence": "seq", "framework": "framework"}
        request = plan_request.from_options(words | {shorts[key]: str(value) for key, value in run.known.items()})
        found = plan_result.make_plan(planning_goal(request.recipe, request.model)).intervals["device_hours"]
        rows.append(("run", run.name, run.hours, found.low, found.expected, found.high))
    return rows


def show(of: FurtherCases) -> str:
    """Format the errors of expected figures and the coverage of the intervals by question, then every case."""
    rows, lines = compared(of), []
    for question in ("step", "memory", "run"):
        if some := [row for row in rows if row[0] == question]:
            errors = [expected / measured - 1 for _, _, measured, _, expected, _ in some]
            inside = fmean(low <= measured <= high for _, _, measured, low, _, high in some)
            lines.append(
                f"{question}: {len(some)} cases, median {median(errors):+.1%}, mean absolute {fmean(map(abs, errors)):.1%}, "
                f"{inside:.0%} inside the 80% interval"
            )
    lines += [
        f"  {question:<8}{name:<40}{measured:>12.4g}{expected:>12.4g}  {low:.4g} to {high:.4g}"
        for question, name, measured, low, expected, high in rows
    ]
    return "\n".join(lines)
