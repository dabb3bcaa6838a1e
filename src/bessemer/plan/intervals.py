"""80% intervals of a plan's figures, from published measurements, and the expected hours of a run.

The residuals are logarithms of measured over planned, of published cases that nothing was fitted to. Every source counts the
same, however many cases it has. The tails are chosen so that about 80% of the cases of a source lie inside when that source is
left out, and at least 75% of all cases; benchmarks/planner_intervals.py does that and writes residuals.json,
docs/background/plan-accuracy.md shows both.

Kinds of question: `step` (the layout is given) and `chosen` (the planner chose it), each for a program whose profile was compared
with measured steps (`measured`), or not (`unmeasured`: what other programs took over this profile's time); `run` (device-hours of
a whole run, around the expected ones); `memory`. What is expected of a step is the median of `step`, whoever chose the layout, so
that one layout has one price; the choices of the sweep, some of which ran many times slower than planned, widen the range.
What no case covers widens an interval: a device of another generation or a precision that was not measured on it, more devices
than any case has, and of memory a program of which no peak was compared. Mixtures of experts have cases of their own, too few
for residuals of their own: how far they lie from the plan widens the interval of a dense model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from math import exp, hypot, log2
from typing import Any, Literal

from bessemer.plan import failures
from bessemer.plan.estimate.job import Job

Question = Literal["step", "chosen", "run", "memory"]
UNMEASURED_DEVICE = 0.15
"""Standard deviation of the logarithm of what a device reaches over what is expected of one that nobody measured: assumed from
the H100, which reaches 0.80 of its best matmul over whole steps where nothing less than 1 was known before (`sustained` in
plan/devices.toml), a logarithm of 0.22 or one and a half standard deviations."""
UNMEASURED_MEMORY = 0.1
"""The same of the memory of a program whose peaks were compared with none: assumed, half of the mean error of nanotron's sweep
while its runs' versions were not known."""
MOST_DEVICES = 16_384
"""Of the largest published case (Llama 3 405B)."""
EACH_DOUBLING = 0.05
"""Standard deviation of the logarithm for each doubling of the devices beyond that: assumed."""
NORMAL_80 = 1.2816
"""Half of an 80% interval of a normal distribution, in standard deviations."""


@dataclass(frozen=True)
class PlanInterval:
    """An 80% interval around what is expected."""

    low: float
    expected: float
    high: float

    def times(self, factor: float) -> PlanInterval:
        """In another unit, or of so many."""
        return PlanInterval(self.low * factor, self.expected * factor, self.high * factor)


@dataclass(frozen=True)
class Evidence:
    """What was measured that is like a job. program: its profile was validated on devices of this generation in this precision;
    elsewhere: on others; device: other programs were measured on such devices; cases: published steps of this program, of those
    that apply; factor: expected over planned seconds of a step, the median of published ones;
    state: which residuals apply."""

    program: bool
    elsewhere: bool
    device: bool
    cases: int
    factor: float
    state: Literal["measured", "unmeasured"]


@cache
def residuals() -> dict[str, Any]:
    """The table (residuals.json): kinds of question, and which programs were measured on which devices."""
    return json.loads((resources.files(__package__) / "residuals.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def device_class(job: Job) -> str:
    """Generation of a job's device and its precision, by which cases are distinguished."""
    device = job.cluster.device
    return f"{device.generation or device.name}, {job.precision}"


def evidence(job: Job) -> Evidence:
    """What of the published cases is like a job."""
    table, kind = residuals(), device_class(job)
    measured = table["mixtures" if job.model.expert_parameters else "measured"]
    own = measured.get(job.framework.name, {})
    state: Literal["measured", "unmeasured"] = "measured" if own else "unmeasured"
    others = sum(program.get(kind, 0) for program in measured.values())
    return Evidence(
        program=kind in own, elsewhere=bool(own) and kind not in own, device=others > 0, cases=own.get(kind, sum(own.values())),
        factor=exp(table["step"][state]["middle"]), state=state,
    )  # fmt: skip


def extrapolation(job: Job) -> float:
    """Standard deviation of the logarithm that is added for what no case covers."""
    found = evidence(job)
    device = UNMEASURED_DEVICE if found.elsewhere or not found.device else 0.0
    mixture = residuals()["mixture_spread"] if job.model.expert_parameters else 0.0
    return hypot(device, mixture, EACH_DOUBLING * max(log2(job.cluster.devices / MOST_DEVICES), 0.0))


def _memory_extrapolation(job: Job) -> float:
    """The same of memory, which follows from the program: none for this one, whose own runs and tensors it is counted by, and for
    relatives of those that published peaks are of (Megatron's, torchtitan's)."""
    compared = {"bessemer", *(name.split("-")[0] for name in residuals()["memory"]["kinds"])}
    return 0.0 if job.framework.name.split("-")[0] in compared else UNMEASURED_MEMORY


def interval(question: Question, job: Job, planned: float) -> PlanInterval:
    """The 80% interval of a planned figure; for `run` of what is expected (`expected_run`)."""
    table, state = residuals(), evidence(job).state
    spread = _memory_extrapolation(job) if question == "memory" else extrapolation(job)
    row = table[question] if question in ("run", "memory") else table[question][state]
    middle, extra = (table["step"][state] if question == "chosen" else row)["middle"], NORMAL_80 * spread
    low, high = hypot(middle - row["low"], extra), hypot(row["high"] - middle, extra)
    return PlanInterval(planned * exp(middle - low), planned * exp(middle), planned * exp(middle + high))


# Each part of a run is a factor on what stands before it. Where a part can be worked out it is (checkpoints, failures); what
# published steps show is taken from them; what no source separates is one number, fitted to the device-hours of half of the
# published runs (benchmarks/planner_runs.py, which scores it on the other half).


@dataclass(frozen=True)
class ExpectedRun:
    """Seconds of a run. parts: what makes up the expected, `steps` first; seconds: the 80% interval around the expected."""

    parts: dict[str, float]
    seconds: PlanInterval


def expected_run(job: Job, running: failures.Outlook, ideal: float, question: Question) -> ExpectedRun:
    """What a run of `ideal` seconds of steps is expected to take, which may be as long as its steps may. running: checkpoints and
    failures of the slowed steps; question: `step` or `chosen`."""
    parts = {"steps": ideal, "program": ideal * (evidence(job).factor - 1)}
    parts |= {"failures": running.lost, "checkpoints": running.saves}
    parts["the rest"] = sum(parts.values()) * (exp(residuals()["run"]["rest"][evidence(job).state]) - 1)
    whole, steps = interval("run", job, sum(parts.values())), interval(question, job, ideal)
    return ExpectedRun(parts, replace(whole, high=max(whole.high, steps.high)))
