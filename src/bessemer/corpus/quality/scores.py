"""Scores of the quality classifier: which documents they keep, and metrics on held-out documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.corpus.quality.sample import uniforms
from bessemer.recipe import Quality

Scores = npt.NDArray[np.float32]
Names = npt.NDArray[np.bytes_]
Bools = npt.NDArray[np.bool_]
Vector = npt.NDArray[np.float64]
FIXED = 1 << 32


def stays(settings: Quality, scores: Scores, identities: Names, cut: float) -> Bools:
    """Which judged documents are kept. cut: with use = "filter" the score that is kept from on.

    Independent of the order of the documents: draws depend on the identity.
    """
    if settings.use == "filter":
        reached: Bools = scores.astype(np.float64) >= np.float32(cut)
        return reached
    if settings.use == "pareto":
        # Lomax draws, as of numpy.random.pareto: GPT-3 keeps a document when one exceeds 1 - its score (Brown et al. 2020,
        # appendix A).
        drawn = uniforms(identities, "pareto", settings.seed) ** (-1.0 / settings.alpha) - 1.0
        by_chance: Bools = drawn > 1.0 - scores
        return by_chance
    return np.ones(len(scores), dtype=np.bool_)


def cut_of_share(sample: Scores, share: float) -> float:
    """Return the score that `share` of a sample reach; documents of equal scores are kept together."""
    if not len(sample):
        return 0.0
    return float(np.sort(sample)[::-1][max(round(share * len(sample)), 1) - 1])


def limit(settings: Quality, cut: float) -> str:
    """What a rejected document did not reach, in words."""
    if settings.use == "filter" and settings.keep_share is not None:
        return f"the best {settings.keep_share:g} of the documents have {cut:.6f} or more"
    if settings.use == "filter":
        return f"threshold {cut:g}"
    return f"Pareto draw, alpha {settings.alpha:g}" if settings.use == "pareto" else ""


def fixed_sum(values: npt.NDArray[Any]) -> int:
    """The sum of numbers of about 1, in units of 1 / FIXED: an integer, so that parts add up to the same in any order."""
    return int(np.rint(values.astype(np.float64) * FIXED).astype(np.int64).sum())


def pareto_share(scores: Vector, alpha: float) -> Vector:
    """The probability that a document with this score is kept: P(X > 1 - s) = (2 - s)^-alpha."""
    share: Vector = (2.0 - scores) ** -alpha
    return share


# --- Metrics

BINS = 10  # for the reliability table and the calibration error (Guo et al. 2017, section 2)
HISTOGRAM_BINS = 20


def held_out(scores: Vector, high: Bools) -> dict[str, Any]:
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


def roc_auc(scores: Vector, high: Bools) -> float:
    """Area under the ROC curve (Mann and Whitney 1947); NaN with one class only."""
    num_high, num_low = int(high.sum()), int((~high).sum())
    if not num_high or not num_low:
        return float("nan")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # the mean rank of equal scores
    return float((ranks[place][high].sum() - num_high * (num_high + 1) / 2) / (num_high * num_low))


def reliability(scores: Vector, high: Bools) -> list[dict[str, float]]:
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
