"""The fit on documents with known probabilities, and held-out metrics computed manually."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_array

from bessemer.corpus.filters.quality import classify, decide


def test_scores_approach_the_true_probabilities() -> None:
    """Half of 4,000 rows have bucket 0, and 80% of these are high, compared with 30% of the others. Bucket 9 does not occur."""
    draw = np.random.default_rng(0)
    has_bucket = np.arange(4000) % 2 == 0
    high = draw.random(4000) < np.where(has_bucket, 0.8, 0.3)
    rows = csr_array(np.c_[has_bucket, np.ones(4000), draw.normal(scale=1e-3, size=(4000, 7)), np.zeros(4000)])
    rows.eliminate_zeros()
    bias, weights = classify.fit(rows, high)
    scores = 1 / (1 + np.exp(-(bias + rows @ weights)))
    assert scores[has_bucket].mean() == pytest.approx(high[has_bucket].mean(), abs=0.02)
    assert scores[~has_bucket].mean() == pytest.approx(high[~has_bucket].mean(), abs=0.02)
    assert weights[9] == 0
    again = classify.fit(rows, high)
    assert again[0] == bias and np.array_equal(again[1], weights)


def test_held_out_metrics_equal_manual_values() -> None:
    scores = np.array([0.9, 0.8, 0.6, 0.4, 0.55, 0.3, 0.1, 0.5])
    high = np.array([True, True, True, True, False, False, False, False])
    found = classify.held_out(scores, high)
    # Predicted high: .9 .8 .6 .55 .5, of which three are high. Of 16 pairs, .4 is below .55 and .5.
    assert found["accuracy"] == 5 / 8 and found["precision"] == 3 / 5 and found["recall"] == 3 / 4
    assert found["f1"] == pytest.approx(2 * 0.6 * 0.75 / 1.35) and found["roc_auc"] == 14 / 16
    assert found["brier"] == pytest.approx(np.mean((scores - high) ** 2))
    assert found["log_loss"] == pytest.approx(-np.log([0.9, 0.8, 0.6, 0.4, 0.45, 0.7, 0.9, 0.5]).mean())
    assert found["documents"] == 8 and found["high"] == 4
    assert decide.bin_of(np.array([0.0, 0.0999, 0.1, 1.0], dtype=np.float32)).tolist() == [0, 1, 2, 19]
