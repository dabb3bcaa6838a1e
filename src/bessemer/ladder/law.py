"""The laws of a ladder: fitted to its runs, with their uncertainty, and what they say of the planned run.

    surface   L(N, D) = E + A / N^alpha + B / D^beta      (Hoffmann et al. 2022, equation 2)
    line      L(C)    = E + K / C^gamma                   (along a fixed number of tokens a parameter)

Both are fitted as in section 3.3 there: the Huber loss (delta 1e-3) of the differences of log loss, with the sum of powers as
a log-sum-exp, by BFGS from several starts. Besiroglu et al. 2024 found that the original fit ended early, because the mean
over the runs in place of their sum is smaller than the optimiser's tolerance; here the objective is scaled by delta^2.

Uncertainty is by bootstrap. With three rungs or more for each parameter of the law, rungs are drawn with replacement (Efron
1979; as in Besiroglu et al. 2024). With fewer, such draws often hold too few different rungs for a fit; every rung's log loss
is then drawn anew about the fitted law, with the spread that the fit left, itself drawn from what few rungs know of it
(s^2 nu / chi^2_nu): for a straight line this gives the t interval. An interval for a run holds the law's uncertainty and the
spread of one run about it.

Letters: F fits, n runs, T powers (2 on a surface, 1 on a line), P = 1 + 2T parameters.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.errors import BessemerError, InputError
from bessemer.ladder.design import Design

Array = npt.NDArray[np.float64]

HUBER_DELTA = 1e-3  # Hoffmann et al. 2022, section 3.3
EXPONENTS = (0.01, 3.0)  # bounds: with few runs an exponent that does nothing wanders off
START_EXPONENTS = (0.1, 0.25, 0.4, 0.7, 1.2)
DRAWN_TOLERANCE = 1e-2  # of fits of drawn data, of which only the spread is looked at
DRAWS = 400
WITHIN = 0.90  # share of the draws that an interval holds
CASES_FROM = 3  # rungs for each parameter of the law, from which on rungs are drawn with replacement
LEAST_SPREAD = 1e-4  # of log losses: no two runs agree better, and a law through all its rungs would claim they do
SAME_COMPUTE = 0.9  # rungs of at least so much of the largest one's compute are of its amount
MOST_MORE = 4  # times the rungs there are: beyond, more runs are not looked for
NUM_PARAMETERS = {"ratio": 3, "isoflop": 5}


@dataclass(frozen=True)
class Law:
    """constant: E, the loss that no size and no data lower further; coefficients, exponents: (T,) of the powers."""

    constant: float
    coefficients: tuple[float, ...]
    exponents: tuple[float, ...]

    def loss(self, *sizes: npt.ArrayLike) -> Array:
        """Nats a token at these sizes: parameters and tokens on a surface, FLOPs on a line."""
        total = np.asarray(self.constant, dtype=np.float64)
        for size, coefficient, exponent in zip(sizes, self.coefficients, self.exponents, strict=True):
            total = total + coefficient * np.asarray(size, dtype=np.float64) ** -exponent
        return np.asarray(total)


@dataclass(frozen=True)
class Fits:
    """parameters: (F, P) e, a_1 .. a_T, alpha_1 .. alpha_T, the logarithms about `centre`; objective: (F,) what is left."""

    parameters: Array
    objective: Array
    centre: Array

    def log_loss(self, x_nT: Array) -> Array:
        """(F, n) log loss at the logarithms of the sizes."""
        return predicted(self.parameters, x_nT - self.centre)[0]

    def law(self) -> Law:
        """The first of the fits as a law of the sizes themselves."""
        powers, row = len(self.centre), self.parameters[0]
        exponents = row[1 + powers :]
        coefficients = np.exp(row[1 : 1 + powers] + exponents * self.centre)
        return Law(float(np.exp(row[0])), tuple(coefficients.tolist()), tuple(exponents.tolist()))


def predicted(parameters: Array, x_nT: Array) -> tuple[Array, Array]:
    """(..., n) log loss, and (..., n, P) its derivatives by the (..., P) parameters."""
    powers = x_nT.shape[1]
    exponents = parameters[..., None, 1 + powers :]
    slopes = np.concatenate([np.zeros_like(parameters[..., None, :1]), exponents], axis=-1)
    terms = parameters[..., None, : 1 + powers] - slopes * np.concatenate([np.zeros((len(x_nT), 1)), x_nT], axis=1)
    highest = terms.max(axis=-1, keepdims=True)
    shares = np.exp(terms - highest)
    total = shares.sum(axis=-1, keepdims=True)
    shares /= total
    derivatives = np.concatenate([shares, -shares[..., 1:] * x_nT], axis=-1)
    return (highest + np.log(total))[..., 0], derivatives


def huber(residuals: Array, delta: float = HUBER_DELTA) -> Array:
    """r^2 / 2 up to delta, delta (|r| - delta / 2) beyond (Huber 1964)."""
    size = np.abs(residuals)
    return np.asarray(np.where(size <= delta, 0.5 * size**2, delta * (size - 0.5 * delta)))


def fit(sizes_nT: Array, losses_n: Array) -> Fits:
    """The law of these runs: the lowest minimum of all starts. sizes_nT: parameters and tokens, or FLOPs, of each run."""
    logs, y_n = np.log(np.asarray(sizes_nT, dtype=np.float64)), np.log(np.asarray(losses_n, dtype=np.float64))
    centre = logs.mean(axis=0)
    place, objective = _minimum(_starts(logs - centre, np.exp(y_n)), logs - centre, y_n, 1e-7)
    return Fits(place[None], np.array([objective]), centre)


def refit(found: Fits, sizes_FnT: Array, losses_Fn: Array) -> Fits:
    """Fits of drawn data sets, each from the fit that was found."""
    made = [
        _minimum(found.parameters[:1], np.log(sizes_nT) - found.centre, np.log(losses_n), DRAWN_TOLERANCE)
        for sizes_nT, losses_n in zip(sizes_FnT, losses_Fn, strict=True)
    ]
    return Fits(np.array([place for place, _ in made]), np.array([value for _, value in made]), found.centre)


def _minimum(starts: Array, x_nT: Array, y_n: Array, tolerance: float) -> tuple[Array, float]:
    """The lowest minimum reached from any start, where a law is a law: no power that grows, no constant above the losses."""
    try:
        from scipy.optimize import minimize
        from scipy.special import expit, logit
    except ImportError:
        raise BessemerError("the fit of a law needs scipy; install it with: pip install 'bessemer[ladder]'") from None

    lowest, highest, powers = float(y_n.min()), float(y_n.max()), x_nT.shape[1]
    low = np.array([lowest - 7.0, *[lowest - 12.0] * powers, *[EXPONENTS[0]] * powers])
    width = np.array([lowest, *[highest + 1.0] * powers, *[EXPONENTS[1]] * powers]) - low

    def place(free: Array) -> Array:
        return np.asarray(low + width * expit(free))

    def objective(free: Array) -> tuple[float, Array]:
        log_loss, slopes = predicted(place(free), x_nT)
        residual, share = (log_loss - y_n) / HUBER_DELTA, expit(free)
        slope = np.clip(residual, -1.0, 1.0) @ slopes / HUBER_DELTA
        return float(huber(residual, 1.0).sum()), slope * width * share * (1.0 - share)

    options = {"gtol": tolerance, "maxiter": 1000}
    free_starts = logit(np.clip((starts - low) / width, 1e-6, 1 - 1e-6))
    made = [minimize(objective, start, jac=True, method="BFGS", options=options) for start in free_starts]
    best = min(made, key=lambda one: one.fun)
    return place(best.x), float(best.fun) * HUBER_DELTA**2


def _starts(x_nT: Array, losses_n: Array) -> Array:
    """For every choice of exponents, the constant and the coefficients that are best for them: (starts, P)."""
    powers, lowest = x_nT.shape[1], float(losses_n.min())
    found = []
    for exponents in product(START_EXPONENTS, repeat=powers):
        columns = np.concatenate([np.ones((len(x_nT), 1)), np.exp(-x_nT * np.array(exponents))], axis=1)
        relative = columns / losses_n[:, None]  # least squares of the ratios, which are what the fit compares
        solved = np.linalg.lstsq(relative, np.ones(len(losses_n)), rcond=None)[0]
        solved[0] = np.clip(solved[0], 0.05 * lowest, 0.98 * lowest)
        solved[1:] = np.maximum(solved[1:], 0.01 * lowest)
        found.append([*np.log(solved), *exponents])
    return np.array(found)


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

    def covers(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class FittedLaw:
    """The law of some runs. spread: of their log losses about it; freedom: runs less parameters of the law; noise: (draws,)
    the spread in each draw; method: of the bootstrap, `rungs` or `noise`."""

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

    def loss(self, parameters: float, tokens: float, flops: float, of_a_run: bool = True) -> Interval:
        """The predicted loss, for a run of this size; of_a_run: the interval holds a run's own spread too."""
        logs = np.log(arguments(self.design, [(parameters, tokens, flops)]))
        value, drawn = float(np.exp(self.fits.log_loss(logs)[0, 0])), self.draws.log_loss(logs)[:, 0]
        if of_a_run:
            drawn = drawn + self.noise * np.random.default_rng([self.seed, 1]).standard_normal(len(drawn))
        return Interval.of(value, np.exp(drawn))

    def slopes(self, sizes_nT: Array) -> Array:
        """(n, P) derivatives of the log loss by the law's parameters."""
        return predicted(self.fits.parameters[0], np.log(sizes_nT) - self.fits.centre)[1]


