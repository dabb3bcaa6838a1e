"""How well a ladder's runs know their law: draws from the posterior of the law, of what it misses, and of the noise.

The log loss y of a run, at the logarithm x of its compute, is modelled as

    y = log law(size) - steepening(x) + drift(x) + shape + seed

law     a sum of powers (`law.py`)
steepening
        runs of some hundred steps still learn faster with every step up, so that the slope of the log loss grows with the
        compute: never the other way, so that an interval reaches further down than up. It shrinks with the steps of the
        largest run (`SHORT_STEPS`) and ends `STEEP_REACH` beyond the smallest, as far as it was seen
drift   what else the law's form misses: its slope wanders with the compute as a Brownian motion (the cubic smoothing spline as a
        random process, Wahba 1978), so that far from the rungs its standard deviation grows as distance^1.5
shape   of a size: the rounding of its width, heads, depth and batch moves it off the curve; shared by the seeds of a size
seed    of a single run: another seed gives another loss, the less the larger the run (`SEED_FALL`); runs of a rung with
        other seeds separate it from shape

Each has a prior (`PRIORS`), which matters where the rungs are few: six rungs know little of three spreads and of the constant E.
The posterior is drawn from by the affine-invariant ensemble of Goodman and Weare (2010): walkers move towards or away from one
another, and where they are at four times far apart are the draws. An interval then holds the uncertainty of the law, the
drift, which is the distance of extrapolation, and the spread of sizes and seeds.

Letters: F draws, n runs, T powers, P = 1 + 2T parameters of the law, S = 3 spreads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from bessemer.ladder.fit import Array, predicted

# Median, and the factor to the 16% and 84% points, of log-normal priors. The spreads are those of log losses; drift: standard
# deviation of the slope d log L / d log C after the compute has grown by e; steepening: what the slope gains by then.
PRIORS = {
    "exponent": (0.15, 2.5), "seed": (0.006, 2.5), "shape": (0.003, 2.0), "drift": (0.015, 2.0), "steepening": (0.008, 2.5),
}  # fmt: skip
CONSTANT_POWER = 3.0  # E as a share of the lowest loss is beta-distributed with 1 and this: a quarter in the mean
SURFACE_EXPONENT = (0.3, 2.0)  # of N and of D alone: about twice that of compute
SEED_FALL = 0.3  # exponent of compute with which the spread of seeds falls: short runs of small models scatter most
SPREADS = ("seed", "shape", "drift")
DRAWN = (*SPREADS, "steepening")
# The steepening was measured on ladders of 139 to 284 steps; on C++ headers one of 555 to 1,135 steps still has it up to its
# fifth rung, and its sixth is off it. That it then shrinks as 1 / steps is assumed: no longer ladder was trained.
SHORT_STEPS = 1000.0
STEEP_REACH = log(100)  # e-folds of compute: from the smallest rung of those ladders to the planned run
WALKERS = 100
BURN_IN = 600  # moves of every walker before the first draws; the ensemble forgets where it began after some tens
APART = 150  # moves from the draws of one time to those of the next
TIMES = 4
STRETCH = 2.0  # Goodman and Weare's a
QUANTILES = np.array([NormalDist().inv_cdf((number + 0.5) / 16) for number in range(16)])


@dataclass(frozen=True)
class Posterior:
    """Draws given runs. law: (F, P) its parameters; spreads: (F, S) standard deviations of seed (of the smallest run), shape
    and drift; steepening: (F,) gain of the slope by e times the compute; compute_n: logarithm of the runs' FLOPs; weights:
    (F, n) the covariance's inverse times what the law leaves of the runs; factors: (F, n, n) its Cholesky factors."""

    law: Array
    spreads: Array
    steepening: Array
    compute_n: Array
    weights: Array
    factors: Array

    def noise(self, compute: float) -> Array:
        """(F,) standard deviation of a single run of a new size about the curve."""
        falls = seed_share(compute, self.compute_n.min())
        return np.asarray(np.hypot(self.spreads[:, 0] * falls, self.spreads[:, 1]))

    def log_loss(self, x_T: Array, compute: float, of_a_run: bool) -> Array:
        """(16 F,) draws of the log loss at a size: every draw's own normal distribution by its quantiles.

        x_T: logarithms of the law's sizes about the centre; compute: logarithm of the FLOPs; of_a_run: a single run of a new
        size, not the curve.
        """
        variance = self.spreads[:, 2] ** 2
        start = self.compute_n.min()
        across = variance[:, None] * drift_covariance(np.array([compute]), self.compute_n, start)[0]
        middle = predicted(self.law, x_T[None])[0][:, 0] + (across * self.weights).sum(axis=1)
        middle -= self.steepening * steepened(np.array([compute]), start)
        solved = np.linalg.solve(self.factors, across[..., None])[..., 0]
        own = variance * drift_covariance(np.array([compute]), np.array([compute]), start)[0, 0]
        left = np.maximum(own - (solved**2).sum(axis=1), 0.0) + (self.noise(compute) ** 2 if of_a_run else 0.0)
        return np.asarray(middle[:, None] + np.sqrt(left)[:, None] * QUANTILES).ravel()


