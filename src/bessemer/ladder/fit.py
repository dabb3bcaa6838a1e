"""Scaling laws of a ladder, and their best fit to runs.

The two laws are:

    surface   L(N, D) = E + A / N^alpha + B / D^beta      (Hoffmann et al. 2022, equation 2)
    line      L(C)    = E + K / C^gamma                   (along a fixed number of tokens per parameter)

Both are fitted as in section 3.3 of Hoffmann et al.: the Huber loss (delta 1e-3) of the differences of log loss, with
the sum of powers as a log-sum-exp, by BFGS from several starts. Besiroglu et al. 2024 found that the original fit
stopped early, because the mean over the runs, used instead of their sum, is smaller than the optimizer's tolerance.
Here the objective is scaled by delta^2.

Dimensions: n runs, T powers (2 on a surface, 1 on a line), P = 1 + 2T parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import exp, log

import numpy as np
import numpy.typing as npt

from bessemer.common.errors import BessemerError, require_import

Array = npt.NDArray[np.float64]

HUBER_DELTA = 1e-3  # of log losses (Hoffmann et al. 2022, section 3.3)
EXPONENTS = (0.01, 3.0)  # bounds of the exponents, because with few runs an exponent without effect would diverge
NOISE = 0.006  # least residual: the standard deviation of log losses between seeds of the smallest models
LEAST_SPREAD = 0.001  # least spread of log losses about the law, for the weight of runs against the prior on E
CONSTANT_PRIOR = (1.0, 3.0)  # beta distribution of E as a share of the lowest loss; its mean is a quarter
PRIOR_WIDTH = 0.1  # distance of that share from its draw that costs a refit one standard deviation
DRAWS = 200
START_EXPONENTS = (0.1, 0.25, 0.4, 0.7, 1.2)


@dataclass(frozen=True)
class BestFit:
    """The best fit of a law.

    Attributes:
        parameters: (P,) e, a_1 .. a_T, alpha_1 .. alpha_T of loss = exp(e) + sum_t exp(a_t - alpha_t x_t), where x_t is the
            logarithm of a size (parameters and tokens, or FLOPs) relative to `centre`.
        objective: Value of the objective at the minimum.
        centre: (T,) mean logarithms of the sizes.
    """

    parameters: Array
    objective: float
    centre: Array

    def log_loss(self, x_nT: Array) -> Array:
        """Return the (n,) log losses at `x_nT`, the logarithms of sizes (not relative to `centre`)."""
        return predicted(self.parameters, x_nT - self.centre)[0]


def predicted(parameters: Array, x_nT: Array) -> tuple[Array, Array]:
    """Return the (..., n) log losses at `x_nT` and their (..., n, P) derivatives by the (..., P) parameters of `BestFit`."""
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


def fit(sizes_nT: Array, losses_n: Array) -> BestFit:
    """Fit the law to runs, and return the lowest minimum that the optimizer finds from any start.

    Args:
        sizes_nT: (n, T) parameters and tokens of each run, or its FLOPs.
        losses_n: Loss of each run.
    """
    logs, y_n = np.log(np.asarray(sizes_nT, dtype=np.float64)), np.log(np.asarray(losses_n, dtype=np.float64))
    centre = logs.mean(axis=0)
    parameters, objective = _minimum(_starts(logs - centre, np.exp(y_n)), logs - centre, y_n)
    return BestFit(parameters, objective, centre)


def _minimum(starts: Array, x_nT: Array, y_n: Array) -> tuple[Array, float]:
    """Return the lowest minimum from all starts, with its objective.

    The bounds exclude powers that increase with size, and a constant above the losses.
    """
    with require_import("ladder: the fit needs scipy; install it with: pip install 'bessemer[ladder]'", BessemerError):
        from scipy.optimize import minimize
        from scipy.special import expit, huber, logit

    lowest, highest, powers = float(y_n.min()), float(y_n.max()), x_nT.shape[1]
    low = np.array([lowest - 7.0, *[lowest - 12.0] * powers, *[EXPONENTS[0]] * powers])
    width = np.array([lowest, *[highest + 1.0] * powers, *[EXPONENTS[1]] * powers]) - low

    def place(free: Array) -> Array:
        return np.asarray(low + width * expit(free))

    def objective(free: Array) -> tuple[float, Array]:
        log_loss, slopes = predicted(place(free), x_nT)
        residual, share = (log_loss - y_n) / HUBER_DELTA, expit(free)
        slope = np.clip(residual, -1.0, 1.0) @ slopes / HUBER_DELTA
        return float(huber(1.0, residual).sum()), slope * width * share * (1.0 - share)

    options = {"gtol": 1e-7, "maxiter": 1000}
    free_starts = logit(np.clip((starts - low) / width, 1e-6, 1 - 1e-6))
    fits = [minimize(objective, start, jac=True, method="BFGS", options=options) for start in free_starts]
    best = min(fits, key=lambda one: one.fun)
    return place(best.x), float(best.fun) * HUBER_DELTA**2


def bootstrap(best: BestFit, x_nT: Array, y_n: Array, seed: int) -> tuple[Array, Array]:
    """Refit the law to resampled runs: a residual bootstrap (Efron 1979) with a prior on E.

    A few runs hardly determine E, and their best fit mostly has a value that is too high. Each refit therefore draws E
    as a share of the lowest loss from a beta distribution and is penalized for leaving it. Runs that determine E
    outweigh the penalty.

    Args:
        best: The best fit.
        x_nT: Logarithms of the sizes relative to its centre.
        y_n: Log losses.
        seed: Seed of the random numbers.

    Returns:
        (DRAWS, P) parameters, and the (n,) residuals that were resampled, scaled by the degrees of freedom and to at
            least NOISE.
    """
    from scipy.optimize import least_squares

    chance, lowest = np.random.default_rng([seed, 0]), float(y_n.min())
    middle_n = predicted(best.parameters, x_nT)[0]
    off = y_n - middle_n - (y_n - middle_n).mean()
    spread = float(np.sqrt((off**2).sum() / (len(y_n) - len(best.parameters))))
    residuals = off * (max(spread, NOISE) / max(float(np.sqrt((off**2).mean())), 1e-300))
    scale, start = max(spread, LEAST_SPREAD), best.parameters.copy()
    start[0] = np.clip(start[0], lowest - 3.0, lowest + log(0.5))
    samples = []
    for share in chance.beta(*CONSTANT_PRIOR, DRAWS):
        sampled = middle_n + chance.choice(residuals, len(y_n))

        def misses(point: Array, sampled: Array = sampled, share: float = share) -> Array:
            return np.append(
                (predicted(point, x_nT)[0] - sampled) / scale, (exp(point[0] - lowest) - share) / PRIOR_WIDTH
            )

        def slopes(point: Array) -> Array:
            prior = np.zeros(len(point))
            prior[0] = exp(point[0] - lowest) / PRIOR_WIDTH
            return np.vstack([predicted(point, x_nT)[1] / scale, prior])

        samples.append(least_squares(misses, start, jac=slopes, method="lm", max_nfev=60).x)
    return np.array(samples), residuals


def _starts(x_nT: Array, losses_n: Array) -> Array:
    """Return (starts, P) parameters to start the fit from, one row for each choice of exponents from START_EXPONENTS.

    The constant and the coefficients of a row are the least-squares fit for its exponents.
    """
    powers, lowest = x_nT.shape[1], float(losses_n.min())
    starts = []
    for exponents in product(START_EXPONENTS, repeat=powers):
        columns = np.concatenate([np.ones((len(x_nT), 1)), np.exp(-x_nT * np.array(exponents))], axis=1)
        relative = columns / losses_n[:, None]  # least squares of the ratios, because the fit compares log losses
        solved = np.linalg.lstsq(relative, np.ones(len(losses_n)), rcond=None)[0]
        solved[0] = np.clip(solved[0], 0.05 * lowest, 0.98 * lowest)
        solved[1:] = np.maximum(solved[1:], 0.01 * lowest)
        starts.append([*np.log(solved), *exponents])
    return np.array(starts)