def arguments(design: Design, runs: Any) -> Array:
    """(n, T) what the design's law is a function of, from (N, D, C) of each run."""
    table = np.array([tuple(run) for run in runs], dtype=np.float64)
    return table[:, :2] if design == "isoflop" else table[:, 2:]


def _sizes(design: Design, points: tuple[Point, ...]) -> Array:
    return arguments(design, [(point.parameters, point.tokens, point.flops) for point in points])


def fitted(design: Design, points: tuple[Point, ...], seed: int = 0, draws: int = DRAWS) -> FittedLaw:
    """Fit the design's law to runs that are done. Raises InputError when they are not more than the law's parameters."""
    count, freedom = len(points), len(points) - NUM_PARAMETERS[design]
    if freedom < 1:
        raise InputError(
            f"{count} finished rungs are too few: the law of a ladder of design {design!r} has {NUM_PARAMETERS[design]} "
            "numbers, and an error shows only with more rungs than that; give more with --rungs"
        )
    sizes, losses = _sizes(design, points), np.array([point.loss for point in points])
    found = fit(sizes, losses)
    middle = found.log_loss(np.log(sizes))[0]
    spread = max(float(np.sqrt(((np.log(losses) - middle) ** 2).sum() / freedom)), LEAST_SPREAD)
    chance = np.random.default_rng([seed, 0])
    if count >= CASES_FROM * NUM_PARAMETERS[design]:
        method, noise = "rungs", np.full(draws, spread)
        times = chance.multinomial(count, np.full(count, 1 / count), size=draws)
        rows = np.array([np.repeat(np.arange(count), one) for one in times])
        drawn = refit(found, sizes[rows], losses[rows])
    else:
        method, noise = "noise", spread * np.sqrt(freedom / chance.chisquare(freedom, draws))
        shaken = np.exp(middle + noise[:, None] * chance.standard_normal((draws, count)))
        drawn = refit(found, np.broadcast_to(sizes, (draws, *sizes.shape)), shaken)
    return FittedLaw(design, points, found, drawn, noise, spread, freedom, method, seed)


