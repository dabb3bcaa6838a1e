"""Regressions of a loss over the shares of a mixture, chosen by what each says of runs it has not seen.

Forms, each linear once the loss is transformed:

    linear        y = a + b . r                      (RegMix's linear regression, Liu et al. 2024)
    quadratic     y = a + b . r + r' Q r
    logarithm     y = a + b . log(r + EPSILON)       a source's own share acts as its amount of data does
    exponential   y = c + exp(a + t . r)             (Ye et al. 2024, the data mixing law), c tried from a grid

Letters: n runs, m sources, f features, D draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from bessemer.ladder.fit import Array

Form = Literal["linear", "quadratic", "logarithm", "exponential"]
EPSILON = 0.02  # shares below it act alike: what a source teaches comes from the others too
RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
WIDEST = 20.0  # times the spread that was seen, at most, in a draw: of one degree of freedom some are beyond all sense
FLOORS = (0.0, 0.5, 0.8, 0.9, 0.95)  # c, as parts of the lowest loss
SETTINGS: tuple[tuple[Form, float], ...] = (
    ("linear", 0.0), ("quadratic", 0.0), ("logarithm", 0.0), *(("exponential", floor) for floor in FLOORS),
)  # fmt: skip


@dataclass(frozen=True)
class Regression:
    """A fitted form. weights: (f,), or (D, f) of draws, on the features about `centre` over `scale`; level: of the
    transformed loss there; floor: c; error: the root of the mean square of what leaving one run out missed by, in units of
    the loss; freedom: runs less what the fit can bend by."""

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
        """(n,) the loss at these shares; (D, n) of draws."""
        columns = (features(self.form, shares_nm) - self.centre) / self.scale
        return _back(self.form, np.asarray(self.level)[..., None] + self.weights @ columns.T, self.floor)


def features(form: Form, shares_nm: Array) -> Array:
    """(n, f) what a form is linear in."""
    if form == "logarithm":
        return np.asarray(np.log(shares_nm + EPSILON))
    if form != "quadratic":
        return shares_nm
    rows, columns = np.triu_indices(shares_nm.shape[1])
    return np.concatenate([shares_nm, shares_nm[:, rows] * shares_nm[:, columns]], axis=1)


def choose(shares_nm: Array, losses_n: Array) -> Regression:
    """The form and the ridge that miss left-out runs by least."""
    made = [
        regression(form, ridge, floor * float(losses_n.min()), shares_nm, losses_n)
        for form, floor in SETTINGS
        for ridge in RIDGES
    ]
    return min(made, key=lambda one: one.error)


def regression(form: Form, ridge: float, floor: float, shares_nm: Array, losses_n: Array) -> Regression:
    """Ridge regression of a form. The error is worked out from the hat matrix: y_i - f_-i(x_i) = (y_i - f(x_i)) / (1 - h_ii)."""
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
    """(n,) each run's loss as predicted from all the others, by fitting anew without it."""
    predicted = []
    for number in range(len(losses_n)):
        rest = np.arange(len(losses_n)) != number
        again = regression(found.form, found.ridge, found.floor, shares_nm[rest], losses_n[rest])
        predicted.append(again.predict(shares_nm[number : number + 1])[0])
    return np.array(predicted)


def drawn(found: Regression, shares_nm: Array, draws: int, chance: np.random.Generator) -> Regression:
    """The same form fitted to losses drawn anew about it, `draws` times.

    Each draw's spread is the left-out error, which holds a run's noise and what the form does not bend to, times
    sqrt(nu / chi^2_nu): few runs know it badly.
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
    """(f, n) from targets to weights."""
    square = design.T @ design + ridge * len(design) * np.eye(design.shape[1])
    return np.asarray(np.linalg.solve(square, design.T))


def _forth(form: Form, losses: Array, floor: float) -> Array:
    return np.log(np.maximum(losses - floor, 1e-3 * np.abs(losses) + 1e-9)) if form == "exponential" else losses


def _back(form: Form, value: Array, floor: float) -> Array:
    return floor + np.exp(value) if form == "exponential" else value


def spread_out(given: Array, count: int, most: Array, seed: int) -> Array:
    """(count, m) mixtures to train on: the given one, each source nearly alone, and then, of draws about the given one, each
    the farthest from those chosen (RegMix draws by a Dirichlet about the given; Liu et al. 2024).

    most: (m,) no share above it.
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
    """Shares brought between bounds, 1 in all: what one has too much goes to the others in proportion to their room."""
    kept = np.clip(shares, least, most)
    for _ in range(50):
        missing = 1.0 - kept.sum()
        if abs(missing) < 1e-12:
            break
        room = most - kept if missing > 0 else kept - least
        kept = np.clip(kept + missing * room / max(room.sum(), 1e-12), least, most)
    return np.asarray(kept)


def candidates(least: Array, most: Array, start: Array, seed: int) -> Array:
    """(4001, m) mixtures within bounds: the start, and draws that are even over the simplex."""
    chance = np.random.default_rng([seed, 4])
    rows = np.concatenate([start[None], chance.dirichlet(np.ones(len(start)), 4000)])
    return np.array([within(row, least, most) for row in rows])


def lowest(target: list[Regression], rows: Array, least: Array, most: Array) -> Array:
    """(m,) the shares within bounds where the mean of the regressions is lowest: the best of `rows`, then moved from one
    source to another by smaller and smaller amounts while that lowers it."""
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
    """What a proposed mixture lowers the target by. value: by the regressions, less `optimism`; drawn: (D,) the same by each
    draw; optimism: what the best of many mixtures seems better by than it is."""

    value: float
    drawn: Array
    optimism: float


def gain(target: list[Regression], draws: list[Regression], given: Array, proposed: Array, rows: Array) -> Gain:
    """The gain of a mixture that was proposed because it has the largest.

    Noise makes some mixture look best even where all are alike. How much that is shows in the draws, whose truth is known:
    the best mixture of a draw is better by the draw than by the law it was drawn from, and the mean of that is taken off
    (the optimism of Efron 1983, for a choice in place of a classifier).
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
    """(n,), or (D, n) of draws: the mean of the targets' predictions."""
    return np.asarray(np.mean([one.predict(shares_nm) for one in target], axis=0))
