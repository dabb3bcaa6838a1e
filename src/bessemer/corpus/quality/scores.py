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
HISTOGRAM_BINS = 20


def stays(settings: Quality, scores: Scores, identities: Names, cut: float) -> Bools:
    """Return which judged documents are kept, in any order of the documents: draws depend on the identity.

    `cut` is the lowest score that use = "filter" keeps.
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
    """Return in words the limit that a rejected document did not reach."""
    if settings.use == "filter" and settings.keep_share is not None:
        return f"the best {settings.keep_share:g} of the documents have {cut:.6f} or more"
    if settings.use == "filter":
        return f"threshold {cut:g}"
    return f"Pareto draw, alpha {settings.alpha:g}" if settings.use == "pareto" else ""


def held_out(scores: Vector, high: Bools) -> dict[str, Any]:
    """Return the figures of quality.json, by scikit-learn: those of `high` at the limit 0.5, and of the scores themselves."""
    from sklearn import metrics

    claimed = scores >= 0.5
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        high, claimed, average="binary", zero_division=0.0
    )
    figures = {
        "accuracy": metrics.accuracy_score(high, claimed), "precision": precision, "recall": recall, "f1": f1,
        "roc_auc": metrics.roc_auc_score(high, scores), "log_loss": metrics.log_loss(high, scores),
        "brier": metrics.brier_score_loss(high, scores),
    }  # fmt: skip
    sizes = {"documents": len(scores), "high": int(high.sum())}
    return sizes | {name: float(value) for name, value in figures.items()}


def bin_of(scores: npt.NDArray[Any], num_bins: int) -> npt.NDArray[np.int64]:
    """Return the bin of each score, of equally wide ones from 0 to 1."""
    return np.minimum((scores * num_bins).astype(np.int64), num_bins - 1)