def left_out(design: Design, points: tuple[Point, ...], seed: int = 0, draws: int = DRAWS) -> dict[str, Any] | None:
    """The largest rung predicted from the smaller ones, as the planned run is from all; None where too few are left.

    Rungs of its own amount of compute are left out with it where enough others stay, so that it lies beyond them.
    """
    largest = max(points, key=lambda point: (round(np.log(point.flops), 1), point.parameters))
    others = tuple(point for point in points if point is not largest)
    below = tuple(point for point in others if point.flops < SAME_COMPUTE * largest.flops)
    rest = below if len(below) >= NUM_PARAMETERS[design] + 2 else others
    if len(rest) <= NUM_PARAMETERS[design]:
        return None
    said = fitted(design, rest, seed, draws).loss(largest.parameters, largest.tokens, largest.flops)
    return {
        "name": largest.name, "from_rungs": len(rest), "beyond": largest.flops / max(point.flops for point in rest),
        "predicted": asdict(said), "measured": largest.loss, "error": said.value / largest.loss - 1,
        "covered": said.covers(largest.loss),
    }  # fmt: skip


def optimum(found: FittedLaw, flops: float, flops_per_parameter: float) -> dict[str, Any]:
    """The size and the tokens that are best for so much compute, by a surface; flops_per_parameter: of a token, C / (N D).

    The minimum of the law under C = k N D (Hoffmann et al. 2022, equation 4).
    """
    every = np.concatenate([found.fits.parameters[:, 1:], found.draws.parameters[:, 1:]])
    log_a, log_b, alpha, beta = every.T
    log_a, log_b = log_a + alpha * found.fits.centre[0], log_b + beta * found.fits.centre[1]
    share = beta / (alpha + beta)
    log_n = (np.log(alpha / beta) + log_a - log_b) / (alpha + beta) + share * np.log(flops / flops_per_parameter)
    size = np.exp(np.clip(log_n, -50, 200))
    tokens = flops / flops_per_parameter / size
    values = {"parameters": size, "tokens": tokens, "tokens_per_parameter": tokens / size, "exponent": share}
    best = {name: asdict(Interval.of(value[0], value[1:])) for name, value in values.items()}
    return {**best, "loss": asdict(found.loss(size[0], tokens[0], flops, of_a_run=False))}


