"""From the ideal hours of a run to the expected ones: what lies between the best step and the bill, part by part.

Each part is a factor on what stands before it. Where a part can be worked out it is (checkpoints, failures); what published steps
and sweeps show is taken from them; what no source separates is one number, fitted to the device-hours of half of the published
runs (benchmarks/planner_runs.py, which scores it on the other half).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, prod

from bessemer.plan import failures
from bessemer.plan.estimate.job import Job
from bessemer.plan.intervals import PlanInterval, evidence, interval, residuals

SOURCES = {
    "steps": "the plan's step, at every step",
    "program": "median of published steps over what is planned for them, every source alike",
    "layout": "median that the planner's choice lost in nanotron's sweep, models that the rules were not set with",
    "failures": "failures a node, work done again and restarts (plan/failures.py)",
    "checkpoints": "copies to the host that training waits for (plan/failures.py)",
    "the rest": "evaluation, start-ups, idle devices, runs done again: fitted to half of the published runs",
}


@dataclass(frozen=True)
class ExpectedRun:
    """Seconds of a run. ideal: every step at the planned time; parts: what makes up the expected, `steps` first; seconds: the 80%
    interval around the expected."""

    ideal: float
    parts: dict[str, float]
    seconds: PlanInterval


def factors(job: Job, chosen: bool) -> dict[str, float]:
    """Factors of the program and of the layout; chosen: by the planner."""
    found = residuals()
    return {
        "program": exp(found["step"][evidence(job).state]["middle"]),
        "layout": exp(found["layout"]) if chosen else 1.0,
    }


def slowdown(job: Job, chosen: bool) -> float:
    """Seconds that a step is expected to take over the planned ones; chosen: the layout, by the planner."""
    return prod(factors(job, chosen).values())


def expected_run(job: Job, running: failures.Outlook, ideal: float, chosen: bool) -> ExpectedRun:
    """What a run of `ideal` seconds of steps is expected to take. running: checkpoints and failures of the slowed steps."""
    parts, total = {"steps": ideal}, ideal
    for name, factor in factors(job, chosen).items():
        parts[name] = total * (factor - 1)
        total *= factor
    parts |= {"failures": running.lost, "checkpoints": running.saves}
    parts["the rest"] = sum(parts.values()) * (exp(residuals()["run"]["rest"][evidence(job).state]) - 1)
    return ExpectedRun(ideal, parts, interval("run", job, sum(parts.values())))
