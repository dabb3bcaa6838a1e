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
    in nats, Brier score, expected calibration error (Naeini et al. 2015), and the reliability table."""
    claimed = scores >= 0.5
    right = int((claimed & high).sum())
    safe = np.clip(scores, 1e-15, 1 - 1e-15)
    table = reliability(scores, high)
    off = sum(row["documents"] * abs(row["mean_score"] - row["high_share"]) for row in table)
    return {
        "documents": len(scores),
        "high": int(high.sum()),
        "accuracy": float((claimed == high).mean()),
        "precision": right / max(int(claimed.sum()), 1),
        "recall": right / max(int(high.sum()), 1),
        "f1": 2 * right / max(int(claimed.sum() + high.sum()), 1),
        "roc_auc": roc_auc(scores, high),
        "log_loss": float(-np.where(high, np.log(safe), np.log1p(-safe)).mean()),
        "brier": float(((scores - high) ** 2).mean()),
        "calibration_error": off / max(len(scores), 1),
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
    bins = bin_of(scores, BINS)
    counts = np.bincount(bins, minlength=BINS)
    means = [np.bincount(bins, values, BINS) / np.maximum(counts, 1) for values in (scores, high.astype(np.float64))]
    return [
        {"from": n / BINS, "to": (n + 1) / BINS, "documents": int(count), "mean_score": mean, "high_share": share}
        for n, (count, mean, share) in enumerate(zip(counts, *(mean.tolist() for mean in means), strict=True))
    ]


def histogram(scores: npt.NDArray[Any]) -> list[int]:
    """Documents in each twentieth of the scores."""
    counts: list[int] = np.bincount(bin_of(scores, HISTOGRAM_BINS), minlength=HISTOGRAM_BINS).tolist()
    return counts


def bin_of(scores: npt.NDArray[Any], num_bins: int) -> npt.NDArray[np.int64]:
    """The bin of each score, of equally wide ones from 0 to 1."""
    return np.minimum((scores * num_bins).astype(np.int64), num_bins - 1)
