"""From the ideal hours of a run to the expected ones: what lies between the best step and the bill, part by part.

Each part is a factor on what stands before it. Where a part can be worked out it is (checkpoints, failures); what published steps
show is taken from them; what no source separates is one number, fitted to the device-hours of half of the published
runs (benchmarks/planner_runs.py, which scores it on the other half).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp

from bessemer.plan import failures
from bessemer.plan.estimate.job import Job
from bessemer.plan.intervals import PlanInterval, evidence, interval, residuals

SOURCES = {
    "steps": "the plan's step, at every step",
    "program": "median of published steps over what is planned for them, every source alike",
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


def expected_run(job: Job, running: failures.Outlook, ideal: float, chosen: bool) -> ExpectedRun:
    """What a run of `ideal` seconds of steps is expected to take, which may be as long as its steps may. running: checkpoints and
    failures of the slowed steps; chosen: the layout, by the planner."""
    parts = {"steps": ideal, "program": ideal * (evidence(job).factor - 1)}
    parts |= {"failures": running.lost, "checkpoints": running.saves}
    parts["the rest"] = sum(parts.values()) * (exp(residuals()["run"]["rest"][evidence(job).state]) - 1)
    whole, steps = interval("run", job, sum(parts.values())), interval("chosen" if chosen else "step", job, ideal)
    return ExpectedRun(ideal, parts, replace(whole, high=max(whole.high, steps.high)))
