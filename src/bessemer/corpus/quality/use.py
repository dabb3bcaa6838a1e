"""What the scores decide: which documents stay, and in which band of quality each stands."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bessemer.corpus.quality.sample import uniforms
from bessemer.recipe import Quality

Scores = npt.NDArray[np.float32]
Names = npt.NDArray[np.bytes_]
Bools = npt.NDArray[np.bool_]


def stays(settings: Quality, scores: Scores, identities: Names, judged: Bools) -> tuple[Bools, str]:
    """Which documents are kept, and the limit in words for those that are not. Documents not `judged` stay.

    Depends on the documents alone and not on their order: draws go by identity, and of equal scores the smaller
    identities stay first.
    """
    keep = ~judged
    if settings.use == "filter" and settings.keep_share is not None:
        rows = np.flatnonzero(judged)
        order = rows[np.lexsort((identities[rows], -scores[rows].astype(np.float64)))]
        best = order[: max(round(settings.keep_share * len(rows)), 1)]
        keep[best] = True
        least = scores[best].min() if len(best) else 0.0
        return keep, f"the best {settings.keep_share:g} of the documents have {least:.6f} or more"
    if settings.use == "filter":
        threshold = 0.5 if settings.threshold is None else settings.threshold
        return keep | (scores.astype(np.float64) >= np.float32(threshold)), f"threshold {threshold:g}"
    if settings.use == "pareto":
        by_chance = pareto(uniforms(identities, "pareto", settings.seed), settings.alpha) > 1.0 - scores
        return keep | by_chance, f"Pareto draw, alpha {settings.alpha:g}"
    return np.ones(len(scores), dtype=np.bool_), ""


def pareto(chance: npt.NDArray[np.float64], alpha: float) -> npt.NDArray[np.float64]:
    """Draws with the law of numpy.random.pareto(alpha), which begins at 0 (Lomax), from uniform numbers in (0, 1).

    GPT-3 keeps a document when such a draw with alpha 9 exceeds 1 - its score (Brown et al. 2020, appendix A).
    """
    drawn: npt.NDArray[np.float64] = chance ** (-1.0 / alpha) - 1.0
    return drawn


def pareto_share(scores: npt.NDArray[np.float64], alpha: float) -> npt.NDArray[np.float64]:
    """The chance that a document with this score stays: P(X > 1 - s) = (2 - s)^-alpha."""
    share: npt.NDArray[np.float64] = (2.0 - scores) ** -alpha
    return share


def bands(
    scores: Scores, identities: Names, sources: npt.NDArray[np.int16], judged: Bools, count: int
) -> npt.NDArray[np.int8]:
    """The band of each judged document within its source, 0 the lowest; -1 of the rest. Bands of a source have equally
    many documents, or one more."""
    band = np.full(len(scores), -1, dtype=np.int8)
    for source in np.unique(sources[judged]):
        rows = np.flatnonzero(judged & (sources == source))
        order = rows[np.lexsort((identities[rows], scores[rows]))]
        band[order] = np.arange(len(order)) * count // len(order)
    return band
