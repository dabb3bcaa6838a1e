"""The fit against answers known by hand and by calculus."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.special import expit

from bessemer.corpus.quality.classify import fit
from bessemer.corpus.quality.features import STATISTICS, Features

BUCKETS = 256
SCALE = 0.5


def bag(rows: list[list[int]]) -> csr_array:
    """Rows of length 1 with these buckets."""
    sizes = [len(row) for row in rows]
    values = [1 / len(row) ** 0.5 for row in rows for _ in row]
    return csr_array((values, [bucket for row in rows for bucket in row], np.cumsum([0, *sizes])), (len(rows), BUCKETS))


@pytest.mark.parametrize("l2", [1e-1, 1e-3])
def test_the_fit_is_the_optimum(l2: float) -> None:
    draw = np.random.default_rng(0)
    high = draw.random(120) < 0.45
    sizes = [0, 1, *draw.integers(0, 30, 118)]  # a text without words
    features = Features(
        draw.normal(size=(120, len(STATISTICS))) + 0.4 * high[:, None],
        bag([np.sort(draw.choice(BUCKETS // 2, size, replace=False)).tolist() for size in sizes]),
    )
    features.statistics[:, 3] = 7.0  # the same in every document
    features.statistics[5, 2] = 1e9  # one monstrous document
    found, descent = fit(features, high, l2, 500, SCALE)
    statistics = features.statistics - features.statistics.mean(axis=0)
    spread = features.statistics.std(axis=0)
    statistics = SCALE * np.clip(statistics / np.where(spread > 0, spread, 1.0), -5, 5)
    matrix = np.c_[np.ones(120), statistics, features.bag.toarray()]
    weights = np.r_[found["bias"], found["statistic_weights"] / SCALE, found["bucket_weights"]]
    logits = matrix @ weights
    gradient = matrix.T @ (expit(logits) - high) / 120 + l2 * np.r_[0, weights[1:]]
    assert np.abs(gradient).max() <= 2e-6 and descent["largest_gradient"] <= 1e-6  # convex: 0 at the optimum alone
    assert descent["loss"] == pytest.approx(np.mean(np.log1p(np.exp(-np.where(high, logits, -logits)))), rel=1e-9)
    assert found["statistic_weights"][3] == 0 and not found["bucket_weights"][BUCKETS // 2 :].any()


def test_one_bucket_by_hand() -> None:
    """3 of 4 texts with the bucket are high and 1 of 4 without: log odds log 3 and -log 3, so bias -log 3, weight 2 log 3."""
    high = np.array([True, True, True, False, False, False, False, True])
    features = Features(np.zeros((8, len(STATISTICS))), bag([[0]] * 4 + [[]] * 4))
    found, descent = fit(features, high, 1e-12, 200, 1.0)
    assert found["bias"] == pytest.approx(-np.log(3), abs=1e-4)
    assert found["bucket_weights"][0] == pytest.approx(2 * np.log(3), abs=1e-4)
    assert descent["loss"] == pytest.approx(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)), abs=1e-9)
