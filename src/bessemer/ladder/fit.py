"""What a ladder's runs say: the law with its uncertainty, the planned run's loss, and how far to believe it.

Uncertainty is by bootstrap over the rungs. With three rungs or more for each number of the law, rungs are drawn with
replacement (Efron 1979; as in Besiroglu et al. 2024). With fewer, such draws often hold too few different rungs for a
fit; every rung's log loss is then drawn anew about the fitted law, with the spread that the fit left and, since few rungs
know that spread badly, with the spread itself drawn from what they know of it (s^2 nu / chi^2_nu): in a straight line
this gives the t interval. An interval for a run holds the law's uncertainty and the spread of one run about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from bessemer.errors import InputError
from bessemer.ladder.design import Design
from bessemer.ladder.law import Array, Fits, Law, fit, predicted, refit

DRAWS = 400
WITHIN = 0.90  # share of the draws that an interval holds
CASES_FROM = 3  # rungs for each number of the law, from which on rungs are drawn with replacement
LEAST_SPREAD = 1e-4  # of log losses: no two runs agree better, and a law through all its rungs would claim they do
SAME_COMPUTE = 0.9  # rungs of at least so much of the largest one's compute are of its amount
MOST_MORE = 4  # times the rungs there are: beyond, more runs are not looked for


@dataclass(frozen=True)
class Point:
    """A run that is done: N, D, C, and its held-out loss in nats a token."""

    name: str
    group: int
    parameters: float
    tokens: float
    flops: float
    loss: float


@dataclass(frozen=True)
class Interval:
    """A value and between what it lies in 90% of the draws."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, drawn: Array) -> Interval:
        """From the draws' percentiles."""
        edge = 100 * (1 - WITHIN) / 2
        low, high = np.percentile(drawn, [edge, 100 - edge])
        return cls(float(value), float(low), float(high))

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}

    def covers(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Fitted:
    """The law of some runs. spread: of their log losses about it; freedom: runs less numbers of the law; noise: (draws,) the
    spread in each draw; method: of the bootstrap, `rungs` or `noise`."""

    design: Design
    points: tuple[Point, ...]
    fits: Fits
    draws: Fits
    noise: Array
    spread: float
    freedom: int
    method: str
    seed: int

    @property
    def law(self) -> Law:
        return self.fits.law()

    def sizes(self, parameters: float, tokens: float, flops: float) -> Array:
        """(1, T) what the law is a function of."""
        return np.array([[parameters, tokens]] if self.design == "isoflop" else [[flops]], dtype=np.float64)

    def loss(self, parameters: float, tokens: float, flops: float, of_a_run: bool = True) -> Interval:
        """The predicted loss, for a run of this size; of_a_run: the interval holds a run's own spread too."""
        logs = np.log(self.sizes(parameters, tokens, flops))
        value = float(np.exp(self.fits.log_loss(logs)[0, 0]))
        drawn = self.draws.log_loss(logs)[:, 0]
        if of_a_run:
            drawn = drawn + self.noise * np.random.default_rng([self.seed, 1]).standard_normal(len(drawn))
        return Interval.of(value, np.exp(drawn))


def numbers(design: Design) -> int:
    """Of the design's law."""
    return 5 if design == "isoflop" else 3


def table_of(design: Design, points: tuple[Point, ...]) -> Array:
    """(n, T) what the design's law is a function of."""
    if design == "isoflop":
        return np.array([[point.parameters, point.tokens] for point in points])
    return np.array([[point.flops] for point in points])


def fitted(design: Design, points: tuple[Point, ...], seed: int = 0, draws: int = DRAWS) -> Fitted:
    """Fit the design's law to runs that are done. Raises InputError when they are not more than the law's numbers."""
    freedom = len(points) - numbers(design)
    if freedom < 1:
        raise InputError(
            f"{len(points)} finished rungs are too few: the law of a ladder of design {design!r} has {numbers(design)} "
            "numbers, and an error shows only with more rungs than that; give more with --rungs"
        )
    sizes, losses = table_of(design, points), np.array([point.loss for point in points])
    found = fit(sizes, losses)
    residual = np.log(losses) - found.log_loss(np.log(sizes))[0]
    spread = max(float(np.sqrt((residual**2).sum() / freedom)), LEAST_SPREAD)
    chance = np.random.default_rng([seed, 0])
    count = len(points)
    if count >= CASES_FROM * numbers(design):
        method, noise = "rungs", np.full(draws, spread)
        weights = chance.multinomial(count, np.full(count, 1 / count), size=draws).astype(np.float64)
        drawn = np.tile(losses, (draws, 1))
    else:
        method, noise = "noise", spread * np.sqrt(freedom / chance.chisquare(freedom, draws))
        weights = np.ones((draws, count))
        centre = found.log_loss(np.log(sizes))[0]
        drawn = np.exp(centre + noise[:, None] * chance.standard_normal((draws, count)))
    return Fitted(
        design, points, found, refit(found, sizes, drawn, weights), noise, spread, freedom, method, seed
    )  # fmt: skip


def left_out(design: Design, points: tuple[Point, ...], seed: int = 0, draws: int = DRAWS) -> dict[str, Any] | None:
    """The largest rung predicted from the smaller ones, as the planned run is from all; None where too few are left.

    Rungs of its own amount of compute are left out with it where enough others stay, so that it lies beyond them.
    """
    largest = max(points, key=lambda point: (round(np.log(point.flops), 1), point.parameters))
    others = tuple(point for point in points if point is not largest)
    below = tuple(point for point in others if point.flops < SAME_COMPUTE * largest.flops)
    rest = below if len(below) >= numbers(design) + 2 else others
    if len(rest) <= numbers(design):
        return None
    of_rest = fitted(design, rest, seed, draws)
    said = of_rest.loss(largest.parameters, largest.tokens, largest.flops)
    return {
        "name": largest.name,
        "from_rungs": len(rest),
        "beyond": largest.flops / max(point.flops for point in rest),
        "predicted": said.to_dict(),
        "measured": largest.loss,
        "error": said.value / largest.loss - 1,
        "covered": said.covers(largest.loss),
    }


def optimum(found: Fitted, flops: float, flops_per_parameter: float) -> dict[str, Any]:
    """The size and the tokens that are best for so much compute, by a surface; flops_per_parameter: of a token, C / (N D).

    The minimum of the law under C = k N D (Hoffmann et al. 2022, equation 4).
    """
    powers = found.draws.parameters[:, 1:]
    every = np.concatenate([found.fits.parameters[:, 1:], powers])
    log_a, log_b, alpha, beta = every.T
    log_a, log_b = log_a + alpha * found.fits.centre[0], log_b + beta * found.fits.centre[1]
    share = beta / (alpha + beta)
    log_n = (np.log(alpha / beta) + log_a - log_b) / (alpha + beta) + share * np.log(flops / flops_per_parameter)
    size = np.exp(np.clip(log_n, -50, 200))
    tokens = flops / flops_per_parameter / size
    return {
        "parameters": Interval.of(size[0], size[1:]).to_dict(),
        "tokens": Interval.of(tokens[0], tokens[1:]).to_dict(),
        "tokens_per_parameter": Interval.of(tokens[0] / size[0], tokens[1:] / size[1:]).to_dict(),
        "exponent": Interval.of(share[0], share[1:]).to_dict(),
        "loss": found.loss(size[0], tokens[0], flops, of_a_run=False).to_dict(),
    }


def more_runs(found: Fitted, parameters: float, tokens: float, flops: float) -> dict[str, Any]:
    """How many more rungs would halve the law's error at a planned run.

    By the delta method: the error of the predicted log loss is s sqrt(g' (J'J)^-1 g), with J the law's derivatives at the
    rungs and g at the planned run. Rungs like those there are add to J'J in proportion, so three times as many halve it.
    Rungs that go on upwards by the ladder's own factor do it with fewer; they are added one by one, each the one that lowers
    the error most, none of more than half the planned compute.
    """
    points = found.points
    table = table_of(found.design, points)
    slopes = _slopes(found, table)
    at = _slopes(found, found.sizes(parameters, tokens, flops))[0]
    information = slopes.T @ slopes
    now = _error(information, at)
    largest = max(points, key=lambda point: point.flops)
    amounts = sorted({round(np.log(point.flops), 1) for point in points})
    factor = float(np.exp(np.clip(np.median(np.diff(amounts)), np.log(1.5), np.log(2)))) if len(amounts) > 1 else 2.0
    candidates: list[tuple[float, float, float]] = []
    scale = factor
    while largest.flops * scale <= 0.5 * flops and len(candidates) < 40:
        for point in points:
            if point.flops >= SAME_COMPUTE * largest.flops:
                candidates.append((point.parameters * scale**0.5, point.tokens * scale**0.5, point.flops * scale))
        scale *= factor
    result: dict[str, Any] = {
        "error_now": found.spread * now,
        "of_the_same_kind": 3 * len(points),
        "same_kind_flops": 3 * sum(point.flops for point in points),
        "going_upwards": None,
        "upwards_flops": None,
        "method": "delta method on the fitted law",
    }
    if not candidates:
        return result
    rows = np.concatenate([_slopes(found, found.sizes(*candidate)) for candidate in candidates])
    spent = 0.0
    for number in range(1, MOST_MORE * len(points) + 1):
        errors = [_error(information + np.outer(row, row), at) for row in rows]
        best = int(np.argmin(errors))
        information = information + np.outer(rows[best], rows[best])
        spent += candidates[best][2]
        if errors[best] <= 0.5 * now:
            result |= {"going_upwards": number, "upwards_flops": spent}
            break
    return result


def _slopes(found: Fitted, sizes: Array) -> Array:
    """(n, P) derivatives of the law's log loss by its numbers."""
    return np.asarray(predicted(found.fits.parameters, np.log(sizes) - found.fits.centre)[1][0])


def _error(information: Array, at: Array) -> float:
    """sqrt(g' (J'J)^-1 g)."""
    return sqrt(max(float(at @ np.linalg.pinv(information, rcond=1e-12, hermitian=True) @ at), 0.0))