def seed_share(compute: npt.ArrayLike, start: float) -> Array:
    """The spread of seeds at logarithms of compute, as a share of that at `start`, the smallest run's."""
    return np.asarray(np.exp(-SEED_FALL * (np.asarray(compute) - start)))


def steepened(compute: Array, start: float) -> Array:
    """By how much a unit of steepening lowers the log loss at logarithms of compute: half the square of the distance from
    `start`, the smallest run, and a straight line from STEEP_REACH on."""
    away = np.maximum(compute - start, 0.0)
    within = np.minimum(away, STEEP_REACH)
    return np.asarray(within * (away - within / 2))


def drift_covariance(left: Array, right: Array, start: float) -> Array:
    """(m, n) covariance of a function whose slope is a unit Brownian motion; value and slope are 0 at `start`.

    min^2 (3 max - min) / 6 of the distances from there; 0 below it.
    """
    a, b = np.maximum(left[:, None] - start, 0.0), np.maximum(right[None] - start, 0.0)
    low, high = np.minimum(a, b), np.maximum(a, b)
    return np.asarray(low**2 * (3 * high - low) / 6)


def draw(
    best: Array, x_nT: Array, compute_n: Array, sizes_n: Array, y_n: Array, most_steps: float, seed: int
) -> Posterior:
    """Draws of law and spreads given runs.

    best: (P,) the best fit, where the walkers begin; x_nT: logarithms of the law's sizes about its centre; compute_n: logarithm
    of the FLOPs; sizes_n: number of the size, equal for runs that differ only in their seed; y_n: log losses;
    most_steps: of the longest run.
    """
    chance = np.random.default_rng([seed, 0])
    same = (sizes_n[:, None] == sizes_n[None]).astype(float)
    drift = drift_covariance(compute_n, compute_n, float(compute_n.min()))
    seeds = np.diag(seed_share(compute_n, float(compute_n.min())) ** 2)
    kinds = np.stack([seeds, same, drift])
    share = min(1.0, SHORT_STEPS / most_steps)
    lowered = share * steepened(compute_n, float(compute_n.min()))
    walkers = _first(best, y_n, chance, WALKERS)
    size = walkers.shape[1] - len(DRAWN)

    def split(places: Array) -> tuple[Array, Array, Array]:
        spreads, steepening = np.exp(places[:, size:-1]), np.exp(places[:, -1:])
        covariance = np.einsum("fs,snm->fnm", spreads**2, kinds) + 1e-12 * np.eye(len(y_n))
        return (
            spreads,
            np.linalg.cholesky(covariance),
            y_n + steepening * lowered - predicted(places[:, :size], x_nT)[0],
        )

    def density(places: Array) -> Array:
        prior = _log_prior(places, float(y_n.min()), x_nT.shape[1])
        safe = np.where(np.isfinite(prior)[:, None], places, walkers[:1])
        _, factors, left = split(safe)
        scaled = np.linalg.solve(factors, left[..., None])[..., 0]
        fits = -0.5 * (scaled**2).sum(axis=1) - np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(axis=1)
        return np.asarray(np.where(np.isfinite(prior), prior + fits, -np.inf))

    drawn = []
    for number in range(TIMES):
        move(walkers, density, chance, APART if number else BURN_IN)
        drawn.append(walkers.copy())
    walkers = np.concatenate(drawn)
    spreads, factors, left = split(walkers)
    scaled = np.linalg.solve(factors, left[..., None])
    weights = np.linalg.solve(np.swapaxes(factors, 1, 2), scaled)[..., 0]
    return Posterior(walkers[:, :size], spreads, share * np.exp(walkers[:, -1]), compute_n, weights, factors)


