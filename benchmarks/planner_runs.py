"""Device-hours of published whole runs, compared with plans from parameters, tokens and devices.

The runs are those of gpu_hours.json with a dense model and a device in the catalogue, and those of planner_runs.toml. By name,
every other run is used to fit one number, for what no part of the plan explains; the others are scored. Each run is planned
twice: with the default program, which nobody has measured, and with the program of the nearest profile, the published batch and
sequence.
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
MIXTURES = ("Llama4-Maverick", "DeepSeek-V3")  # mixtures of experts
UNKNOWN_DEVICES = 512  # number of devices for sources that do not give it
ALIASES = {"A100-80": "A100 SXM 80GB", "A100-40": "A100 SXM 40GB", "H100": "H100 SXM"}


@dataclass(frozen=True)
class PublishedRun:
    """A published whole run.

    Attributes:
        hours: Device-hours in total.
        known: Further published facts.
    """

    name: str
    params: float
    tokens: float
    hours: float
    device: str
    devices: int
    known: dict[str, Any]

    @property
    def source(self) -> str:
        """Group of runs that counts as one source: the name before the size, with Llama 3 and 3.1 as one."""
        return self.name.rsplit("-", 1)[0].removesuffix(".1")


@dataclass(frozen=True)
class AskedRun:
    """Plan of a published run.

    Attributes:
        named: True if planned with the run's program, batch and sequence.
        ideal: Device-hours without failures and checkpoints.
        running: Device-hours with failures and checkpoints.
        program: Name of the program planned with.
    """

    run: PublishedRun
    named: bool
    ideal: float
    running: float
    program: str


def read(folder: Path) -> list[PublishedRun]:
    """Return all runs in order of their names; none if the reference file is missing."""
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
    """Return the plan of a run as `bessemer plan --params P --tokens T --gpus N` makes it.

    If `named`, the plan also gets the run's program, batch and sequence.
    """
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
    """Return the names of a half of the runs: 0 for fitting, 1 for scoring."""
    return {run.name for number, run in enumerate(runs) if number % 2 == which}


def fit(answers: list[AskedRun], factors: dict[str, float], fitting: set[str]) -> tuple[float, list[Residual]]:
    """Return what the plan's parts leave unexplained, and the residuals of all runs.

    The rest is the mean logarithm over the runs for fitting. A mean, because it must also cover runs that took far longer than
    similar ones: with the median, the expected hours of the fitted half were 7% too low. The residual of a run is relative to the
    rest fitted to all other sources.

    Args:
        answers: Plans of the runs.
        factors: Factor of each program by name.
        fitting: Names of the runs for fitting.
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
    """Return the errors of a half: median and mean absolute, bias (mean logarithm), and share inside the interval."""
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
