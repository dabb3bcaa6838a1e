"""Held-out figures by hand, and calibration on data whose probabilities are known."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.corpus.quality import scores as scoring

SCORES = np.array([0.9, 0.8, 0.6, 0.4, 0.55, 0.3, 0.1, 0.5])
HIGH = np.array([True, True, True, True, False, False, False, False])


def test_figures_by_hand() -> None:
    found = scoring.held_out(SCORES, HIGH)
    # Called high: .9 .8 .6 .55 .5, of which three are.
    assert found["accuracy"] == 5 / 8 and found["precision"] == 3 / 5 and found["recall"] == 3 / 4
    assert found["f1"] == pytest.approx(2 * 0.6 * 0.75 / 1.35)
    assert found["brier"] == pytest.approx(np.mean((SCORES - HIGH) ** 2))
    assert found["log_loss"] == pytest.approx(-np.log([0.9, 0.8, 0.6, 0.4, 0.45, 0.7, 0.9, 0.5]).mean())
    assert found["documents"] == 8 and found["high"] == 4


def test_auc_counts_pairs_and_halves_ties() -> None:
    draw = np.random.default_rng(0)
    scores, high = draw.integers(0, 12, 200) / 12, draw.random(200) < 0.3
    a, b = scores[high][:, None], scores[~high][None]
    assert scoring.roc_auc(scores, high) == pytest.approx(((a > b) + 0.5 * (a == b)).mean())
    assert scoring.roc_auc(np.full(8, 0.5), HIGH) == 0.5
    assert np.isnan(scoring.roc_auc(SCORES, np.ones(8, dtype=bool)))


def test_scores_that_are_probabilities_have_no_calibration_error() -> None:
    draw = np.random.default_rng(1)
    scores = draw.random(200_000)
    high = draw.random(200_000) < scores
    table = scoring.reliability(scores, high)
    assert [row["documents"] for row in table] == pytest.approx([20_000] * 10, rel=0.05)
    assert all(abs(row["mean_score"] - row["high_share"]) < 0.015 for row in table)
    assert scoring.held_out(scores, high)["calibration_error"] < 0.005


def test_the_calibration_error_of_overconfident_scores_is_known() -> None:
    """Every score is 0.95 or 0.05 and 70% of them are right: 0.25 off everywhere."""
    draw = np.random.default_rng(2)
    scores = np.where(draw.random(100_000) < 0.5, 0.95, 0.05)
    high = (scores > 0.5) == (draw.random(100_000) < 0.7)
    table = scoring.reliability(scores, high)
    assert scoring.held_out(scores, high)["calibration_error"] == pytest.approx(0.25, abs=0.01)
    assert [row["documents"] for row in table if row["documents"]] == [table[0]["documents"], table[9]["documents"]]


def test_every_score_has_a_bin() -> None:
    scores = np.array([0.0, 0.05, 0.0999, 0.1, 1.0], dtype=np.float32)
    counts = scoring.histogram(scores)
    assert len(counts) == 20 and sum(counts) == 5 and counts[19] == 1 and counts[0] == 1
    assert sum(row["documents"] for row in scoring.reliability(scores.astype(float), scores > 0)) == 5
