"""The fit against SciPy's minimiser and against answers known by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.sparse import csr_array

from bessemer.corpus.quality import kernels
from bessemer.corpus.quality.features import STATISTICS, Features
from bessemer.corpus.quality.logistic import fit, minimise, platt, sigmoid

BUCKETS = 256
SCALE = 0.5


def made(count: int = 120, seed: int = 0) -> tuple[Features, np.ndarray]:
    draw = np.random.default_rng(seed)
    high = draw.random(count) < 0.45
    sizes = draw.integers(0, 30, count)
    sizes[:2] = 0, 1  # a text without words
    rows = [np.sort(draw.choice(BUCKETS // 2, size, replace=False)) for size in sizes]
    statistics = draw.normal(size=(count, len(STATISTICS))) + 0.4 * high[:, None]
    statistics[:, 3] = 7.0  # the same in every document
    statistics[5, 2] = 1e9  # one monstrous document
    buckets = np.concatenate(rows).astype(np.int32)
    return Features(statistics, buckets, np.cumsum([0, *sizes])), high


def dense(features: Features) -> np.ndarray:
    """1, standardised statistics, and the bag with rows of length 1, as one matrix."""
    sizes = np.diff(features.bounds)
    bag = csr_array(
        (np.repeat(1 / np.sqrt(np.maximum(sizes, 1)), sizes), features.buckets, features.bounds), (len(sizes), BUCKETS)
    ).toarray()
    statistics = features.statistics - features.statistics.mean(axis=0)
    spread = features.statistics.std(axis=0)
    statistics = np.clip(statistics / np.where(spread > 0, spread, 1.0), -5, 5)
    return np.c_[np.ones(len(sizes)), SCALE * statistics, bag]


def test_the_gradient_is_the_textbooks() -> None:
    features, high = made()
    matrix = dense(features)
    weights = np.random.default_rng(1).normal(size=matrix.shape[1])
    gradient = np.zeros_like(weights)
    loss = kernels.loss_and_gradient(
        features.buckets, features.bounds, matrix[:, 1:17].copy(), high.astype(float), weights, gradient
    )
    logits = matrix @ weights
    assert loss == pytest.approx(np.mean(np.log1p(np.exp(-np.where(high, logits, -logits)))), rel=1e-12)
    assert gradient == pytest.approx(matrix.T @ (1 / (1 + np.exp(-logits)) - high) / len(high), abs=1e-14)


@pytest.mark.parametrize("l2", [1e-1, 1e-3])
def test_the_fit_is_scipys_optimum(l2: float) -> None:
    features, high = made()
    matrix = dense(features)

    def objective(weights: np.ndarray) -> float:
        logits = matrix @ weights
        return float(np.mean(np.logaddexp(0, -np.where(high, logits, -logits))) + l2 / 2 * (weights[1:] ** 2).sum())

    def slope(weights: np.ndarray) -> np.ndarray:
        return matrix.T @ (sigmoid(matrix @ weights) - high) / len(high) + l2 * np.r_[0, weights[1:]]

    start, options = np.zeros(matrix.shape[1]), {"gtol": 1e-8, "maxiter": 3000}
    theirs = minimize(objective, start, jac=slope, method="BFGS", options=options)
    found = fit(features, high, 8, l2, 500, SCALE)
    weights = np.r_[found.bias, found.of_statistics / SCALE, found.of_buckets]
    assert found.largest_gradient <= 1e-6
    assert objective(weights) <= theirs.fun + 1e-8
    assert weights == pytest.approx(theirs.x, abs=2e-4 / l2**0.5)
    assert found.loss == pytest.approx(objective(weights) - l2 / 2 * (weights[1:] ** 2).sum(), abs=1e-12)
    assert found.of_statistics[3] == 0 and not found.of_buckets[BUCKETS // 2 :].any()


def test_one_bucket_by_hand() -> None:
    """3 of 4 texts with the bucket are high and 1 of 4 without: log odds log 3 and -log 3, so bias -log 3, weight 2 log 3."""
    statistics = np.zeros((8, len(STATISTICS)))
    high = np.array([True, True, True, False, False, False, False, True])
    features = Features(statistics, np.zeros(4, dtype=np.int32), np.array([0, 1, 2, 3, 4, 4, 4, 4, 4]))
    found = fit(features, high, 8, 1e-12, 200, 1.0)
    assert found.bias == pytest.approx(-np.log(3), abs=1e-4)
    assert found.of_buckets[0] == pytest.approx(2 * np.log(3), abs=1e-4)
    assert found.loss == pytest.approx(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)), abs=1e-9)


def test_minimise_finds_the_bottom_of_a_valley() -> None:
    """Rosenbrock's function is not convex, and its valley bends: the line search has work to do."""

    def rosenbrock(at: np.ndarray) -> tuple[float, np.ndarray]:
        x, y = at
        value = 100 * (y - x * x) ** 2 + (1 - x) ** 2
        return value, np.array([-400 * x * (y - x * x) - 2 * (1 - x), 200 * (y - x * x)])

    found = minimise(rosenbrock, np.array([-1.2, 1.0]), 500, 1e-9)
    assert found.place == pytest.approx([1, 1], abs=1e-7) and found.steps < 100
    assert minimise(rosenbrock, np.array([-1.2, 1.0]), 3).steps == 3


def test_platt_recovers_the_probability_behind_overconfident_logits() -> None:
    draw = np.random.default_rng(2)
    truth = draw.normal(0, 2, 40_000)
    high = draw.random(len(truth)) < sigmoid(truth)
    slope, offset = platt(4 * truth + 3, high)
    assert slope == pytest.approx(0.25, abs=0.01) and offset == pytest.approx(-0.75, abs=0.06)


def test_platt_is_finite_when_the_classes_are_apart() -> None:
    logits = np.r_[np.linspace(5, 9, 20), np.linspace(-9, -5, 20)]
    slope, offset = platt(logits, logits > 0)
    scores = sigmoid(slope * logits + offset)
    assert np.isfinite([slope, offset]).all() and 0.9 < scores[0] < 1 and 0 < scores[-1] < 0.1


def test_sigmoid_at_the_ends() -> None:
    values = np.array([-1e4, -30.0, 0.0, 30.0, 1e4])
    assert sigmoid(values) == pytest.approx([0, 9.357622968839299e-14, 0.5, 1 - 9.357622968839299e-14, 1], rel=1e-12)