def _log_prior(places: Array, lowest: float, powers: int) -> Array:
    """(F,) log prior density: E as a share of the lowest loss beta-distributed, coefficients flat within bounds, all
    else log-normal."""
    size = 1 + 2 * powers
    constant, coefficients, exponents = places[:, 0], places[:, 1 : 1 + powers], places[:, 1 + powers : size]
    middle, factor = PRIORS["exponent"] if powers == 1 else SURFACE_EXPONENT
    logs = np.log(np.maximum(exponents, 1e-9))
    below = np.log1p(-np.exp(np.minimum(constant - lowest, -1e-9)))
    found = constant + (CONSTANT_POWER - 1) * below - logs.sum(axis=1)
    found -= 0.5 * (((logs - np.log(middle)) / np.log(factor)) ** 2).sum(axis=1)
    for number, kind in enumerate(DRAWN):
        middle, factor = PRIORS[kind]
        found = found - 0.5 * ((places[:, size + number] - np.log(middle)) / np.log(factor)) ** 2
    is_possible = (constant < lowest) & (constant > lowest - 12) & (exponents > 0).all(axis=1)
    is_possible &= ((coefficients > lowest - 15) & (coefficients < lowest + 5)).all(axis=1)
    return np.asarray(np.where(is_possible, found, -np.inf))


def _first(best: Array, y_n: Array, chance: np.random.Generator, count: int) -> Array:
    """Where the walkers begin: laws of any constant E that have the level and the slopes of the best fit in the middle of the
    runs; spreads and steepening drawn from their priors."""
    powers = (len(best) - 1) // 2
    level, derivatives = predicted(best, np.zeros((1, powers)))
    slopes = derivatives[0, 1 : 1 + powers] * best[1 + powers :]
    rest = 1 - 0.95 * chance.random(count) * np.exp(float(y_n.min() - level[0]))
    shares = rest[:, None] * chance.dirichlet(np.full(powers, 10.0), count)
    exponents = np.maximum(slopes, 0.01) / shares * np.exp(0.1 * chance.standard_normal((count, powers)))
    spreads = [PRIORS[kind][0] * PRIORS[kind][1] ** np.clip(chance.standard_normal(count), -2, 2) for kind in DRAWN]
    logs = level[0] + np.log(np.concatenate([1 - rest[:, None], shares], axis=1))
    return np.concatenate([logs, exponents, np.log(np.stack(spreads, axis=1))], axis=1)


def move(walkers: Array, density: Callable[[Array], Array], chance: np.random.Generator, moves: int) -> None:
    """Stretch moves of each half of the walkers towards or away from the other, in place."""
    half, size = len(walkers) // 2, walkers.shape[1]
    parts = (slice(0, half), slice(half, None))
    levels = density(walkers)
    for _ in range(moves):
        for mine, others in (parts, parts[::-1]):
            scale = (1 + (STRETCH - 1) * chance.random(half)) ** 2 / STRETCH
            partners = walkers[others][chance.integers(half, size=half)]
            places = partners + scale[:, None] * (walkers[mine] - partners)
            found = density(places)
            with np.errstate(invalid="ignore"):
                gain = (size - 1) * np.log(scale) + found - levels[mine]
            is_taken = np.log(chance.random(half)) < gain
            walkers[mine][is_taken] = places[is_taken]
            levels[mine][is_taken] = found[is_taken]
