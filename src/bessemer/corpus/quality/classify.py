"""Train and evaluate the classifier, and score documents. Tasks score all of them, and decide (decide.py).

Writes quality/ (the model). Independent of the order of documents and tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from scipy.special import expit

from bessemer.corpus.dedup.verdicts import packed
from bessemer.corpus.quality import scores as scoring
from bessemer.corpus.quality.features import extract
from bessemer.corpus.quality.fit import fit, platt, telling
from bessemer.corpus.quality.model import Classifier, LinearModel, model_sha256, open_model
from bessemer.corpus.quality.sample import CALIBRATE, TEST, TRAIN, Labelled, Tables, draw, example_files, keys
from bessemer.corpus.quality.scores import Names, Scores
from bessemer.errors import InputError
from bessemer.hashing import sampled_sha256
from bessemer.recipe import Quality

if TYPE_CHECKING:
    import pyarrow as pa

FILE, FOLDER = "quality.json", "quality"
SCORED_COLUMNS = ("identity", "text")
VERSION = 1  # of quality.json
EXAMPLES = 3  # documents shown for each twentieth of the scores, drawn by the hash of their identity
EXCERPT_CHARACTERS = 400


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


def learned_classifier(settings: Quality, folder: Path) -> Classifier:
    """The classifier that `learn` left in `folder`, or the one that is named."""
    return LinearModel.load(folder / FOLDER) if settings.model is None else open_model(settings)


def train(settings: Quality, labelled: Labelled) -> tuple[LinearModel, dict[str, Any]]:
    """Fit and calibrate a linear model on the training and calibration documents; returns it and its part of quality.json."""
    texts, high = labelled.of(TRAIN)
    features = extract(texts, settings.read_bytes, settings.hash_bits)
    found = fit(features, high, settings.l2, settings.iterations, settings.statistics_scale)
    plain = LinearModel(
        settings.read_bytes, settings.hash_bits, found.centre, found.spread, found.bias, found.statistic_weights,
        found.bucket_weights.astype(np.float32),
    )  # fmt: skip
    held_texts, held_high = labelled.of(CALIBRATE)
    slope, offset = platt(plain.logits(held_texts), held_high)
    model = LinearModel(**{**vars(plain), "slope": slope, "offset": offset})
    test_texts, test_high = labelled.of(TEST)
    return model, {
        "fit": {
            "loss": found.loss,
            "accuracy": float(((plain.logits(texts) > 0) == high).mean()),
            "steps": found.steps,
            "largest_gradient": found.largest_gradient,
            "slope": slope,
            "offset": offset,
            "calibration_error_before": scoring.held_out(expit(plain.logits(test_texts)), test_high)[
                "calibration_error"
            ],
        },
        "telling": telling(found, features, texts, high, settings.read_bytes),
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
        train_size, calibrate_size, test_size = np.bincount(labelled.part, minlength=3).tolist()
        texts, high = labelled.of(TEST)
        report["labelled"] = {
            "high": {entry: labelled.there[entry] for entry in settings.high},
            "low": {entry: labelled.there[entry] for entry in settings.low},
            "train": train_size,
            "calibrate": calibrate_size,
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
