"""Train and evaluate the classifier, score documents, decide. Documents are scored by tasks (task.py).

Writes quality.json (for the report) and quality/ (the model). Independent of the order of documents and tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from bessemer.corpus.dedup.verdicts import identity_of, load_arrays, packed, rows_of, save_arrays
from bessemer.corpus.engine import check_stop, require
from bessemer.corpus.quality import scores as scoring
from bessemer.corpus.quality.features import extract
from bessemer.corpus.quality.fit import fit, platt, telling
from bessemer.corpus.quality.model import Classifier, LinearModel, model_sha256, open_model
from bessemer.corpus.quality.sample import CALIBRATE, TEST, TRAIN, Labelled, Tables, draw, example_files, keys
from bessemer.corpus.quality.scores import Bools, Names, Scores
from bessemer.errors import InputError
from bessemer.hashing import sampled_sha256
from bessemer.recipe import Quality
from bessemer.recipe.corpus import band_part
from bessemer.run import STAGE_FILE, read_json, write_json

if TYPE_CHECKING:
    import pyarrow as pa

FILE, FOLDER = "quality.json", "quality"
SCORED_COLUMNS = ("identity", "source", "text")
ARRAYS = ("identities", "scores", "stays", "band")
VERSION = 1  # of quality.json
EXAMPLES = 3  # documents shown for each twentieth of the scores, drawn by the hash of their identity
EXCERPT_CHARACTERS = 400


@dataclass(frozen=True)
class QualityVerdicts:
    """What became of each document; rows are sorted by identity. About 25 bytes a document."""

    identities: Names  # 16-byte strings (dtype S16)
    scores: Scores  # the probability of being high, were there as many high documents as low ones
    stays: Bools  # false: rejected as low_quality
    band: npt.NDArray[np.int8]  # with use = "weight" the band of quality within the source, 0 the lowest; else -1
    limit: str  # what a rejected document did not reach, in words

    def rows(self, identities: list[str]) -> npt.NDArray[np.int64]:
        """Rows of documents by their identity in hexadecimal; every one of them was scored."""
        return rows_of(self.identities, identities)

    def detail(self, row: int) -> str:
        """Why a document was rejected, for rejected/."""
        return f"score {self.scores[row]:.6f}; {self.limit}"

    def save(self, folder: Path) -> None:
        """Write the arrays; the receipt of the folder has the limit."""
        save_arrays(folder, self, ARRAYS)

    @classmethod
    def load(cls, folder: Path) -> QualityVerdicts:
        """The verdicts of a finished step, mapped into memory."""
        identities, scores, stays, band = load_arrays(folder, ARRAYS)
        return cls(identities, scores, stays, band, read_json(folder / STAGE_FILE)["limit"])


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


def decide(
    settings: Quality,
    sources: Sequence[str],
    learned: dict[str, Any],
    tables: Iterable[TableScores],
    started: float,
    folder: Path,
) -> QualityVerdicts:
    """Decide by the scores of all documents; writes `folder`/quality.json. learned: as `learn` returned it; started: when scoring
    began (`perf_counter`). Raises BessemerError for a document that comes twice."""
    names = tuple(sorted(sources))
    scored = _merged(names, tables)
    judged_sources = settings.sources or [name for name in names if name not in settings.high]
    judged = np.isin(scored.source, [names.index(name) for name in judged_sources])
    keep, limit = scoring.stays(settings, scored.scores, scored.identities, judged)
    band = np.full(len(scored.scores), -1, dtype=np.int8)
    if settings.use == "weight":
        band = scoring.bands(scored.scores, scored.identities, scored.source, judged, len(settings.band_weights))
    histograms = {name: scoring.histogram(scored.scores[scored.source == place]) for place, name in enumerate(names)}
    content = {
        "version": VERSION,
        **learned["report"],
        "scores": histograms,
        "use": _used(settings, names, scored, judged, keep, band, limit),
        "examples": scored.examples,
        "seconds": {**learned["seconds"], "score": round(perf_counter() - started, 3)},
    }
    write_json(folder / FILE, content)
    return QualityVerdicts(scored.identities, scored.scores, keep, band, limit)


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


@dataclass(frozen=True)
class TableScores:
    """Scores of some documents, and the documents to show of each bin of the scores."""

    identities: Names
    scores: Scores
    source: npt.NDArray[np.int16]  # place of the source among all of them
    examples: dict[
        int, list[tuple[int, str, int, float, str]]
    ]  # key, identity, source, score, excerpt; the first by key


@dataclass(frozen=True)
class _Scored:
    """Scores of all documents, sorted by identity, and the documents to show, by score."""

    identities: Names
    scores: Scores
    source: npt.NDArray[np.int16]
    examples: list[dict[str, Any]]


def score_table(model: Classifier, sources: Sequence[str], table: pa.Table, seed: int) -> TableScores:
    """Score the documents of a table (SCORED_COLUMNS)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names, shown = tuple(sorted(sources)), dict[int, list[tuple[int, str, int, float, str]]]()
    hexadecimal, texts = table["identity"].to_pylist(), table["text"].to_pylist()
    identities, scores = packed(hexadecimal), model.score(texts)
    source = pc.index_in(table["source"], pa.array(names, table["source"].type)).to_numpy().astype(np.int16)
    drawn, bins = keys(identities, "example", seed), scoring.bin_of(scores, scoring.HISTOGRAM_BINS)
    for number in np.unique(bins).tolist():
        rows = np.flatnonzero(bins == number)
        rows = rows[np.argsort(drawn[rows], kind="stable")][:EXAMPLES]
        shown[number] = [
            (int(drawn[row]), hexadecimal[row], int(source[row]), float(scores[row]), texts[row][:EXCERPT_CHARACTERS])
            for row in rows.tolist()
        ]
    return TableScores(identities, scores.astype(np.float32), source, shown)


