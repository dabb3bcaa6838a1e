"""Laws of the loss: a constant plus powers, fitted to many data sets at once.

    surface   L(N, D) = E + A / N^alpha + B / D^beta      (Hoffmann et al. 2022, equation 2)
    line      L(C)    = E + K / C^gamma                   (along a fixed number of tokens a parameter)

Both are fitted as section 3.3 there: the Huber loss (delta 1e-3) of the differences of log loss, with the sum of powers as a
log-sum-exp, from several starts. Two traps of the original fit (Besiroglu et al. 2024): the mean over the runs in place of
their sum made the objective so small that the optimiser's absolute tolerance ended it early, and rounded parameters do not
give back the fit. Here the stop is relative, so a factor before the objective changes nothing.

Letters: F fits at a time, n runs, T powers (2 on a surface, 1 on a line), P = 1 + 2T parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

HUBER_DELTA = 1e-3  # Hoffmann et al. 2022, section 3.3
FAREST = 3.0  # no exponent beyond it: with few runs one that does nothing wanders off
SMALLEST = 0.01
START_EXPONENTS = (0.1, 0.25, 0.4, 0.7, 1.2)
ITERATIONS = 400
SETTLED = 1e-11  # a step that lowers the objective by a smaller part of it, several times in a row, ends a fit
DRAWN_SETTLED = 1e-6  # for fits of drawn data, of which only the spread is looked at
PATIENCE = 6


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

    def law(self, number: int = 0) -> Law:
        """One of the fits as a law of the sizes themselves."""
        powers = len(self.centre)
        row = self.parameters[number]
        exponents = row[1 + powers :]
        coefficients = np.exp(row[1 : 1 + powers] + exponents * self.centre)
        return Law(float(np.exp(row[0])), tuple(coefficients.tolist()), tuple(exponents.tolist()))

    def chosen(self, rows: npt.NDArray[np.int64]) -> Fits:
        """Some of them."""
        return Fits(self.parameters[rows], self.objective[rows], self.centre)


def predicted(parameters_FP: Array, x_nT: Array) -> tuple[Array, Array]:
    """(F, n) log loss, and (F, n, P) its derivatives by the parameters."""
    powers = x_nT.shape[1]
    constant, factors, exponents = (
        parameters_FP[:, :1], parameters_FP[:, 1 : 1 + powers], parameters_FP[:, 1 + powers :],
    )  # fmt: skip
    parts = factors[:, None, :] - exponents[:, None, :] * x_nT[None]
    terms = np.concatenate([np.broadcast_to(constant[:, None, :], (*parts.shape[:2], 1)), parts], axis=2)
    highest = terms.max(axis=2, keepdims=True)
    shares = np.exp(terms - highest)
    total = shares.sum(axis=2, keepdims=True)
    shares /= total
    derivatives = np.concatenate([shares, -shares[:, :, 1:] * x_nT[None]], axis=2)
    return (highest + np.log(total))[:, :, 0], derivatives


def huber(residuals: Array, delta: float = HUBER_DELTA) -> Array:
    """r^2 / 2 up to delta, delta (|r| - delta / 2) beyond (Huber 1964)."""
    size = np.abs(residuals)
    return np.asarray(np.where(size <= delta, 0.5 * size**2, delta * (size - 0.5 * delta)))


def fit_from(
    starts_FP: Array,
    x_nT: Array,
    y_Fn: Array,
    weights_Fn: Array,
    delta: float = HUBER_DELTA,
    settled: float = SETTLED,
) -> tuple[Array, Array]:
    """The minima reached from `starts_FP`: (F, P) parameters and (F,) objectives.

    x_nT: centred logarithms of the sizes; y_Fn: log losses; weights_Fn: how often each run counts. Levenberg-Marquardt
    (Marquardt 1963) with, of two steps, the one that comes lower: by the weights min(1, delta / |r|), whose quadratic lies
    above the objective, and by those of its second derivative, 1 within delta and 0 beyond, which is Newton's near the end.
    """
    place = _bounded(starts_FP.copy(), x_nT, y_Fn)
    fits, count = place.shape
    damping = np.full(fits, 1e-2)
    model, slopes = predicted(place, x_nT)
    objective = (weights_Fn * huber(model - y_Fn, delta)).sum(axis=1)
    idle = np.zeros(fits, dtype=np.int64)
    going = np.arange(fits)
    for _ in range(ITERATIONS):
        residual = model[going] - y_Fn[going]
        size = np.maximum(np.abs(residual), 1e-300)
        bounded = weights_Fn[going] * np.minimum(1.0, delta / size)
        gradient = np.einsum("fnp,fn->fp", slopes[going], bounded * residual)
        best, best_place = objective[going].copy(), place[going].copy()
        best_model, best_slopes = model[going].copy(), slopes[going].copy()
        above = np.einsum("fnp,fn,fnq->fpq", slopes[going], bounded, slopes[going])
        scale = np.einsum("fpp->fp", above) + 1e-12 * np.einsum("fpp->f", above)[:, None] + 1e-30
        for weight in (bounded, weights_Fn[going] * (size <= delta)):
            square = np.einsum("fnp,fn,fnq->fpq", slopes[going], weight, slopes[going])
            square[:, np.arange(count), np.arange(count)] += damping[going][:, None] * scale
            step = np.linalg.solve(square, gradient[:, :, None])[:, :, 0]
            trial = _bounded(place[going] - step, x_nT, y_Fn[going])
            trial_model, trial_slopes = predicted(trial, x_nT)
            reached = (weights_Fn[going] * huber(trial_model - y_Fn[going], delta)).sum(axis=1)
            lower = reached < best
            best[lower], best_place[lower] = reached[lower], trial[lower]
            best_model[lower], best_slopes[lower] = trial_model[lower], trial_slopes[lower]
        gained = objective[going] - best
        moved = gained > 0
        damping[going] = np.where(moved, np.maximum(damping[going] / 5, 1e-12), np.minimum(damping[going] * 4, 1e12))
        idle[going] = np.where(gained > settled * np.maximum(objective[going], 1e-300), 0, idle[going] + 1)
        place[going], objective[going], model[going], slopes[going] = best_place, best, best_model, best_slopes
        # A fit whose damping is still low may only have stepped too far; it goes on until smaller steps fail too.
        going = going[(idle[going] < PATIENCE) | ((damping[going] < 1e4) & (idle[going] < 4 * PATIENCE))]
        if not len(going):
            break
    return place, objective


def fit(sizes_nT: Array, losses_n: Array, weights_Fn: Array | None = None, delta: float = HUBER_DELTA) -> Fits:
    """The law of these runs, one for each row of weights (all 1 where left out): the lowest minimum of all starts.

    sizes_nT: parameters and tokens, or FLOPs, of each run; losses_n, or (F, n): nats a token.
    """
    logs = np.log(np.asarray(sizes_nT, dtype=np.float64))
    y_Fn = np.atleast_2d(np.log(np.asarray(losses_n, dtype=np.float64)))
    weights = np.ones_like(y_Fn) if weights_Fn is None else np.atleast_2d(weights_Fn)
    fits = max(len(weights), len(y_Fn))
    y_Fn, weights = np.broadcast_to(y_Fn, (fits, logs.shape[0])), np.broadcast_to(weights, (fits, logs.shape[0]))
    centre = logs.mean(axis=0)
    x_nT = logs - centre
    starts = _starts(x_nT, np.exp(np.median(y_Fn, axis=0)))
    many = len(starts)
    places, objectives = fit_from(
        np.tile(starts, (fits, 1)), x_nT, np.repeat(y_Fn, many, axis=0), np.repeat(weights, many, axis=0), delta
    )
    objectives, places = objectives.reshape(fits, many), places.reshape(fits, many, -1)
    lowest = objectives.argmin(axis=1)
    every = np.arange(fits)
    return Fits(places[every, lowest], objectives[every, lowest], centre)


def refit(found: Fits, sizes_nT: Array, losses_Fn: Array, weights_Fn: Array, delta: float = HUBER_DELTA) -> Fits:
    """Fits of drawn data sets, each from a fit that was found and from starts about it; the lowest of them."""
    x_nT = np.log(sizes_nT) - found.centre
    y_Fn, fits = np.log(losses_Fn), len(losses_Fn)
    powers = x_nT.shape[1]
    begin = np.repeat(found.parameters[:1], 3, axis=0)
    begin[1, 1 + powers :] *= 1.6
    begin[2, 1 + powers :] *= 0.6
    many = len(begin)
    places, objectives = fit_from(
        np.tile(begin, (fits, 1)),
        x_nT,
        np.repeat(y_Fn, many, axis=0),
        np.repeat(weights_Fn, many, axis=0),
        delta,
        DRAWN_SETTLED,
    )
    objectives, places = objectives.reshape(fits, many), places.reshape(fits, many, -1)
    lowest, every = objectives.argmin(axis=1), np.arange(fits)
    return Fits(places[every, lowest], objectives[every, lowest], found.centre)


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


def _bounded(place_FP: Array, x_nT: Array, y_Fn: Array) -> Array:
    """Keeps parameters where a law is a law: no power that grows, no constant above the losses."""
    powers, lowest, highest = x_nT.shape[1], y_Fn.min(axis=1), y_Fn.max(axis=1)
    place_FP[:, 0] = np.clip(place_FP[:, 0], lowest - 7.0, lowest)
    place_FP[:, 1 : 1 + powers] = np.clip(place_FP[:, 1 : 1 + powers], lowest[:, None] - 12.0, highest[:, None] + 1.0)
    place_FP[:, 1 + powers :] = np.clip(place_FP[:, 1 + powers :], SMALLEST, FAREST)
    return place_FP
