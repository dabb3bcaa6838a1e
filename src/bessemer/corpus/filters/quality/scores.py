"""Scores of the quality classifier: which documents they keep, and metrics on held-out documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.recipe import Quality

Scores = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Vector = npt.NDArray[np.float64]
HISTOGRAM_BINS = 20


def stays(settings: Quality, scores: Scores, cut: float) -> Bools:
    """Return which judged documents are kept. `cut` is the lowest score that use = "filter" keeps."""
    kept: Bools = scores.astype(np.float64) >= (np.float32(cut) if settings.use == "filter" else 0.0)
    return kept


def cut_of_share(sample: Scores, share: float) -> float:
    """Return the score that `share` of a sample reach; documents of equal scores are kept together."""
    if not len(sample):
        return 0.0
    return float(np.sort(sample)[::-1][max(round(share * len(sample)), 1) - 1])


def limit(settings: Quality, cut: float) -> str:
    """Return in words the limit that a rejected document did not reach."""
    if settings.use == "filter" and settings.keep_share is not None:
        return f"the best {settings.keep_share:g} of the documents have {cut:.6f} or more"
    return f"threshold {cut:g}" if settings.use == "filter" else ""


def held_out(scores: Vector, high: Bools) -> dict[str, Any]:
    """Return the figures of quality.json, by scikit-learn: those of `high` at the limit 0.5, and of the scores themselves."""
    from sklearn import metrics

    claimed = scores >= 0.5
    figures = {
        "accuracy": metrics.accuracy_score(high, claimed), "f1": metrics.f1_score(high, claimed, zero_division=0.0),
        "precision": metrics.precision_score(high, claimed, zero_division=0.0),
        "recall": metrics.recall_score(high, claimed, zero_division=0.0),
        "roc_auc": metrics.roc_auc_score(high, scores), "log_loss": metrics.log_loss(high, scores),
        "brier": metrics.brier_score_loss(high, scores),
    }  # fmt: skip
    sizes = {"documents": len(scores), "high": int(high.sum())}
    return sizes | {name: float(value) for name, value in figures.items()}


def bin_of(scores: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the bin of each score, of equally wide ones from 0 to 1."""
    return np.minimum((scores * HISTOGRAM_BINS).astype(np.int64), HISTOGRAM_BINS - 1)
