"""Logistic regression, fitted by L-BFGS in a fixed order of sums: the same documents give the same model.

Sums over vectors are NumPy's pairwise ones and not BLAS's, whose result depends on its number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bessemer.corpus.quality.features import Features

Vector = npt.NDArray[np.float64]
Objective = Callable[[Vector], tuple[float, Vector]]

MEMORY = 10
"""Pairs of steps and gradients that L-BFGS remembers (Nocedal and Wright 2006, section 7.2: 3 to 20)."""

SUFFICIENT, CURVATURE = 1e-4, 0.9
"""Constants of the Wolfe conditions (Nocedal and Wright 2006, section 3.1)."""

TRIALS = 60
"""Step lengths tried on a line; after so many halvings nothing is gained within double precision."""

CLIP = 5.0
"""Standard deviations beyond which a statistic counts no more: one monstrous document is not to outweigh its words."""


@dataclass(frozen=True)
class Minimum:
    """Where the descent ended."""

    place: Vector
    value: float
    steps: int
    largest_gradient: float
    """The largest entry of the gradient there; 0 at an exact optimum."""


@dataclass(frozen=True)
class Fit:
    """A logistic regression: bias, weights of the standardised statistics, weights of the buckets."""

    centre: Vector
    spread: Vector
    bias: float
    of_statistics: Vector
    of_buckets: Vector
    loss: float
    """Mean logistic loss of the training documents in nats, without the penalty."""
    steps: int
    largest_gradient: float


def minimise(objective: Objective, start: Vector, steps: int, tolerance: float = 1e-6) -> Minimum:
    """The minimum of a smooth convex function by L-BFGS (Nocedal and Wright 2006, algorithm 7.4).

    Step lengths satisfy the weak Wolfe conditions, found by bisection (Lewis and Overton 2013, algorithm 4.6).
    Ends when no entry of the gradient is larger than `tolerance`, or after `steps` steps.
    """
    place = start.copy()
    value, gradient = objective(place)
    pairs: deque[tuple[Vector, Vector, float]] = deque(maxlen=MEMORY)
    done = 0
    while done < steps and np.abs(gradient).max() > tolerance:
        direction = -_times_inverse_hessian(gradient, pairs)
        slope = _dot(gradient, direction)
        length, low, high = 1.0 if pairs else 1.0 / max(float(np.abs(gradient).max()), 1.0), 0.0, np.inf
        for _ in range(TRIALS):
            reached = place + length * direction
            new_value, new_gradient = objective(reached)
            if not new_value <= value + SUFFICIENT * length * slope:
                high = length
            elif _dot(new_gradient, direction) < CURVATURE * slope:
                low = length
            else:
                break
            length = 0.5 * (low + high) if high < np.inf else 2.0 * low
        else:
            break  # as low as double precision tells
        step, change = reached - place, new_gradient - gradient
        pairs.append((step, change, _dot(step, change)))
        place, value, gradient = reached, new_value, new_gradient
        done += 1
    return Minimum(place, value, done, float(np.abs(gradient).max()))


def fit(
    features: Features, high: npt.NDArray[np.bool_], hash_bits: int, l2: float, steps: int, statistics_scale: float
) -> Fit:
    """The weights with the smallest mean logistic loss + l2 / 2 x their squared length (the bias is free).

    Statistics are standardised by the mean and the deviation of these documents, then multiplied by `statistics_scale`:
    sixteen numbers of size 1 would else outweigh a bag of words of length 1. The scale is in the weights that come out.
    """
    from bessemer.corpus.quality import kernels

    centre = features.statistics.mean(axis=0)
    spread = features.statistics.std(axis=0)
    spread[spread < 1e-12] = 1.0  # the same in every document: it tells nothing, and divides nothing
    statistics = statistics_scale * standardised(features.statistics, centre, spread)
    wanted = high.astype(np.float64)
    used = np.unique(features.buckets)  # the rest never move from 0: the descent is over what occurs
    narrow = np.searchsorted(used, features.buckets).astype(np.int32)
    head = 1 + statistics.shape[1]

    def objective(weights: Vector) -> tuple[float, Vector]:
        gradient = np.zeros_like(weights)
        loss = kernels.loss_and_gradient(narrow, features.bounds, statistics, wanted, weights, gradient)
        gradient[1:] += l2 * weights[1:]
        return loss + 0.5 * l2 * _dot(weights[1:], weights[1:]), gradient

    found = minimise(objective, np.zeros(head + len(used)), steps)
    of_buckets = np.zeros(1 << hash_bits)
    of_buckets[used] = found.place[head:]
    loss = found.value - 0.5 * l2 * _dot(found.place[1:], found.place[1:])
    return Fit(
        centre,
        spread,
        float(found.place[0]),
        statistics_scale * found.place[1:head],
        of_buckets,
        loss,
        found.steps,
        found.largest_gradient,
    )


def standardised(statistics: Vector, centre: Vector, spread: Vector) -> Vector:
    """Statistics in standard deviations from the mean, at most CLIP."""
    return np.clip((statistics - centre) / spread, -CLIP, CLIP)


def platt(logits: Vector, high: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Slope and offset that make `sigmoid(slope x logit + offset)` a probability (Platt 1999, section 2.2), from
    documents that the classifier was not trained on. The targets are Platt's, drawn in a little from 0 and 1."""
    num_high, num_low = int(high.sum()), int((~high).sum())
    wanted = np.where(high, (num_high + 1.0) / (num_high + 2.0), 1.0 / (num_low + 2.0))

    def objective(weights: Vector) -> tuple[float, Vector]:
        values = weights[0] * logits + weights[1]
        losses = np.logaddexp(0.0, values) - wanted * values
        error = sigmoid(values) - wanted
        return float(losses.mean()), np.array([(error * logits).mean(), error.mean()])

    slope, offset = minimise(objective, np.array([1.0, 0.0]), 200, 1e-9).place.tolist()
    return slope, offset


def sigmoid(values: Vector) -> Vector:
    """1 / (1 + exp(-values)), without overflow."""
    small = np.exp(-np.abs(values))
    return np.where(values >= 0, 1.0, small) / (1.0 + small)


def _times_inverse_hessian(gradient: Vector, pairs: deque[tuple[Vector, Vector, float]]) -> Vector:
    """The two loops of L-BFGS (Nocedal and Wright 2006, algorithm 7.4)."""
    direction, shares = gradient.copy(), []
    for step, change, product in reversed(pairs):
        share = _dot(step, direction) / product
        direction -= share * change
        shares.append(share)
    if pairs:
        _, change, product = pairs[-1]
        direction *= product / _dot(change, change)
    for (step, change, product), share in zip(pairs, reversed(shares), strict=True):
        direction += (share - _dot(change, direction) / product) * step
    return direction


def _dot(a: Vector, b: Vector) -> float:
    return float(np.add.reduce(a * b))