def _merged(names: tuple[str, ...], tables: Iterable[TableScores]) -> _Scored:
    parts = [(np.zeros(0, dtype="S16"), np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int16))]
    shown: dict[int, list[tuple[int, str, int, float, str]]] = {}
    for table in tables:
        check_stop()
        parts.append((table.identities, table.scores, table.source))
        for number, new in table.examples.items():
            shown[number] = sorted([*shown.get(number, []), *new])[:EXAMPLES]
    identities = np.concatenate([part[0] for part in parts])
    order = np.argsort(identities, kind="stable")
    identities = identities[order]
    twice = identities[1:][identities[1:] == identities[:-1]]
    came = "".join(f"document {identity_of(name)} came twice to the quality classifier" for name in twice[:1])
    require(not len(twice), came)
    examples = [
        {"identity": identity, "source": names[place], "score": score, "excerpt": text}
        for _, identity, place, score, text in sorted(chain(*shown.values()), key=lambda row: (row[3], row[1]))
    ]
    scores_of, sources_of = (np.concatenate([part[column] for part in parts])[order] for column in (1, 2))
    return _Scored(identities, scores_of, sources_of, examples)


def _used(
    settings: Quality, names: tuple[str, ...], scored: _Scored, judged: Bools, keep: Bools, band: npt.NDArray[np.int8],
    limit: str,
) -> dict[str, Any]:  # fmt: skip
    """What the scores decided, by source; with bands what each is mixed by."""
    scores, rows = scored.scores, []
    for number, name in enumerate(names):
        here = scored.source == number
        row: dict[str, Any] = {
            "source": name,
            "judged": bool(judged[here].any()),
            "documents": int(here.sum()),
            "kept": int((here & keep).sum()),
            "mean_score": float(scores[here].mean()) if here.any() else None,
        }
        if settings.use == "weight" and row["judged"]:
            row["bands"] = [
                {
                    "name": band_part(name, place),
                    "documents": int((here & (band == place)).sum()),
                    "from_score": float(scores[here & (band == place)].min(initial=1.0)),
                    "weight": weight,
                }
                for place, weight in enumerate(settings.band_weights)
            ]
        rows.append(row)
    used: dict[str, Any] = {"kind": settings.use, "limit": limit, "sources": rows}
    if settings.use == "filter":
        rejected, kept = scores[judged & ~keep], scores[judged & keep]
        used["threshold"] = 0.5 if settings.threshold is None else settings.threshold
        if settings.keep_share is not None:
            used["threshold"] = float(kept.min()) if len(kept) else float(rejected.max(initial=0.0))
    if settings.use == "pareto":
        used["alpha"] = settings.alpha
        used["expected_kept"] = float(scoring.pareto_share(scores[judged].astype(np.float64), settings.alpha).sum())
    return used
