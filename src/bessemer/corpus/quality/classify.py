"""Train and evaluate the classifier, score every document, decide.

Writes quality.json (for the report) and quality/ (the model). Independent of the order of documents and tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from bessemer.corpus.dedup import packed
from bessemer.corpus.dedup.verdicts import identity_of
from bessemer.corpus.engine import check_stop
from bessemer.corpus.quality import scores as scoring
from bessemer.corpus.quality.features import extract
from bessemer.corpus.quality.fit import fit, platt, telling
from bessemer.corpus.quality.model import Classifier, LinearModel, fingerprint, open_model
from bessemer.corpus.quality.sample import CALIBRATE, TEST, TRAIN, Labelled, Tables, draw, example_files, keys
from bessemer.errors import BessemerError, InputError
from bessemer.recipe import Quality
from bessemer.recipe.corpus import band_part
from bessemer.run import write_json

FILE, FOLDER = "quality.json", "quality"

VERSION = 1
"""Of quality.json."""

EXAMPLES = 3
"""Documents shown for each twentieth of the scores, drawn by the hash of their identity."""

EXCERPT_CHARACTERS = 400


@dataclass(frozen=True)
class QualityVerdicts:
    """What became of each document; rows are sorted by identity. About 25 bytes a document."""

    identities: npt.NDArray[np.bytes_]
    """16-byte strings (dtype S16)."""
    scores: npt.NDArray[np.float32]
    """The probability of being high, were there as many high documents as low ones."""
    stays: npt.NDArray[np.bool_]
    """False: rejected as low_quality."""
    band: npt.NDArray[np.int8]
    """With use = "weight" the band of quality within the source, 0 the lowest; else -1."""
    limit: str
    """What a rejected document did not reach, in words."""

    def rows(self, identities: list[str]) -> npt.NDArray[np.int64]:
        """Rows of documents by their identity in hexadecimal; every one of them was scored."""
        found: npt.NDArray[np.int64] = np.searchsorted(self.identities, packed(identities))
        return found

    def detail(self, row: int) -> str:
        """Why a document was rejected, for rejected/."""
        return f"score {self.scores[row]:.6f}; {self.limit}"


def inputs(settings: Quality, sources: Sequence[str]) -> list[Any]:
    """What the scores depend on besides [corpus] and its documents, for the stage's digest: the named model and the
    files of examples. Raises InputError for an entry that is neither a source nor a path with examples."""
    found: list[Any] = [fingerprint(settings)]
    for entry in (*settings.high, *settings.low):
        if entry not in sources:
            stats = [(path.name, path.stat()) for path in example_files(entry)]
            found.append([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return found


def classify(settings: Quality, sources: Sequence[str], tables: Tables, folder: Path) -> QualityVerdicts:
    """Score the documents of a corpus and decide; writes `folder`/quality.json and `folder`/quality/.

    `tables` yields the clean documents and is called repeatedly. Raises InputError for unusable examples or model,
    Stopped.
    """
    started = perf_counter()
    names = tuple(sorted(sources))
    for name in settings.sources:
        if name not in names:
            raise InputError(f"corpus.quality.sources: no source is named {name!r}; there are: {', '.join(names)}")
    labelled = draw(settings, names, tables) if settings.high else None
    drawn = perf_counter()
    model, report = _classifier(settings, labelled, folder)
    trained = perf_counter()
    pool = _score(model, names, tables, settings.seed)
    identities, scores, source = pool.joined()
    judged = np.isin(source, [names.index(name) for name in _judged(settings, names)])
    keep, limit = scoring.stays(settings, scores, identities, judged)
    band = np.full(len(scores), -1, dtype=np.int8)
    if settings.use == "weight":
        band = scoring.bands(scores, identities, source, judged, len(settings.band_weights))
    write_json(
        folder / FILE,
        {
            "version": VERSION,
            "model": model.describe(),
            **report,
            "scores": {name: scoring.histogram(scores[source == number]) for number, name in enumerate(names)},
            "use": _used(settings, names, source, scores, judged, keep, band, limit),
            "examples": pool.shown(names),
            "seconds": {
                "sample": round(drawn - started, 3),
                "train": round(trained - drawn, 3),
                "score": round(perf_counter() - trained, 3),
            },
        },
    )
    return QualityVerdicts(identities, scores, keep, band, limit)


def train(settings: Quality, labelled: Labelled) -> tuple[LinearModel, dict[str, Any]]:
    """Fit and calibrate a linear model on the training and calibration documents; returns it and its part of quality.json."""
    texts, high = labelled.part_texts(TRAIN), labelled.high[labelled.rows(TRAIN)]
    features = extract(texts, settings.read_bytes, settings.hash_bits)
    found = fit(features, high, settings.l2, settings.iterations, settings.statistics_scale)
    plain = LinearModel(
        settings.read_bytes, settings.hash_bits, found.centre, found.spread, found.bias, found.statistic_weights,
        found.bucket_weights.astype(np.float32),
    )  # fmt: skip
    slope, offset = platt(plain.logits(labelled.part_texts(CALIBRATE)), labelled.high[labelled.rows(CALIBRATE)])
    model = LinearModel(**{**vars(plain), "slope": slope, "offset": offset})
    raw = scoring.held_out(expit(plain.logits(labelled.part_texts(TEST))), labelled.high[labelled.rows(TEST)])
    return model, {
        "fit": {
            "loss": found.loss,
            "accuracy": float(((plain.logits(texts) > 0) == high).mean()),
            "steps": found.steps,
            "largest_gradient": found.largest_gradient,
            "slope": slope,
            "offset": offset,
            "calibration_error_before": raw["calibration_error"],
        },
        "telling": telling(found, features, texts, high, settings.read_bytes),
    }


def _judged(settings: Quality, names: tuple[str, ...]) -> list[str]:
    """The sources whose documents `use` decides about."""
    return list(settings.sources) or [name for name in names if name not in settings.high]


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
        rows = labelled.rows(TEST)
        report["labelled"] = {
            "high": {entry: labelled.there[entry] for entry in settings.high},
            "low": {entry: labelled.there[entry] for entry in settings.low},
            "train": int((labelled.part == TRAIN).sum()),
            "calibrate": int((labelled.part == CALIBRATE).sum()),
            "test": len(rows),
            "duplicates_left_out": labelled.duplicates,
        }
        report["held_out"] = scoring.held_out(model.score(labelled.part_texts(TEST)), labelled.high[rows])
    return model, report


@dataclass
class _Pool:
    """Scores as they come, and the documents to show."""

    identities: list[npt.NDArray[np.bytes_]] = field(default_factory=lambda: [np.zeros(0, dtype="S16")])
    scores: list[npt.NDArray[np.float32]] = field(default_factory=lambda: [np.zeros(0, dtype=np.float32)])
    sources: list[npt.NDArray[np.int16]] = field(default_factory=lambda: [np.zeros(0, dtype=np.int16)])
    examples: dict[int, list[tuple[int, str, int, float, str]]] = field(default_factory=dict)
    """By twentieth of the score the documents of the smallest keys: (key, identity, source, score, excerpt)."""

    def add(
        self,
        names: list[str],
        scores: npt.NDArray[np.float64],
        source: npt.NDArray[np.int16],
        texts: list[str],
        seed: int,
    ) -> None:
        """A table's documents."""
        self.identities.append(packed(names))
        self.scores.append(scores.astype(np.float32))
        self.sources.append(source)
        drawn = keys(self.identities[-1], "example", seed)
        bins = scoring.bin_of(scores, scoring.HISTOGRAM_BINS)
        for number in np.unique(bins).tolist():
            rows = np.flatnonzero(bins == number)
            rows = rows[np.argsort(drawn[rows], kind="stable")][:EXAMPLES]
            new = [
                (int(drawn[row]), names[row], int(source[row]), float(scores[row]), texts[row][:EXCERPT_CHARACTERS])
                for row in rows.tolist()
            ]
            self.examples[number] = sorted([*self.examples.get(number, []), *new])[:EXAMPLES]

    def joined(self) -> tuple[npt.NDArray[np.bytes_], npt.NDArray[np.float32], npt.NDArray[np.int16]]:
        """All of them, sorted by identity. Raises BessemerError when one comes twice."""
        identities = np.concatenate(self.identities)
        order = np.argsort(identities, kind="stable")
        identities = identities[order]
        twice = identities[1:][identities[1:] == identities[:-1]]
        if len(twice):
            name = identity_of(twice[0])
            raise BessemerError(f"corpus: document {name} came twice to the quality classifier; please report this")
        return identities, np.concatenate(self.scores)[order], np.concatenate(self.sources)[order]

    def shown(self, names: tuple[str, ...]) -> list[dict[str, Any]]:
        """The documents to show, by score."""
        rows = [row for rows in self.examples.values() for row in rows]
        return [
            {"identity": identity, "source": names[source], "score": score, "excerpt": text}
            for _, identity, source, score, text in sorted(rows, key=lambda row: (row[3], row[1]))
        ]


