"""Train and evaluate the classifier, and score documents. Tasks score all of them, and decide (decide.py).

Writes quality/ (the model). Independent of the order of documents and tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.optimize import OptimizeResult, minimize
from scipy.sparse import csr_array, hstack
from scipy.special import expit

from bessemer.corpus.dedup.verdicts import packed
from bessemer.corpus.quality import scores as scoring
from bessemer.corpus.quality.features import STATISTICS, Features, buckets_of, extract, prefix, standardised
from bessemer.corpus.quality.model import Classifier, LinearModel, model_sha256, open_model
from bessemer.corpus.quality.sample import Labelled, Tables, draw, example_files, keys
from bessemer.corpus.quality.scores import Bools, Names, Scores, Vector
from bessemer.corpus.text.ngrams import folded_words
from bessemer.errors import InputError
from bessemer.hashing import sampled_sha256
from bessemer.recipe import Quality
from bessemer.storage import Place
from bessemer.store_path import copy_folder

FILE, FOLDER = "quality.json", "quality"
SCORED_COLUMNS = ("identity", "text")
VERSION = 1  # of quality.json
L2, STEPS = 1e-6, 300  # weight of the squared weights beside the mean loss; of L-BFGS at most
STATISTICS_SCALE = 0.03  # standard deviation of a statistic beside a bag of words of length 1: words decide
EXAMPLES = 3  # documents shown for each twentieth of the scores, drawn by the hash of their identity
EXCERPT_CHARACTERS = 400
SHOWN = 30  # words and pairs of words listed for each side
MIN_SHARE = 0.005  # buckets in fewer of the training documents are chance, however large their weight
SEARCHED = 4000  # documents searched for the words behind the buckets


def inputs(settings: Quality, sources: Sequence[str]) -> list[Any]:
    """What the scores depend on besides [corpus] and its documents, for the stage's digest: the named model and the
    files of examples. Raises InputError for an entry that is neither a source nor a path with examples."""
    found: list[Any] = [model_sha256(settings)]
    for entry in (*settings.high, *settings.low):
        if entry not in sources:
            found.append([(path.name, path.stat().st_size, sampled_sha256(path)) for path in example_files(entry)])
    return found


def learn(settings: Quality, sources: Sequence[str], tables: Tables, folder: Path) -> dict[str, Any]:
    """Train the classifier into `folder`/quality/, or open the one that is named: its part of quality.json, and the seconds.

    `tables` yields the clean documents of the labelled sources at least, and is called repeatedly. Raises InputError for unusable
    examples or model, Stopped.
    """
    times = [perf_counter()]
    names = tuple(sorted(sources))
    for name in settings.sources:
        if name not in names:
            raise InputError(f"corpus.quality.sources: no source is named {name!r}; there are: {', '.join(names)}")
    labelled = draw(settings, names, tables) if settings.high else None
    times.append(perf_counter())
    model, report = _classifier(settings, labelled, folder)
    times.append(perf_counter())
    seconds = dict(zip(("sample", "train"), np.diff(times).round(3).tolist(), strict=True))
    return {"report": {"model": model.describe(), **report}, "seconds": seconds}


@lru_cache(maxsize=1)
def learned_classifier(settings: Quality, folder: Place) -> Classifier:
    """The classifier that `learn` left in `folder`, or the one that is named."""
    if settings.model is not None:
        return open_model(settings)
    with TemporaryDirectory(prefix="bessemer-") as scratch:
        copy_folder(folder / FOLDER, Path(scratch))
        return LinearModel.load(Path(scratch))


def train(settings: Quality, labelled: Labelled) -> tuple[LinearModel, dict[str, Any]]:
    """Fit a linear model to the training documents; returns it and its part of quality.json."""
    texts, high = labelled.of(is_test=False)
    features = extract(texts, settings.read_bytes, settings.hash_bits)
    weights, descent = fit(features, high, L2, STEPS, STATISTICS_SCALE)
    narrow = {**weights, "bucket_weights": weights["bucket_weights"].astype(np.float32)}
    model = LinearModel(settings.read_bytes, settings.hash_bits, **narrow)
    return model, {
        "fit": {
            "loss": descent.pop("loss"),
            "accuracy": float(((model.logits(texts) > 0) == high).mean()),
            **descent,
        },
        "telling": telling(weights, features, texts, high, settings.read_bytes),
    }


def _classifier(settings: Quality, labelled: Labelled | None, folder: Path) -> tuple[Classifier, dict[str, Any]]:
    """The model, trained or loaded, and its figures on the documents it was tested on, where there are any."""
    report: dict[str, Any] = {}
    model: Classifier
    if settings.model is not None:
        model = open_model(settings)
    else:
        assert labelled is not None, "the recipe demands high and low, or a model"
        model, report = train(settings, labelled)
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        model.save(folder / FOLDER)
    if labelled is not None:
        # A model that was trained elsewhere may have seen these; then the figures flatter it.
        train_size, test_size = np.bincount(labelled.is_test, minlength=2).tolist()
        texts, high = labelled.of(is_test=True)
        report["labelled"] = {
            "high": {entry: labelled.there[entry] for entry in settings.high},
            "low": {entry: labelled.there[entry] for entry in settings.low},
            "train": train_size,
            "test": test_size,
            "duplicates_left_out": labelled.duplicates,
        }
        report["held_out"] = scoring.held_out(model.score(texts), high)
    return model, report


# of each bin of the scores the first by key: key, identity, source, score, excerpt
Examples: TypeAlias = "dict[int, list[tuple[int, str, str, float, str]]]"


@dataclass(frozen=True)
class TableScores:
    """Scores of some documents of one source, and the documents to show of each bin of the scores."""

    identities: Names  # 16-byte strings (dtype S16)
    scores: Scores  # the probability of being high, were there as many high documents as low ones
    examples: Examples


def score_table(model: Classifier, source: str, table: pa.Table, seed: int) -> TableScores:
    """Score the documents of a table (SCORED_COLUMNS) of one source."""
    shown: Examples = {}
    hexadecimal, texts = table["identity"].to_pylist(), table["text"].to_pylist()
    identities, scores = packed(hexadecimal), model.score(texts)
    drawn, bins = keys(identities, "example", seed), scoring.bin_of(scores, scoring.HISTOGRAM_BINS)
    for number in np.unique(bins).tolist():
        rows = np.flatnonzero(bins == number)
        rows = rows[np.argsort(drawn[rows], kind="stable")][:EXAMPLES]
        shown[number] = [
            (int(drawn[row]), hexadecimal[row], source, float(scores[row]), texts[row][:EXCERPT_CHARACTERS])
            for row in rows.tolist()
        ]
    return TableScores(identities, scores.astype(np.float32), shown)


# --- Logistic regression by SciPy's L-BFGS, and its most important features


def minimise(
    objective: Callable[[Vector], tuple[float, Vector]], start: Vector, steps: int, tolerance: float = 1e-6
) -> OptimizeResult:
    """The minimum of a function that returns value and gradient, to a largest entry of the gradient of `tolerance`."""
    options = {"maxiter": steps, "maxfun": 20 * steps, "gtol": tolerance, "ftol": 0.0, "maxls": 60}
    return minimize(objective, start, jac=True, method="L-BFGS-B", options=options)


def fit(
    features: Features, high: Bools, l2: float, steps: int, statistics_scale: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Minimise mean logistic loss + l2 / 2 x squared length of the weights (the bias is free).

    Statistics are standardised over these documents and multiplied by `statistics_scale`, or sixteen numbers of size 1
    would outweigh a bag of words of length 1. Returns the values of a `LinearModel`, whose weights include the scale, and of the
    descent: `loss` (mean logistic loss of the training documents in nats, without the penalty), `steps`, `largest_gradient`.
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
    weights = {
        "centre": centre, "spread": spread, "bias": float(found.x[0]),
        "statistic_weights": statistics_scale * found.x[1:head], "bucket_weights": bucket_weights,
    }  # fmt: skip
    loss, largest = _logistic_loss(matrix @ found.x, high)[0], float(np.abs(found.jac).max())
    return weights, {"loss": loss, "steps": int(found.nit), "largest_gradient": largest}


def _logistic_loss(logits: Vector, wanted: npt.NDArray[Any]) -> tuple[float, Vector]:
    """The mean loss in nats, and its gradient by the logits."""
    return float((np.logaddexp(0.0, logits) - wanted * logits).mean()), (expit(logits) - wanted) / len(logits)


def telling(
    weights: dict[str, Any], features: Features, texts: Sequence[str], high: Bools, read_bytes: int
) -> dict[str, Any]:
    """For quality.json: `statistics`, and the words most indicative of `high` and `low`.

    Effects are in logits: of a statistic, the change by one standard deviation; of a word, its weight x the standard
    deviation of its value in the bag over the training documents.
    """
    centre, spread = weights["centre"], weights["spread"]
    statistics = standardised(features.statistics, centre, spread) * spread + centre
    means = statistics[high].mean(axis=0), statistics[~high].mean(axis=0)
    rows = [
        {"feature": name, "effect": float(weight), "high_mean": float(high_mean), "low_mean": float(low_mean)}
        for name, weight, high_mean, low_mean in zip(STATISTICS, weights["statistic_weights"], *means, strict=True)
    ]
    bag = features.bag
    counts = {side: np.bincount(bag[high == side].indices, minlength=bag.shape[1]) for side in (False, True)}
    variance = bag.power(2).mean(axis=0) - bag.mean(axis=0) ** 2
    effect = weights["bucket_weights"] * np.sqrt(np.maximum(variance, 0.0))
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
