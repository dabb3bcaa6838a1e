"""How good a classifier is on documents that it has not seen, and whether its scores are probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BINS = 10
"""Of the reliability table and the calibration error, equally wide (Guo et al. 2017, section 2)."""

HISTOGRAM_BINS = 20


def held_out(scores: npt.NDArray[np.float64], high: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """The figures of quality.json: at the limit 0.5 accuracy, precision, recall and F1 of `high`; ROC AUC, log loss
    in nats, Brier score, expected calibration error, and the reliability table."""
    said = scores >= 0.5
    right, claimed, there = int((said & high).sum()), int(said.sum()), int(high.sum())
    precision, recall = right / max(claimed, 1), right / max(there, 1)
    safe = np.clip(scores, 1e-15, 1 - 1e-15)
    table = reliability(scores, high)
    return {
        "documents": len(scores),
        "high": there,
        "accuracy": float((said == high).mean()),
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / max(precision + recall, 1e-300),
        "roc_auc": roc_auc(scores, high),
        "log_loss": float(-np.where(high, np.log(safe), np.log1p(-safe)).mean()),
        "brier": float(((scores - high) ** 2).mean()),
        "calibration_error": calibration_error(table),
        "reliability": table,
    }


def roc_auc(scores: npt.NDArray[np.float64], high: npt.NDArray[np.bool_]) -> float:
    """The chance that a high document has a larger score than a low one, ties half (Mann and Whitney 1947)."""
    num_high, num_low = int(high.sum()), int((~high).sum())
    if not num_high or not num_low:
        return float("nan")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # the mean rank of equal scores
    return float((ranks[place][high].sum() - num_high * (num_high + 1) / 2) / (num_high * num_low))


def reliability(scores: npt.NDArray[np.float64], high: npt.NDArray[np.bool_]) -> list[dict[str, float]]:
    """For each tenth of the scores: how many documents, their mean score, and the share of them that is high."""
    bins = np.minimum((scores * BINS).astype(np.int64), BINS - 1)
    rows = []
    for number in range(BINS):
        here = bins == number
        count = int(here.sum())
        rows.append(
            {
                "from": number / BINS,
                "to": (number + 1) / BINS,
                "documents": count,
                "mean_score": float(scores[here].mean()) if count else 0.0,
                "high_share": float(high[here].mean()) if count else 0.0,
            }
        )
    return rows


def calibration_error(table: list[dict[str, float]]) -> float:
    """Expected calibration error (Naeini et al. 2015): how far score and share lie apart, weighted by documents."""
    total = sum(row["documents"] for row in table)
    return sum(row["documents"] * abs(row["mean_score"] - row["high_share"]) for row in table) / max(total, 1)


def histogram(scores: npt.NDArray[Any]) -> list[int]:
    """Documents in each twentieth of the scores."""
    bins = np.minimum((scores * HISTOGRAM_BINS).astype(np.int64), HISTOGRAM_BINS - 1)
    return [int(count) for count in np.bincount(bins, minlength=HISTOGRAM_BINS)]
