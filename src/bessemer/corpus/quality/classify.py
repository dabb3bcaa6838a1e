"""Train and evaluate the classifier. Tasks score all documents with it, and decide (decide.py).

Writes quality/ (the model). Independent of the order of documents and tables.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from bessemer.corpus.quality import scores as scoring
from bessemer.corpus.quality.features import buckets_of, extract, prefix
from bessemer.corpus.quality.model import Classifier, LinearModel, model_sha256, open_model
from bessemer.corpus.quality.sample import Labelled, Tables, draw, example_files
from bessemer.corpus.quality.scores import Bools, Vector
from bessemer.corpus.text.ngrams import folded_words
from bessemer.errors import InputError
from bessemer.hashing import sampled_sha256
from bessemer.recipe import Quality
from bessemer.storage import Place
from bessemer.store_path import copy_folder

FILE, FOLDER = "quality.json", "quality"
VERSION = 2  # of quality.json
L2, STEPS = 1e-6, 300  # weight of the squared weights next to the mean loss; steps of L-BFGS at most
FOLDS = 3  # of the training documents, for the calibration
EXCERPT_CHARACTERS = 400
SHOWN = 30  # words and pairs of words listed for each side
MIN_SHARE = 0.005  # buckets in fewer of the training documents are chance, however large their weight
SEARCHED = 4000  # documents searched for the words behind the buckets


def inputs(settings: Quality, sources: Sequence[str]) -> list[Any]:
    """Return what the scores depend on besides [corpus] and its documents, for the stage's digest.

    It is the named model and the files of examples. Raises InputError for an entry that is neither a source nor a path
    with examples.
    """
    found: list[Any] = [model_sha256(settings)]
    for entry in (*settings.high, *settings.low):
        if entry not in sources:
            found.append([(path.name, path.stat().st_size, sampled_sha256(path)) for path in example_files(entry)])
    return found


def learn(settings: Quality, sources: Sequence[str], tables: Tables, folder: Path) -> dict[str, Any]:
    """Train the classifier into `folder`/quality/, or open the one that is named; return its part of quality.json, and seconds.

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
    report: dict[str, Any] = {}
    if settings.model is not None:
        model = open_model(settings)
    else:
        assert labelled is not None, "the recipe demands high and low, or a model"
        model, report = train(settings, labelled)
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        model.save(folder / FOLDER)
    if labelled is not None:
        # A model that was trained elsewhere may have seen these; then the figures flatter it.
        texts, high = labelled.of(is_test=True)
        sizes = {
            "train": int((~labelled.is_test).sum()),
            "test": len(texts),
            "duplicates_left_out": labelled.duplicates,
        }
        sides = {"high": settings.high, "low": settings.low}
        report["labelled"] = {side: {entry: labelled.there[entry] for entry in sides[side]} for side in sides} | sizes
        report["held_out"] = scoring.held_out(model.score(texts), high)
    times.append(perf_counter())
    seconds = dict(zip(("sample", "train"), np.diff(times).round(3).tolist(), strict=True))
    return {"report": {"model": model.describe(), **report}, "seconds": seconds}


@lru_cache(maxsize=1)
def learned_classifier(settings: Quality, folder: Place) -> Classifier:
    """Return the classifier that `learn` left in `folder`, or the one that is named."""
    if settings.model is not None:
        return open_model(settings)
    with TemporaryDirectory(prefix="bessemer-") as scratch:
        copy_folder(folder / FOLDER, Path(scratch))
        return LinearModel.load(Path(scratch))


def train(settings: Quality, labelled: Labelled) -> tuple[LinearModel, dict[str, Any]]:
    """Fit a linear model to the training documents; return it and its part of quality.json."""
    texts, high = labelled.of(is_test=False)
    rows = extract(texts, settings.read_bytes, settings.hash_bits)
    bias, weights = fit(rows, high)
    model = LinearModel(settings.read_bytes, settings.hash_bits, bias, weights.astype(np.float32))
    return model, {"telling": telling(weights, rows, texts, high, settings)}


def fit(rows: csr_array, high: Bools) -> tuple[float, Vector]:
    """Return bias and weights of a logistic regression, calibrated by Platt's sigmoid on cross-validated logits."""
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    used = np.unique(rows.indices)  # the weights of the others stay 0
    linear = LogisticRegression(C=1 / (L2 * len(high)), tol=1e-6, max_iter=STEPS)
    calibrated = CalibratedClassifierCV(linear, method="sigmoid", cv=FOLDS, ensemble=False)
    # BLAS sums in another order with another number of threads.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = calibrated.fit(rows[:, used], high).calibrated_classifiers_[0]
    sigmoid, linear = fitted.calibrators[0], fitted.estimator
    weights = np.zeros(rows.shape[1])
    weights[used] = -sigmoid.a_ * linear.coef_[0]  # the sigmoid is 1 / (1 + exp(a x + b))
    return float(-sigmoid.a_ * linear.intercept_[0] - sigmoid.b_), weights


def telling(weights: Vector, rows: csr_array, texts: Sequence[str], high: Bools, settings: Quality) -> dict[str, Any]:
    """Return the words most indicative of `high` and `low`, for quality.json.

    The effect of a word is its weight x the standard deviation of its value over the training documents, in logits.
    """
    num_buckets = 1 << settings.hash_bits
    bags, weights = rows[:, :num_buckets], weights[:num_buckets]
    counts = {side: np.bincount(bags[high == side].indices, minlength=num_buckets) for side in (False, True)}
    effect = weights * np.sqrt(np.maximum(bags.power(2).mean(axis=0) - bags.mean(axis=0) ** 2, 0.0))
    effect[counts[False] + counts[True] < max(MIN_SHARE * len(high), 2)] = 0.0
    order = np.argsort(effect, kind="stable")
    names = _words_in(np.r_[order[:SHOWN], order[-SHOWN:]], texts, settings.read_bytes, settings.hash_bits)
    shares = {side: count / max(int((high == side).sum()), 1) for side, count in counts.items()}

    def row(bucket: int) -> dict[str, Any]:
        sides = {"high_share": float(shares[True][bucket]), "low_share": float(shares[False][bucket])}
        return {"words": names[bucket], "effect": float(effect[bucket]), **sides}

    chosen = [bucket for bucket in order.tolist() if bucket in names]
    return {
        "high": [row(bucket) for bucket in reversed(chosen) if effect[bucket] > 0],
        "low": [row(bucket) for bucket in chosen if effect[bucket] < 0],
    }


def _words_in(wanted: npt.NDArray[np.int64], texts: Sequence[str], read_bytes: int, hash_bits: int) -> dict[int, str]:
    """Return the most frequent words of the searched texts in each bucket."""
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
