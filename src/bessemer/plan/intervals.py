"""80% intervals of planned figures, derived from published measurements, and the expected duration of a run.

Residuals are logarithms of measured over planned values, of published cases that nothing was fitted to. Every source
has the same weight, whatever its number of cases. The tails are chosen so that about 80% of a source's cases are inside
when that source is left out, and at least 75% of all cases. benchmarks/planner_intervals.py computes them and writes
residuals.json; docs/background/plan-accuracy.md shows both.

There are four questions. `step` is the time of a given layout and `chosen` that of a layout which the planner chose.
Both have residuals for programs whose profile was compared with measured steps (`measured`) and for all others
(`unmeasured`: measured times of other programs over this profile's time). `run` is the device-hours of a whole run
around the expected ones, and `memory` is peak memory. The expected step time is the median of `step`, even for layouts
that the planner chose, so that a layout has one price. The planner's choices in nanotron's sweep, some of which ran
many times slower than planned, widen the range of `chosen`.

Intervals widen for anything that no case covers: a device of another generation, a precision that was not measured on
it, more devices than in any case, and for memory a program without a compared peak. Mixtures of experts have too few
cases for their own residuals. Their distance from the plan widens the interval of a dense model.
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
"""Standard deviation of the logarithm of measured over expected performance, for a device that nobody measured. Assumed from
the H100. It reaches 0.80 of its best matmul over whole steps where nothing less than 1 was known before (`sustained` in
plan/devices.toml). The logarithm of that is 0.22, one and a half standard deviations."""
UNMEASURED_MEMORY = 0.1
"""Standard deviation of the logarithm of measured over planned memory, for a program without any compared peak. Assumed to be
half of the mean error of nanotron's sweep before the versions of its runs were known."""
MOST_DEVICES = 16_384
"""Number of devices in the largest published case (Llama 3 405B)."""
EACH_DOUBLING = 0.05
"""Standard deviation of the logarithm that each doubling of the devices beyond `MOST_DEVICES` adds (assumed)."""
NORMAL_80 = 1.2816
"""Half of the 80% interval of a normal distribution, in standard deviations."""


@dataclass(frozen=True)
class PlanInterval:
    """An 80% interval around an expected value.

    Attributes:
        low: Lower end.
        expected: Expected value.
        high: Upper end.
    """

    low: float
    expected: float
    high: float

    def times(self, factor: float) -> PlanInterval:
        """Return the interval multiplied by a factor, for example to convert units."""
        return PlanInterval(self.low * factor, self.expected * factor, self.high * factor)


@dataclass(frozen=True)
class Evidence:
    """Published measurements of training programs that resemble a job.

    Attributes:
        program: True if the program's profile was validated on this device generation in this precision.
        elsewhere: True if the program's profile was validated, but only on other device generations.
        device: True if any program was measured on devices of this generation.
        cases: Number of published steps of this program that apply.
        factor: Median of expected over planned step time in published steps.
        state: "measured" if this program was measured on any device, else "unmeasured"; selects the residuals to use.
    """

    program: bool
    elsewhere: bool
    device: bool
    cases: int
    factor: float
    state: Literal["measured", "unmeasured"]


@cache
def residuals() -> dict[str, Any]:
    """Load residuals.json, the prediction errors on published measurements by question (step, memory, ...).

    It also lists which programs were measured on which devices.
    """
    return json.loads((resources.files(__package__) / "residuals.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def device_class(job: Job) -> str:
    """Return the device generation and precision of a job as one string, the key of published measurements."""
    device = job.cluster.device
    return f"{device.generation or device.name}, {job.precision}"


def evidence(job: Job) -> Evidence:
    """Return the published measurements that resemble a job."""
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
    """Return the additional standard deviation of log(measured / planned) for what no published case covers."""
    facts = evidence(job)
    device = UNMEASURED_DEVICE if facts.elsewhere or not facts.device else 0.0
    mixture = residuals()["mixture_spread"] if job.model.expert_parameters else 0.0
    return hypot(device, mixture, EACH_DOUBLING * max(log2(job.cluster.devices / MOST_DEVICES), 0.0))


def _memory_extrapolation(job: Job) -> float:
    """Return the additional standard deviation of log(measured / planned) for memory.

    Memory depends on the program alone. Nothing is added for Bessemer, whose plan counts its own tensors, nor for
    relatives of programs with published peaks (Megatron's, torchtitan's).
    """
    compared = {"bessemer", *(name.split("-")[0] for name in residuals()["memory"]["kinds"])}
    return 0.0 if job.framework.name.split("-")[0] in compared else UNMEASURED_MEMORY


def interval(question: Question, job: Job, planned: float) -> PlanInterval:
    """Return the 80% interval of a planned figure.

    Args:
        question: The kind of figure.
        job: The job that was planned.
        planned: The planned value; for `run` the expected one (`expected_run`).
    """
    table, state = residuals(), evidence(job).state
    spread = _memory_extrapolation(job) if question == "memory" else extrapolation(job)
    row = table[question] if question in ("run", "memory") else table[question][state]
    middle, extra = (table["step"][state] if question == "chosen" else row)["middle"], NORMAL_80 * spread
    low, high = hypot(middle - row["low"], extra), hypot(row["high"] - middle, extra)
    return PlanInterval(planned * exp(middle - low), planned * exp(middle), planned * exp(middle + high))


# Each part of a run is a factor on the sum of those before it. Checkpoints and failures are computed, and the program's factor
# comes from published steps. No source separates the rest, so it is one number, fitted to the device-hours of half of the
# published runs. benchmarks/planner_runs.py scores it on the other half.


@dataclass(frozen=True)
class ExpectedRun:
    """The expected duration of a run, in seconds.

    Attributes:
        parts: Seconds by cause, `steps` first; their sum is the expected duration.
        seconds: 80% interval around the expected duration.
    """

    parts: dict[str, float]
    seconds: PlanInterval


def expected_run(job: Job, running: failures.Outlook, ideal: float, question: Question) -> ExpectedRun:
    """Return the expected duration of a run, with its parts and 80% interval.

    The upper end is at least that of the interval of the steps alone.

    Args:
        job: The job that was planned.
        running: Time lost to checkpoints and failures of the run at its expected step time.
        ideal: Seconds of all steps as planned.
        question: `step` if the layout was given, `chosen` if the planner chose it.
    """
    parts = {"steps": ideal, "program": ideal * (evidence(job).factor - 1)}
    parts |= {"failures": running.lost, "checkpoints": running.saves}
    parts["the rest"] = sum(parts.values()) * (exp(residuals()["run"]["rest"][evidence(job).state]) - 1)
    whole, steps = interval("run", job, sum(parts.values())), interval(question, job, ideal)
    return ExpectedRun(parts, replace(whole, high=max(whole.high, steps.high)))
