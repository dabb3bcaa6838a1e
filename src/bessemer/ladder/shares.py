"""Regressions of a loss on the shares of a mixture, selected by leave-one-out error.

Each form is linear once the loss is transformed:

    linear        y = a + b . r                      (RegMix's linear regression, Liu et al. 2024)
    quadratic     y = a + b . r + r' Q r
    logarithm     y = a + b . log(r + EPSILON)       a source's own share acts as its amount of data does
    exponential   y = c + exp(a + t . r)             (Ye et al. 2024, the data mixing law), c from a grid

Dimensions: n runs, m sources, f features, D draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from bessemer.ladder.fit import Array

Form = Literal["linear", "quadratic", "logarithm", "exponential"]
EPSILON = 0.02  # shares below it have about the same effect, because other sources teach the same things
RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
WIDEST = 20.0  # largest ratio of a draw's spread to the observed one; with one degree of freedom some would be absurd
FLOORS = (0.0, 0.5, 0.8, 0.9, 0.95)  # c, as shares of the lowest loss
SETTINGS: tuple[tuple[Form, float], ...] = (
    ("linear", 0.0), ("quadratic", 0.0), ("logarithm", 0.0), *(("exponential", floor) for floor in FLOORS),
)  # fmt: skip


@dataclass(frozen=True)
class Regression:
    """A fitted regression form.

    Attributes:
        form: Form of the regression.
        ridge: Ridge penalty.
        floor: The constant c of the exponential form.
        centre: (f,) means of the features.
        scale: (f,) standard deviations of the features.
        level: Mean transformed loss; (D,) for draws.
        weights: (f,) weights of the standardized features; (D, f) for draws.
        error: Root mean square leave-one-out error, in units of the loss.
        freedom: Number of runs minus effective parameters.
    """

    form: Form
    ridge: float
    floor: float
    centre: Array
    scale: Array
    level: Array
    weights: Array
    error: float
    freedom: float

    def predict(self, shares_nm: Array) -> Array:
        """Return the (n,) losses at these shares; (D, n) for draws."""
        columns = (features(self.form, shares_nm) - self.centre) / self.scale
        return _back(self.form, np.asarray(self.level)[..., None] + self.weights @ columns.T, self.floor)


def features(form: Form, shares_nm: Array) -> Array:
    """Return the (n, f) features in which a form is linear."""
    if form == "logarithm":
        return np.asarray(np.log(shares_nm + EPSILON))
    if form != "quadratic":
        return shares_nm
    rows, columns = np.triu_indices(shares_nm.shape[1])
    return np.concatenate([shares_nm, shares_nm[:, rows] * shares_nm[:, columns]], axis=1)


def choose(shares_nm: Array, losses_n: Array) -> Regression:
    """Return the regression with the form and ridge penalty of the least leave-one-out error."""
    made = [
        regression(form, ridge, floor * float(losses_n.min()), shares_nm, losses_n)
        for form, floor in SETTINGS
        for ridge in RIDGES
    ]
    return min(made, key=lambda one: one.error)


def regression(form: Form, ridge: float, floor: float, shares_nm: Array, losses_n: Array) -> Regression:
    """Fit a ridge regression of a form.

    The leave-one-out error follows from the hat matrix: y_i - f_-i(x_i) = (y_i - f(x_i)) / (1 - h_ii).
    """
    columns = features(form, shares_nm)
    centre, scale = columns.mean(axis=0), columns.std(axis=0)
    scale = np.where(scale > 1e-9, scale, 1.0)
    design = (columns - centre) / scale
    target = _forth(form, losses_n, floor)
    smoother = _smoother(design, ridge)
    hat = design @ smoother + 1 / len(losses_n)
    held = target - target.mean()
    fitted_values = target.mean() + design @ (smoother @ held)
    leverage = np.minimum(np.einsum("nn->n", hat), 1 - 1e-6)
    unseen = _back(form, target - (target - fitted_values) / (1 - leverage), floor)
    error = float(np.sqrt(np.mean((losses_n - unseen) ** 2)))
    freedom = max(len(losses_n) - float(leverage.sum()), 1.0)
    return Regression(form, ridge, floor, centre, scale, np.asarray(target.mean()), smoother @ held, error, freedom)


def left_out(found: Regression, shares_nm: Array, losses_n: Array) -> Array:
    """Return the (n,) loss of each run, predicted by a refit to all others."""
    predicted = []
    for number in range(len(losses_n)):
        rest = np.arange(len(losses_n)) != number
        again = regression(found.form, found.ridge, found.floor, shares_nm[rest], losses_n[rest])
        predicted.append(again.predict(shares_nm[number : number + 1])[0])
    return np.array(predicted)


def drawn(found: Regression, shares_nm: Array, draws: int, chance: np.random.Generator) -> Regression:
    """Refit a form to `draws` sets of losses that are drawn about its predictions.

    The spread of a draw is the leave-one-out error times sqrt(nu / chi^2_nu). That error includes the noise of a run
    and the misfit of the form, and few runs determine it badly.
    """
    noise = found.error * np.minimum(np.sqrt(found.freedom / chance.chisquare(found.freedom, draws)), WIDEST)
    at = found.predict(shares_nm)
    losses = at + noise[:, None] * chance.standard_normal((draws, len(at)))
    design = (features(found.form, shares_nm) - found.centre) / found.scale
    target = _forth(found.form, losses, found.floor)
    level = target.mean(axis=1)
    weights = (target - level[:, None]) @ _smoother(design, found.ridge).T
    return replace(found, level=level, weights=weights)


def _smoother(design: Array, ridge: float) -> Array:
    """Return the (f, n) matrix from targets to weights."""
    square = design.T @ design + ridge * len(design) * np.eye(design.shape[1])
    return np.asarray(np.linalg.solve(square, design.T))


def _forth(form: Form, losses: Array, floor: float) -> Array:
    return np.log(np.maximum(losses - floor, 1e-3 * np.abs(losses) + 1e-9)) if form == "exponential" else losses


def _back(form: Form, value: Array, floor: float) -> Array:
    return floor + np.exp(value) if form == "exponential" else value


def spread_out(given: Array, count: int, most: Array, seed: int) -> Array:
    """Return (count, m) mixtures to train on.

    They are the given one, each source nearly alone, and then draws about the given one, each the farthest from those
    chosen before. RegMix also draws from a Dirichlet distribution about the given mixture (Liu et al. 2024). `most` has
    the (m,) upper bounds of the shares.
    """
    chance, many = np.random.default_rng([seed, 3]), len(given)
    about = [chance.dirichlet(np.maximum(given * many * width, 0.05), 1500) for width in (0.5, 1.0, 3.0)]
    alone = 0.85 * np.eye(many) + 0.15 * given
    candidates = np.array([within(row, np.zeros(many), most) for row in np.concatenate([alone, *about])])
    chosen = [given, *candidates[: min(many, max(count - 2, 0))]][:count]
    while len(chosen) < count:
        apart = np.linalg.norm(candidates[:, None] - np.array(chosen)[None], axis=2).min(axis=1)
        chosen.append(candidates[int(apart.argmax())])
    return np.array(chosen)


def within(shares: Array, least: Array, most: Array) -> Array:
    """Clip shares to bounds with a sum of 1, dividing the excess over the others in proportion to their room."""
    kept = np.clip(shares, least, most)
    for _ in range(50):
        missing = 1.0 - kept.sum()
        if abs(missing) < 1e-12:
            break
        room = most - kept if missing > 0 else kept - least
        kept = np.clip(kept + missing * room / max(room.sum(), 1e-12), least, most)
    return np.asarray(kept)


def candidates(least: Array, most: Array, start: Array, seed: int) -> Array:
    """Return (4001, m) mixtures within bounds: the start, and uniform draws from the simplex."""
    chance = np.random.default_rng([seed, 4])
    rows = np.concatenate([start[None], chance.dirichlet(np.ones(len(start)), 4000)])
    return np.array([within(row, least, most) for row in rows])


def lowest(target: list[Regression], rows: Array, least: Array, most: Array) -> Array:
    """Return the (m,) shares within bounds at which the mean of the regressions is lowest.

    The search starts at the best of `rows`. It moves shares from one source to another by decreasing amounts while that
    lowers the mean.
    """
    best = rows[int(mean_of(target, rows).argmin())]
    many = len(best)
    pairs = [(one, other) for one in range(many) for other in range(many) if one != other]
    amount = 0.1
    while amount > 5e-4:
        moved = np.repeat(best[None], len(pairs), axis=0)
        for row, (one, other) in zip(moved, pairs, strict=True):
            step = min(amount, row[one] - least[one], most[other] - row[other])
            row[one] -= max(step, 0.0)
            row[other] += max(step, 0.0)
        values = mean_of(target, moved)
        if values.min() < mean_of(target, best[None])[0] - 1e-9:
            best = moved[int(values.argmin())]
        else:
            amount /= 2
    return np.asarray(best)


@dataclass(frozen=True)
class Gain:
    """The predicted decrease of the target loss by a proposed mixture.

    Attributes:
        value: Decrease by the regressions, minus `optimism`.
        drawn: (D,) decrease by each draw.
        optimism: Amount by which the best of many mixtures appears better than it is.
    """

    value: float
    drawn: Array
    optimism: float


def gain(target: list[Regression], draws: list[Regression], given: Array, proposed: Array, rows: Array) -> Gain:
    """Return the gain of the mixture that was proposed because its predicted gain is largest.

    Noise makes some mixture appear best even if all are equal. The draws, whose truth is known, show by how much: the
    best mixture of a draw is better by the draw than by the regression that it was drawn from. The mean of this
    difference is subtracted (the optimism of Efron 1983, for a choice instead of a classifier).
    """
    ends = np.array([given, proposed])
    now, by_draw = mean_of(target, ends), mean_of(draws, ends)
    pool = rows[:: max(len(rows) // 500, 1)]
    truth, seen = mean_of(target, pool), mean_of(draws, pool)
    best = seen.argmin(axis=1)
    chosen = by_draw[:, 0] - seen[np.arange(len(best)), best]
    optimism = max(float(np.mean(chosen - (now[0] - truth[best]))), 0.0)
    return Gain(float(now[0] - now[1]) - optimism, by_draw[:, 0] - by_draw[:, 1] - optimism, optimism)


def mean_of(target: list[Regression], shares_nm: Array) -> Array:
    """Return the mean of the targets' predictions, (n,) or (D, n) for draws."""
    return np.asarray(np.mean([one.predict(shares_nm) for one in target], axis=0))