def more_runs(found: FittedLaw, parameters: float, tokens: float, flops: float) -> dict[str, Any]:
    """How many more rungs would halve the law's error at a planned run.

    By the delta method: the error of the predicted log loss is s sqrt(g' (J'J)^-1 g), with J the law's derivatives at the
    rungs and g at the planned run. Rungs like those there are add to J'J in proportion, so three times as many halve it.
    Rungs that go on upwards by the ladder's own factor do it with fewer; they are added one by one, each the one that lowers
    the error most, none of more than half the planned compute.
    """
    points, design = found.points, found.design
    slopes = found.slopes(_sizes(design, points))
    at = found.slopes(arguments(design, [(parameters, tokens, flops)]))[0]
    information = slopes.T @ slopes

    def error(of: Array) -> float:
        return sqrt(max(float(at @ np.linalg.pinv(of, rcond=1e-12, hermitian=True) @ at), 0.0))

    now, top = error(information), max(point.flops for point in points)
    amounts = sorted({round(np.log(point.flops), 1) for point in points})
    factor = float(np.exp(np.clip(np.median(np.diff(amounts)), np.log(1.5), np.log(2)))) if len(amounts) > 1 else 2.0
    largest = [point for point in points if point.flops >= SAME_COMPUTE * top]
    candidates: list[tuple[float, float, float]] = []
    scale = factor
    while top * scale <= 0.5 * flops and len(candidates) < 40:
        candidates += [(one.parameters * scale**0.5, one.tokens * scale**0.5, one.flops * scale) for one in largest]
        scale *= factor
    result: dict[str, Any] = {
        "error_now": found.spread * now, "of_the_same_kind": 3 * len(points),
        "same_kind_flops": 3 * sum(point.flops for point in points), "going_upwards": None, "upwards_flops": None,
        "method": "delta method on the fitted law",
    }  # fmt: skip
    rows = found.slopes(arguments(design, candidates)) if candidates else ()
    spent = 0.0
    for number in range(1, MOST_MORE * len(points) + 1 if candidates else 0):
        errors = [error(information + np.outer(row, row)) for row in rows]
        best = int(np.argmin(errors))
        information = information + np.outer(rows[best], rows[best])
        spent += candidates[best][2]
        if errors[best] <= 0.5 * now:
            return {**result, "going_upwards": number, "upwards_flops": spent}
    return result


def profiles(points: tuple[Point, ...]) -> list[dict[str, Any]]:
    """IsoFLOP profiles (Hoffmann et al. 2022, section 3.2): of each amount of compute with three sizes or more, a parabola of
    the loss over log N.

    FLOPs, the parabola's coefficients (highest power first), its lowest point where it opens upwards, and `inside`: whether
    that lies between the sizes that were trained. A parabola is only near the curve: with the best size off the middle its
    lowest point is biased, so it is a second estimate of the law's optimum.
    """
    found = []
    for group in sorted({point.group for point in points}):
        mine = [point for point in points if point.group == group]
        if len(mine) < 3:
            continue
        logs = np.log([point.parameters for point in mine])
        curve = np.polyfit(logs, [point.loss for point in mine], 2)
        lowest = float(-curve[1] / (2 * curve[0])) if curve[0] > 0 else None
        found.append({
            "group": group, "flops": float(np.exp(np.mean(np.log([point.flops for point in mine])))), "curve": curve.tolist(),
            "parameters": None if lowest is None else float(np.exp(np.clip(lowest, -50, 100))),
            "inside": lowest is not None and bool(logs.min() <= lowest <= logs.max()),
        })  # fmt: skip
    return found


def best_size(found: FittedLaw, flops: float) -> dict[str, Any] | None:
    """The best N for so much compute: a line of log N over log C through the profiles whose lowest point was trained across;
    None with fewer than two such.

    The interval: the same for losses drawn anew about the law with its spread, of the draws that give one.
    """
    value = _through(found.points, flops)
    if value is None:
        return None
    chance, drawn = np.random.default_rng([found.seed, 2]), []
    for noise in found.noise[:200]:
        factors = np.exp(noise * chance.standard_normal(len(found.points)))
        pairs = zip(found.points, factors, strict=True)
        again = _through(tuple(replace(point, loss=point.loss * float(by)) for point, by in pairs), flops)
        if again is not None:
            drawn.append(again)
    every: Array = np.array(drawn).reshape(-1, 2)
    intervals = [asdict(Interval.of(value[at], every[:, at])) if drawn else None for at in (0, 1)]
    return {"parameters": intervals[0], "exponent": intervals[1], "draws": len(drawn)}


def _through(points: tuple[Point, ...], flops: float) -> tuple[float, float] | None:
    """N_opt at `flops` and the exponent of the line."""
    lowest = [row for row in profiles(points) if row["inside"]]
    if len(lowest) < 2:
        return None
    sizes, amounts = ([row[key] for row in lowest] for key in ("parameters", "flops"))
    slope, level = np.polyfit(np.log(amounts), np.log(sizes), 1)
    return float(np.exp(np.clip(level + slope * np.log(flops), -50, 200))), float(slope)
