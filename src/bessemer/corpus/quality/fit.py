"""Logistic regression by SciPy's L-BFGS, its calibration, and its most important features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import OptimizeResult, minimize
from scipy.sparse import csr_array, hstack
from scipy.special import expit

from bessemer.corpus.quality.features import STATISTICS, Features, buckets_of, prefix, standardised
from bessemer.corpus.text.ngrams import folded_words

Vector = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SHOWN = 30  # words and pairs of words listed for each side
MIN_SHARE = 0.005  # buckets in fewer of the training documents are chance, however large their weight
SEARCHED = 4000  # documents searched for the words behind the buckets


@dataclass(frozen=True)
class Fit:
    """A logistic regression: bias, weights of the standardised statistics, weights of the buckets."""

    centre: Vector
    spread: Vector
    bias: float
    statistic_weights: Vector
    bucket_weights: Vector
    loss: float  # mean logistic loss of the training documents in nats, without the penalty
    steps: int
    largest_gradient: float


def minimise(
    objective: Callable[[Vector], tuple[float, Vector]], start: Vector, steps: int, tolerance: float = 1e-6
) -> OptimizeResult:
    """The minimum of a function that returns value and gradient, to a largest entry of the gradient of `tolerance`."""
    options = {"maxiter": steps, "maxfun": 20 * steps, "gtol": tolerance, "ftol": 0.0, "maxls": 60}
    return minimize(objective, start, jac=True, method="L-BFGS-B", options=options)


def fit(features: Features, high: Bools, l2: float, steps: int, statistics_scale: float) -> Fit:
    """Minimise mean logistic loss + l2 / 2 x squared length of the weights (the bias is free).

    Statistics are standardised over these documents and multiplied by `statistics_scale`, or sixteen numbers of size 1
    would outweigh a bag of words of length 1. The returned weights include the scale.
    """
    centre, spread = features.statistics.mean(axis=0), features.statistics.std(axis=0)
    spread[spread < 1e-12] = 1.0  # constant over all documents
    statistics = statistics_scale * standardised(features.statistics, centre, spread)
    used = np.unique(features.bag.indices)  # the rest never move from 0: the descent is over what occurs
    head = 1 + statistics.shape[1]
    # One sparse matrix: its products are sums in a fixed order, where those of BLAS depend on the number of threads.
    matrix = hstack([csr_array(np.c_[np.ones(len(high)), statistics]), features.bag[:, used]], format="csr")
    transposed, penalty = matrix.T.tocsr(), np.full(matrix.shape[1], l2)
    penalty[0] = 0.0

    def objective(weights: Vector) -> tuple[float, Vector]:
        loss, error = _logistic_loss(matrix @ weights, high)
        return loss + 0.5 * float((penalty * weights**2).sum()), transposed @ error + penalty * weights

    found = minimise(objective, np.zeros(matrix.shape[1]), steps)
    bucket_weights = np.zeros(features.bag.shape[1])
    bucket_weights[used] = found.x[head:]
    return Fit(
        centre, spread, float(found.x[0]), statistics_scale * found.x[1:head], bucket_weights,
        _logistic_loss(matrix @ found.x, high)[0], int(found.nit), float(np.abs(found.jac).max()),
    )  # fmt: skip


def platt(logits: Vector, high: Bools) -> tuple[float, float]:
    """Slope and offset that make `expit(slope x logit + offset)` a probability (Platt 1999, section 2.2), from
    documents that the classifier was not trained on. The targets are Platt's, drawn in a little from 0 and 1."""
    num_high, num_low = int(high.sum()), int((~high).sum())
    wanted = np.where(high, (num_high + 1.0) / (num_high + 2.0), 1.0 / (num_low + 2.0))

    def objective(weights: Vector) -> tuple[float, Vector]:
        loss, error = _logistic_loss(weights[0] * logits + weights[1], wanted)
        return loss, np.array([(error * logits).sum(), error.sum()])

    slope, offset = minimise(objective, np.array([1.0, 0.0]), 200, 1e-9).x.tolist()
    return slope, offset


def _logistic_loss(logits: Vector, wanted: npt.NDArray[Any]) -> tuple[float, Vector]:
    """The mean loss in nats, and its gradient by the logits."""
    return float((np.logaddexp(0.0, logits) - wanted * logits).mean()), (expit(logits) - wanted) / len(logits)


def telling(fit: Fit, features: Features, texts: Sequence[str], high: Bools, read_bytes: int) -> dict[str, Any]:
    """For quality.json: `statistics`, and the words most indicative of `high` and `low`.

    Effects are in logits: of a statistic, the change by one standard deviation; of a word, its weight x the standard
    deviation of its value in the bag over the training documents.
    """
    statistics = standardised(features.statistics, fit.centre, fit.spread) * fit.spread + fit.centre
    means = statistics[high].mean(axis=0), statistics[~high].mean(axis=0)
    rows = [
        {"feature": name, "effect": float(weight), "high_mean": float(high_mean), "low_mean": float(low_mean)}
        for name, weight, high_mean, low_mean in zip(STATISTICS, fit.statistic_weights, *means, strict=True)
    ]
    bag = features.bag
    counts = {side: np.bincount(bag[high == side].indices, minlength=bag.shape[1]) for side in (False, True)}
    variance = bag.power(2).mean(axis=0) - bag.mean(axis=0) ** 2
    effect = fit.bucket_weights * np.sqrt(np.maximum(variance, 0.0))
    effect[counts[False] + counts[True] < max(MIN_SHARE * len(high), 2)] = 0.0
    order = np.argsort(effect, kind="stable")
    chosen = {"high": order[::-1][:SHOWN], "low": order[:SHOWN]}
    names = _words_in(np.concatenate(list(chosen.values())), texts, read_bytes, bag.shape[1].bit_length() - 1)
    shares = {side: count / max(int((high == side).sum()), 1) for side, count in counts.items()}
    words = {
        side: [
            {
                "words": names[bucket],
                "effect": float(effect[bucket]),
                "high_share": float(shares[True][bucket]),
                "low_share": float(shares[False][bucket]),
            }
            for bucket in buckets.tolist()
            if bucket in names and effect[bucket] != 0 and (effect[bucket] > 0) == (side == "high")
        ]
        for side, buckets in chosen.items()
    }
    return {"statistics": sorted(rows, key=lambda row: -abs(row["effect"])), **words}


def _words_in(wanted: npt.NDArray[np.int64], texts: Sequence[str], read_bytes: int, hash_bits: int) -> dict[int, str]:
    """The most frequent words of the searched texts in each bucket."""
    seen: dict[int, Counter[str]] = {}
    for number in np.unique(np.linspace(0, len(texts) - 1, min(SEARCHED, len(texts))).astype(np.int64)).tolist():
        text = prefix(texts[number], read_bytes)
        words, spans = folded_words(text)
        buckets = buckets_of(words, hash_bits)
        for place in np.flatnonzero(np.isin(buckets, wanted)).tolist():
            first = place % len(words)
            last = first + (place >= len(words))
            pieces = [text[start:end].lower() for start, end in spans[first : last + 1].tolist()]
            seen.setdefault(int(buckets[place]), Counter())[" ".join(pieces)] += 1
    # Of words equally frequent the first by the alphabet.
    return {bucket: min(words.items(), key=lambda item: (-item[1], item[0]))[0] for bucket, words in seen.items()}
