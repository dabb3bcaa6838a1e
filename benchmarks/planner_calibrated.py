"""The estimate brought to measured steps: a few physical constants, moved no further than the measurements ask for.

Three steps of a set, or a real run's first ones, say how its machine differs from the usual one: its matmuls, its links, its
host. Each constant has a width, how far (in its logarithm) machines are seen to differ; a step has one too. The constants
that make both likely are found by a search along one constant after the other (the arithmetic is cheap and not smooth, since
parts hide behind each other).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, log
from statistics import pstdev

from bessemer.common.errors import InputError
from bessemer.plan.estimate.job import PHYSICS, Job, Physics
from bessemer.plan.estimate.step import step

# How far machines and frameworks differ in a constant, as a standard deviation of its logarithm.
WIDTHS = {
    "matmuls": 0.06, "attention": 0.12, "bandwidth": 0.06, "intra": 0.10, "inter": 0.15, "launch": 0.3, "call": 0.2, "near": 0.2,
    "far": 0.3, "step": 0.3,
}  # fmt: skip
STEP_WIDTH = 0.04  # of a measured step's logarithm: what the arithmetic itself leaves open
AT_MOST_ONE = ("bandwidth", "intra", "inter")


def calibrate(
    measured: Sequence[tuple[Job, float]], prior: Physics = PHYSICS, widths: dict[str, float] | None = None
) -> Physics:
    """Constants with which the measured steps (job, seconds) and the prior are most likely together.

    Raises InputError on a step of no time.
    """
    for _, seconds in measured:
        if not seconds > 0:
            raise InputError(f"calibration: a measured step of {seconds} s; give seconds above zero")
    if not measured:
        return prior
    of = WIDTHS if widths is None else widths
    # Steps that disagree about the machine, one slower than planned and one faster, say little about it.
    before = [log(step(job, prior).seconds / seconds) for job, seconds in measured]
    width = max(STEP_WIDTH, pstdev(before))

    def cost(moved: dict[str, float]) -> float:
        how = apply(prior, moved)
        misses = sum(_bounded(log(step(job, how).seconds / seconds) / width) for job, seconds in measured)
        return misses + sum((move / of[name]) ** 2 for name, move in moved.items())

    return apply(prior, search(cost, of))


def apply(prior: Physics, moved: dict[str, float]) -> Physics:
    """The prior with each constant times e to its move; shares at most 1."""
    values = {name: getattr(prior, name) * exp(move) for name, move in moved.items()}
    return replace(prior, **{name: min(value, 1.0) if name in AT_MOST_ONE else value for name, value in values.items()})


def _bounded(miss: float) -> float:
    """Squared for small misses, linear for large ones (Huber 1964): one broken step does not turn all constants."""
    size = abs(miss)
    return miss * miss if size <= 3 else 3 * (2 * size - 3)


def search(cost: Callable[[dict[str, float]], float], widths: dict[str, float], rounds: int = 12) -> dict[str, float]:
    """Moves of least cost: along each constant in turn, in steps of half its width that halve when none helps."""
    moved = dict.fromkeys(widths, 0.0)
    best, size = cost(moved), 0.5
    for _ in range(rounds):
        improved = False
        for name, width in widths.items():
            for sign in (1, -1):
                tried = {**moved, name: moved[name] + sign * size * width}
                value = cost(tried)
                while value < best - 1e-9:
                    moved, best, improved = tried, value, True
                    tried = {**moved, name: moved[name] + sign * size * width}
                    value = cost(tried)
        if not improved:
            size /= 2
    return moved
