"""Scores of the quality classifier: which documents they keep, quality bands, and metrics on held-out documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bessemer.corpus.quality.sample import uniforms
from bessemer.recipe import Quality

Scores = npt.NDArray[np.float32]
Names = npt.NDArray[np.bytes_]
Bools = npt.NDArray[np.bool_]
Vector = npt.NDArray[np.float64]
Keys = npt.NDArray[np.uint8]
FIXED = 1 << 32


def stays(settings: Quality, scores: Scores, identities: Names, cut: bytes | None) -> Bools:
    """Which judged documents are kept. cut: with keep_share the last one that is, by score and identity; None: there is
    none.

    Independent of the order of the documents: draws depend on the identity, and ties are broken by it.
    """
    if settings.use == "filter" and settings.keep_share is not None:
        assert cut is not None
        return up_to(keys_of(scores, identities, best_first=True), cut)
    if settings.use == "filter":
        reached: Bools = scores.astype(np.float64) >= np.float32(threshold(settings))
        return reached
    if settings.use == "pareto":
        # Lomax draws, as of numpy.random.pareto: GPT-3 keeps a document when one exceeds 1 - its score (Brown et al. 2020,
        # appendix A).
        drawn = uniforms(identities, "pareto", settings.seed) ** (-1.0 / settings.alpha) - 1.0
        by_chance: Bools = drawn > 1.0 - scores
        return by_chance
    return np.ones(len(scores), dtype=np.bool_)


def threshold(settings: Quality) -> float:
    """The score that is kept from on, without keep_share."""
    return 0.5 if settings.threshold is None else settings.threshold


def limit(settings: Quality, least: float) -> str:
    """What a rejected document did not reach. least: the lowest score that was kept."""
    if settings.use == "filter" and settings.keep_share is not None:
        return f"the best {settings.keep_share:g} of the documents have {least:.6f} or more"
    if settings.use == "filter":
        return f"threshold {threshold(settings):g}"
    return f"Pareto draw, alpha {settings.alpha:g}" if settings.use == "pareto" else ""


def queries(settings: Quality, judged: dict[str, int]) -> list[RankQuery]:
    """The ranks at which `keep_share` or the bands end. judged: documents of each judged source."""
    total = sum(judged.values())
    if settings.use == "filter" and settings.keep_share is not None and total:
        return [RankQuery(tuple(judged), True, max(round(settings.keep_share * total), 1) - 1)]
    if settings.use != "weight":
        return []
    bands = range(1, len(settings.band_weights))
    ranks = [(name, -(-band * count // (len(bands) + 1))) for name, count in judged.items() for band in bands]
    return [RankQuery((name,), False, rank) for name, rank in ranks if rank < judged[name]]


def bands(scores: Scores, identities: Names, firsts: Sequence[bytes]) -> npt.NDArray[np.int8]:
    """The quality band of each document of a source, 0 the lowest, equally large. firsts: the first document of each band but the
    lowest."""
    keys, band = keys_of(scores, identities, best_first=False), np.zeros(len(scores), dtype=np.int8)
    for first in firsts:
        band += from_on(keys, first)
    return band


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


# --- The place in the order of all scores where a share or a band ends, by counts of tasks: exact, in bounded memory
#
# A document's key is its score and, for equal scores, its identity: 20 bytes, ordered as the documents are. The key of a rank
# is found as by a radix sort: the first two bytes of all keys are counted, then the next two of those that share what is
# known, until one document is left. That takes ten rounds at the most, and two where scores differ.

KEY_BYTES, DIGIT_BYTES = 20, 2
DIGITS = 1 << 8 * DIGIT_BYTES


class RankQuery(NamedTuple):
    """A rank that is looked for, counted from 0, among the documents of some sources whose key begins with `known`."""

    sources: tuple[str, ...]
    best_first: bool  # scores descend; identities ascend in either case
    rank: int
    known: bytes = b""


def keys_of(scores: npt.NDArray[np.float32], identities: npt.NDArray[np.bytes_], best_first: bool) -> Keys:
    """The key of each document (KEY_BYTES); scores are not negative."""
    bits = (scores + np.float32(0)).view(np.uint32)  # in this form ordered as the numbers are; + 0 for -0
    keys = np.empty((len(scores), KEY_BYTES), dtype=np.uint8)
    keys[:, :4] = (~bits if best_first else bits).astype(">u4").view(np.uint8).reshape(-1, 4)
    keys[:, 4:] = np.ascontiguousarray(identities).view(np.uint8).reshape(-1, 16)
    return keys


def digit_counts(keys: Keys, known: bytes) -> npt.NDArray[np.int64]:
    """How often each value of the next digit occurs in the keys that begin with `known`."""
    place = len(known)
    same = keys[(keys[:, :place] == np.frombuffer(known, dtype=np.uint8)).all(axis=1)]
    digits = same[:, place].astype(np.int64) << 8 | same[:, place + 1]
    return np.bincount(digits, minlength=DIGITS)


def up_to(keys: Keys, cut: bytes) -> npt.NDArray[np.bool_]:
    """Which keys come before the cut, or are the document that it stands for."""
    found: npt.NDArray[np.bool_] = _strings(keys) <= np.bytes_(cut.ljust(KEY_BYTES, b"\xff"))
    return found


def from_on(keys: Keys, cut: bytes) -> npt.NDArray[np.bool_]:
    """Which keys come after the cut, or are the document that it stands for."""
    found: npt.NDArray[np.bool_] = _strings(keys) >= np.bytes_(cut)
    return found


def _strings(keys: Keys) -> npt.NDArray[np.bytes_]:
    return np.ascontiguousarray(keys).view(f"S{KEY_BYTES}").reshape(-1)


def find_cuts(
    queries: Sequence[RankQuery], count: Callable[[Sequence[RankQuery]], Sequence[npt.NDArray[np.int64]]]
) -> list[bytes]:
    """The beginning of the key of each rank that no other document shares. count: the `digit_counts` of all documents for each
    query."""
    cuts = [b""] * len(queries)
    left = dict(enumerate(queries))
    while left:
        counted = count(list(left.values()))
        for (number, query), counts in zip(list(left.items()), counted, strict=True):
            ends = np.cumsum(counts)
            digit = int(np.searchsorted(ends, query.rank, side="right"))
            known = query.known + digit.to_bytes(DIGIT_BYTES, "big")
            if counts[digit] == 1 or len(known) == KEY_BYTES:
                cuts[number] = known
                del left[number]
            else:
                left[number] = query._replace(known=known, rank=query.rank - int(ends[digit] - counts[digit]))
    return cuts
