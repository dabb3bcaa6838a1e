"""Calibration of the planner's physical constants to measured steps.

A few steps of a set, or the first steps of a real run, show how its machine differs from the usual one in matmuls, links and
host. Each constant has a width, the standard deviation of its logarithm between machines; a measured step has one too. The search
finds the most likely constants along one constant after the other, since the arithmetic is cheap and, with overlapping parts, not
smooth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, log
from statistics import pstdev

from bessemer.common.errors import InputError
from bessemer.plan.estimate.job import PHYSICS, Job, Physics
from bessemer.plan.estimate.step import step

# Standard deviation of each constant's logarithm between machines and frameworks.
WIDTHS = {
    "matmuls": 0.06, "attention": 0.12, "bandwidth": 0.06, "intra": 0.10, "inter": 0.15, "launch": 0.3, "call": 0.2, "near": 0.2,
    "far": 0.3, "step": 0.3,
}  # fmt: skip
STEP_WIDTH = 0.04  # standard deviation of a measured step's logarithm, for what the arithmetic leaves out
AT_MOST_ONE = ("bandwidth", "intra", "inter")


def calibrate(
    measured: Sequence[tuple[Job, float]], prior: Physics = PHYSICS, widths: dict[str, float] | None = None
) -> Physics:
    """Return the most likely constants given the prior and the measured steps.

    Args:
        measured: Pairs of job and seconds.
        prior: Constants before calibration.
        widths: Standard deviations of the constants' logarithms, `WIDTHS` by default.

    Raises:
        InputError: A step takes no time.
    """
    for _, seconds in measured:
        if not seconds > 0:
            raise InputError(f"calibration: a measured step of {seconds} s; give seconds greater than 0")
    if not measured:
        return prior
    of = WIDTHS if widths is None else widths
    # Steps that disagree about the machine, one slower than planned and one faster, are weak evidence.
    before = [log(step(job, prior).seconds / seconds) for job, seconds in measured]
    width = max(STEP_WIDTH, pstdev(before))

    def cost(moved: dict[str, float]) -> float:
        how = apply(prior, moved)
        misses = sum(_bounded(log(step(job, how).seconds / seconds) / width) for job, seconds in measured)
        return misses + sum((move / of[name]) ** 2 for name, move in moved.items())

    return apply(prior, search(cost, of))


def apply(prior: Physics, moved: dict[str, float]) -> Physics:
    """Return the prior with each constant times e to its move; shares are at most 1."""
    values = {name: getattr(prior, name) * exp(move) for name, move in moved.items()}
    return replace(prior, **{name: min(value, 1.0) if name in AT_MOST_ONE else value for name, value in values.items()})


def _bounded(miss: float) -> float:
    """Return a loss that is quadratic for small misses and linear for large ones (Huber 1964), to limit the weight of a broken
    step.
    """
    size = abs(miss)
    return miss * miss if size <= 3 else 3 * (2 * size - 3)


def search(cost: Callable[[dict[str, float]], float], widths: dict[str, float], rounds: int = 12) -> dict[str, float]:
    """Return the moves of least cost, searched along each constant in turn.

    A step is half a constant's width, and halves when no move helps.
    """
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