def _score(model: Classifier, names: tuple[str, ...], tables: Tables, seed: int) -> _Pool:
    import pyarrow as pa
    import pyarrow.compute as pc

    pool = _Pool()
    for table in tables(("identity", "source", "text")):
        check_stop()
        if table.num_rows:
            texts = table["text"].to_pylist()
            source = pc.index_in(table["source"], pa.array(names, table["source"].type)).to_numpy().astype(np.int16)
            pool.add(table["identity"].to_pylist(), model.score(texts), source, texts, seed)
    return pool


def _used(
    settings: Quality, names: tuple[str, ...], source: npt.NDArray[np.int16], scores: npt.NDArray[np.float32],
    judged: npt.NDArray[np.bool_], keep: npt.NDArray[np.bool_], band: npt.NDArray[np.int8], limit: str,
) -> dict[str, Any]:  # fmt: skip
    """What the scores decided, by source; with bands what each is mixed by."""
    rows = []
    for number, name in enumerate(names):
        here = source == number
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
    said: dict[str, Any] = {"kind": settings.use, "limit": limit, "sources": rows}
    if settings.use == "filter":
        rejected = scores[judged & ~keep]
        kept = scores[judged & keep]
        said["threshold"] = 0.5 if settings.threshold is None else settings.threshold
        if settings.keep_share is not None:
            said["threshold"] = float(kept.min()) if len(kept) else float(rejected.max(initial=0.0))
    if settings.use == "pareto":
        said["alpha"] = settings.alpha
        said["expected_kept"] = float(scoring.pareto_share(scores[judged].astype(np.float64), settings.alpha).sum())
    return said
