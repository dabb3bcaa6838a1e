"""Training and evaluation of the quality classifier. The tasks in decide.py score all documents with it.

The model is written to quality/. Results do not depend on the order of documents and tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from bessemer.common.errors import InputError
from bessemer.common.hashing import sampled_sha256
from bessemer.corpus.filters.quality.model import Classifier, LinearModel, Vector, extract, model_sha256, open_model
from bessemer.corpus.filters.quality.sample import Labelled, Labels, Tables, draw, example_files
from bessemer.recipe import Quality
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import copy_folder

FILE, FOLDER = "quality.json", "quality"
L2, STEPS = 1e-6, 300  # weight of L2 regularisation relative to the mean loss; maximum number of L-BFGS steps
FOLDS = 3  # cross-validation folds for the calibration
EXCERPT_CHARACTERS = 400


def inputs(settings: Quality, sources: Sequence[str]) -> list[Any]:
    """Return the inputs of the scores besides `[corpus]` and its documents, to compute the digest of the corpus stage.

    They are the hash of the model that the recipe names, and a list of (name, size, hash) of the files of each entry of
    corpus.quality.high and .low that is not a source. Raises InputError for an entry that is neither a source nor a
    path with examples.
    """
    facts: list[Any] = [model_sha256(settings)]
    for entry in (*settings.high, *settings.low):
        if entry not in sources:
            facts.append([(path.name, path.stat().st_size, sampled_sha256(path)) for path in example_files(entry)])
    return facts


def learn(settings: Quality, sources: Sequence[str], tables: Tables, folder: Path) -> dict[str, Any]:
    """Train the classifier and write it to `folder`/quality/, or evaluate the one that the recipe names.

    Args:
        settings: The `[corpus.quality]` table of the recipe.
        sources: Names of the sources of the corpus.
        tables: Function of columns and sources that yields tables of the clean documents of at least these sources.
        folder: Folder for the classifier.

    Returns:
        The entries of quality.json on the model, on its labelled documents, and on its metrics on the test documents.

    Raises:
        InputError: The examples or the model are unusable.
    """
    names = tuple(sorted(sources))
    for name in settings.sources:
        if name not in names:
            raise InputError(f"corpus.quality.sources: no source is named {name!r}; there are: {', '.join(names)}")
    labelled = draw(settings, names, tables) if settings.high else None
    if settings.model is not None:
        model = open_model(settings)
    else:
        assert labelled is not None, "the recipe demands high and low, or a model"
        model = train(settings, labelled)
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        model.save(folder / FOLDER)
    report: dict[str, Any] = {"model": {"kind": settings.kind, "read_bytes": model.read_bytes}}
    if labelled is not None:
        # A model that was trained elsewhere may have seen these documents, which makes its metrics too good.
        texts, high = labelled.subset(is_test=True)
        sizes = {"train": int((~labelled.is_test).sum()), "test": len(texts)}
        sides = {"high": settings.high, "low": settings.low}
        report["labelled"] = {
            side: {entry: labelled.num_documents[entry] for entry in sides[side]} for side in sides
        } | sizes
        report["labelled"]["duplicates_left_out"] = labelled.duplicates
        report["held_out"] = held_out(model.score(texts), high)
    return report


@lru_cache(maxsize=1)
def learned_classifier(settings: Quality, folder: AnyPath) -> Classifier:
    """Return the classifier that `learn` wrote to `folder`, or the one that the recipe names."""
    if settings.model is not None:
        return open_model(settings)
    with TemporaryDirectory(prefix="bessemer-") as scratch:
        copy_folder(folder / FOLDER, Path(scratch))
        return LinearModel.load(Path(scratch))


def train(settings: Quality, labelled: Labelled) -> LinearModel:
    """Fit a linear model to the training documents of a labelled sample."""
    texts, high = labelled.subset(is_test=False)
    bias, weights = fit(extract(texts, settings.read_bytes, settings.hash_bits), high)
    return LinearModel(settings.read_bytes, settings.hash_bits, bias, weights.astype(np.float32))


def fit(rows: csr_array, high: Labels) -> tuple[float, Vector]:
    """Fit a logistic regression to rows of features. `high` is True for documents of high quality.

    Returns the bias and the weights, calibrated by Platt's sigmoid on cross-validated logits.
    """
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    used = np.unique(rows.indices)  # all other weights are 0
    linear = LogisticRegression(C=1 / (L2 * len(high)), tol=1e-6, max_iter=STEPS)
    calibrated = CalibratedClassifierCV(linear, method="sigmoid", cv=FOLDS, ensemble=False)
    # The summation order of BLAS depends on the number of threads.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = calibrated.fit(rows[:, used], high).calibrated_classifiers_[0]
    sigmoid, linear = fitted.calibrators[0], fitted.estimator
    weights = np.zeros(rows.shape[1])
    weights[used] = -sigmoid.a_ * linear.coef_[0]  # the sigmoid is 1 / (1 + exp(a x + b))
    return float(-sigmoid.a_ * linear.intercept_[0] - sigmoid.b_), weights


def held_out(scores: Vector, high: Labels) -> dict[str, Any]:
    """Return metrics by name for quality.json, from the classifier's scores and the labels of the test documents.

    `accuracy`, `f1`, `precision` and `recall` treat a score of at least 0.5 as high quality. Also has `roc_auc`,
    `log_loss` and `brier`, and the numbers of all `documents` and of those with label `high`.
    """
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
