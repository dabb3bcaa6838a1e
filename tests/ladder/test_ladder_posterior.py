"""The posterior of a ladder's law: the sampler draws what it should, and the intervals grow with what they must hold."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from bessemer.ladder.fit import Array
from bessemer.ladder.law import FittedLaw, Interval, Point, fitted
from bessemer.ladder.posterior import SHORT_STEPS, STEEP_REACH, drift_covariance, move, steepened

LONG = 1e9  # steps of runs whose slope steepens no more


def ladder(rungs: int, seed_spread: float = 0.0, seeds: int = 1, steps: float = LONG) -> tuple[Point, ...]:
    """Runs on L = 1.7 + 3 C^-0.15, compute doubling; the three smallest with other seeds, evenly above and below the law."""
    made = []
    for number in range(rungs):
        count = seeds if number < 3 else 1
        for at in np.linspace(-1, 1, count) if count > 1 else (0.0,):
            flops = 1e12 * 2.0**number
            loss = (1.7 + 3.0 * 2.0 ** (-0.15 * number)) * float(np.exp(at * seed_spread))
            size = float(np.sqrt(flops / 120))
            made.append(Point(f"{number}{at}", number, size, 20 * size, flops, loss, steps))
    return tuple(made)


@cache
def law_of(rungs: int, seed_spread: float = 0.0, seeds: int = 1, steps: float = LONG) -> FittedLaw:
    return fitted("ratio", ladder(rungs, seed_spread, seeds, steps))


def width(law: FittedLaw, beyond: float, of_a_run: bool = True) -> float:
    interval: Interval = law.loss(0, 0, beyond * law.points[-1].flops, of_a_run)
    return (interval.high - interval.low) / interval.value


def test_the_sampler_draws_a_normal_distribution_with_its_covariance() -> None:
    covariance = np.array([[2.0, 1.2], [1.2, 1.0]])
    inverse, middle = np.linalg.inv(covariance), np.array([3.0, -1.0])
    chance = np.random.default_rng(0)
    walkers = chance.standard_normal((2000, 2)) * 0.1

    def density(places: Array) -> Array:
        return np.asarray(-0.5 * np.einsum("fi,ij,fj->f", places - middle, inverse, places - middle))

    move(walkers, density, chance, 300)
    assert walkers.mean(axis=0) == pytest.approx(middle, abs=0.15)
    assert np.cov(walkers.T) == pytest.approx(covariance, rel=0.15)


def test_the_drift_is_an_integrated_brownian_motion() -> None:
    """Against 4,000 paths of its slope, summed; nothing moves before the start."""
    steps = 400
    slopes = np.cumsum(np.random.default_rng(1).standard_normal((4000, 2 * steps)), axis=1) * np.sqrt(1 / steps)
    paths = np.cumsum(slopes, axis=1) / steps
    at = np.array([6.0, 7.0])  # one and two beyond the start at 5
    found = drift_covariance(at, at, 5.0)
    assert found == pytest.approx(np.cov(paths[:, [steps - 1, 2 * steps - 1]].T), rel=0.08)
    assert drift_covariance(np.array([4.0]), at, 5.0) == pytest.approx(0.0)


def test_a_steepening_slope_is_added_up_and_ends() -> None:
    """The loss falls by the sum of a slope that grows by 1 for every e times the compute, and by 1 no more from its reach on."""
    at = np.linspace(5.0, 13.0, 8001)
    slope = np.clip(at - 5.0, 0.0, STEEP_REACH)
    summed = np.concatenate([[0.0], np.cumsum((slope[1:] + slope[:-1]) / 2) * 1e-3])
    assert steepened(at, 5.0) == pytest.approx(summed, abs=1e-6)
    assert steepened(np.array([4.0]), 5.0) == pytest.approx(0.0)


def test_short_runs_may_get_better_than_the_law_and_long_ones_need_not() -> None:
    """An interval of short rungs lies lower, and reaches further down from its middle than up; that of rungs with hundreds of
    times the steps does not, and so the law of long runs is what it was."""

    def reach(steps: float) -> tuple[float, float, float]:
        said = law_of(6, steps=steps).loss(0, 0, 8.0 * ladder(6)[-1].flops)
        return said.value, np.log(said.value / said.low), np.log(said.high / said.value)

    (short, down, up), (long, long_down, long_up) = reach(SHORT_STEPS), reach(300 * SHORT_STEPS)
    endless = reach(LONG)[0]
    assert short < 0.995 * long and long == pytest.approx(endless, rel=0.003)
    assert down > long_down and down / up > 1.1 * long_down / long_up


def test_an_interval_grows_with_the_distance_and_shrinks_with_rungs() -> None:
    near, far, farther = (width(law_of(7), beyond) for beyond in (2.0, 8.0, 64.0))
    assert near < 0.7 * far < 0.5 * farther
    assert width(law_of(10), 8.0) < 0.9 * width(law_of(5), 8.0)


def test_seeds_that_differ_widen_the_interval_and_seeds_that_agree_narrow_it() -> None:
    alone = width(law_of(7), 2.0)
    agree, differ = width(law_of(7, 1e-4, seeds=3), 2.0), width(law_of(7, 0.03, seeds=3), 2.0)
    assert agree < alone < 0.6 * differ
    assert width(law_of(7, 0.03, seeds=3), 2.0, of_a_run=False) < 0.95 * differ, "the curve is better known than a run"


def test_the_same_runs_give_the_same_interval() -> None:
    assert fitted("ratio", ladder(6)).loss(0, 0, 1e15) == fitted("ratio", ladder(6)).loss(0, 0, 1e15)
