"""Device-hours of published whole runs against what the planner says, asked as a user asks it: parameters, tokens and devices.

Runs: those of gpu_hours.json whose model is dense and whose device is in the catalogue, and those of planner_runs.toml. Every
other one by name is for fitting (one number, what no part explains), the others are scored. Asked twice: of the default program,
which nobody has measured, and with the program named whose profile is nearest, with the published batch and sequence.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from planner_residuals import Residual

from bessemer.plan import devices, plan_request, plan_result
from bessemer.workflow.choose_layout import planning_goal

TABLE = Path(__file__).with_name("planner_runs.toml")
MIXTURES = ("Llama4-Maverick", "DeepSeek-V3")  # of experts
UNKNOWN_DEVICES = 512  # where a source does not say how many
ALIASES = {"A100-80": "A100 SXM 80GB", "A100-40": "A100 SXM 40GB", "H100": "H100 SXM"}


@dataclass(frozen=True)
class PublishedRun:
    """A whole run. hours: of all devices together; source: runs of one source count as one when residuals are pooled."""

    name: str
    params: float
    tokens: float
    hours: float
    device: str
    devices: int
    known: dict[str, Any]

    @property
    def source(self) -> str:
        """Whose run it is: the name before its size, Llama 3 and 3.1 as one."""
        return self.name.rsplit("-", 1)[0].removesuffix(".1")


@dataclass(frozen=True)
class AskedRun:
    """What the planner says of a run: ideal hours, hours with failures and checkpoints, and the program it is of."""

    run: PublishedRun
    named: bool
    ideal: float
    running: float
    program: str


def read(folder: Path) -> list[PublishedRun]:
    """All of them by name; none where the reference file is missing."""
    path = folder / "gpu_hours.json"
    if not path.is_file():
        return []
    known, found = tomllib.loads(TABLE.read_text(encoding="utf-8")), []
    for case in json.loads(path.read_text(encoding="utf-8"))["cases"]:
        inputs, name = case["inputs"], case["case"].removeprefix("run-")
        device = ALIASES.get(inputs.get("accel") or "")
        if device is None or name in MIXTURES or not (inputs.get("tokens") and case["observed"].get("accel_hours")):
            continue
        more = known.pop(name)
        count = inputs["n_accel"] or more.get("devices") or UNKNOWN_DEVICES
        found.append(
            PublishedRun(name, inputs["params"], inputs["tokens"], case["observed"]["accel_hours"], device, count, more)
        )
    for name, row in known.items():
        if "hours" in row:
            count = row.get("devices", UNKNOWN_DEVICES)
            found.append(PublishedRun(name, row["params"], row["tokens"], row["hours"], row["device"], count, row))
    return sorted(found, key=lambda run: run.name)


def asked(run: PublishedRun, named: bool) -> AskedRun:
    """As `bessemer plan --params P --tokens T --gpus N` plans it; named: with the program, its batch and its sequence as well."""
    device = devices.find(run.device).name
    words = {"params": repr(run.params), "tokens": str(int(run.tokens)), "gpus": f"{run.devices}x{device}"}
    if named or run.devices % 16:  # an odd number of devices needs a batch that it divides
        words |= {
            short: str(run.known[key]) for short, key in (("seq", "sequence"), ("batch", "batch")) if key in run.known
        }
    if named:
        words["framework"] = run.known["framework"]
    request = plan_request.from_options(words)
    out = plan_result.make_plan(planning_goal(request.recipe, request.model))
    ideal = out.seconds / 3600 * run.devices
    return AskedRun(run, named, ideal, ideal / out.running.effective, out.job.framework.name)


def half(runs: list[PublishedRun], which: int) -> set[str]:
    """Names of a half: 0 for fitting, 1 for scoring."""
    return {run.name for number, run in enumerate(runs) if number % 2 == which}


def fit(answers: list[AskedRun], factors: dict[str, float], fitting: set[str]) -> tuple[float, list[Residual]]:
    """What remains between the parts and the hours of the half for fitting (`rest`, a logarithm), and the residuals of all runs
    around what would be expected of each if that number were fitted to all other sources.

    The rest is a mean, since it is for runs that took far longer than others like them as well: with the median of the half that
    it was fitted to, the expected hours of that half were 7% too low. factors: of the program, by its name.
    """
    remains = [
        Residual(one.run.source, one.run.name, log(one.run.hours / (one.running * factors[one.program]))) for one in answers
    ]  # fmt: skip
    rest = fmean(one.value for one in remains if one.name in fitting)
    others = {
        source: fmean(one.value for one in remains if one.source != source)
        for source in {one.source for one in remains}
    }
    return rest, [Residual(one.source, one.name, one.value - others[one.source]) for one in remains]


def score(rows: list[dict[str, Any]], part: str) -> dict[str, float]:
    """Errors of a half: median and mean absolute, bias (of the sum of logarithms), share inside the interval."""
    some = [row for row in rows if row["half"] == part]
    errors = [row["expected"] / row["hours"] - 1 for row in some]
    return {
        "n": len(some),
        "median_absolute": median(abs(error) for error in errors),
        "mean_absolute": fmean(abs(error) for error in errors),
        "bias": exp(fmean(log(row["expected"] / row["hours"]) for row in some)) - 1,
        "ideal_bias": exp(fmean(log(row["ideal"] / row["hours"]) for row in some)) - 1,
        "inside": fmean(row["low"] <= row["hours"] <= row["high"] for row in some),
        "width": median(row["high"] / row["low"] for row in some),
    }
