"""The tasks of the quality classifier, each over the documents of one bucket, which has one source."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.corpus import engine
from bessemer.corpus.dedup.exchange import load_array
from bessemer.corpus.dedup.verdicts import identity_of
from bessemer.corpus.quality import scores as scoring
from bessemer.corpus.quality.classify import SCORED_COLUMNS, Examples, TableScores, learned_classifier, score_table
from bessemer.corpus.quality.cuts import DIGITS, RankQuery, digit_counts, keys_of
from bessemer.corpus.quality.model import Classifier
from bessemer.corpus.work import CorpusTask
from bessemer.hashing import digest
from bessemer.recipe import Quality

if TYPE_CHECKING:
    import pyarrow as pa

EXAMPLES, DIGIT_COUNTS = "examples.pickle", "digits.npy"


@dataclass(frozen=True)
class QualityTask(CorpusTask):
    """A step of the classifier over a bucket."""

    number: int
    num_documents: int
    settings: Quality
    source: str
    made_of: str  # digest of all documents and settings

    @property
    def folder(self) -> Path:
        return scores_folder(self.work, self.number)

    @property
    def inputs(self) -> str:
        return self.made_of

    @property
    def size(self) -> int:
        return self.num_documents

    def __str__(self) -> str:
        return f"quality of bucket {self.number}"

    def scored(self, name: str) -> np.ndarray:
        """An array that `ScoreDocuments` wrote: identities (S16) or scores (float32), by row."""
        return load_array(scores_folder(self.work, self.number) / f"{name}.npy")


def scores_folder(work: Path, number: int) -> Path:
    """What `ScoreDocuments` wrote of a bucket."""
    return work / "scores" / f"{number:06d}"


def decisions_folder(work: Path, number: int) -> Path:
    """What `DecideDocuments` wrote of a bucket."""
    return work / "decisions" / f"{number:06d}"


@dataclass(frozen=True)
class ScoreDocuments(QualityTask):
    """Score the documents of a bucket. documents: their tables; learned: folder of the classifier."""

    documents: Callable[[Sequence[str]], Iterator[pa.Table]]
    learned: Path

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises InputError for a model that cannot be read here, OSError for a full disk, BessemerError for a document that
        comes twice."""
        model = _opened(self.settings, self.learned)
        tables = [
            score_table(model, self.source, table, self.settings.seed) for table in self.documents(SCORED_COLUMNS)
        ]
        empty = TableScores(np.zeros(0, "S16"), np.zeros(0, np.float32), {})
        identities, scores = (
            np.concatenate([getattr(table, name) for table in (empty, *tables)]) for name in ("identities", "scores")
        )
        ordered = np.sort(identities)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        came = "".join(f"document {identity_of(name)} came twice to the quality classifier" for name in twice[:1])
        engine.require(not len(twice), came)
        np.save(folder / "identities.npy", identities)
        np.save(folder / "scores.npy", scores)
        (folder / EXAMPLES).write_bytes(pickle.dumps([table.examples for table in tables]))
        return {"documents": len(scores), "histogram": scoring.histogram(scores)}

    def examples(self) -> list[Examples]:
        """The documents to show, of each table."""
        found: list[Examples] = pickle.loads((self.folder / EXAMPLES).read_bytes())
        return found


@lru_cache(maxsize=1)
def _opened(settings: Quality, folder: Path) -> Classifier:
    return learned_classifier(settings, folder)


@dataclass(frozen=True)
class CountDigits(QualityTask):
    """Count the next digit of the bucket's keys for each query (cuts.py): rows of query, digit and count."""

    queries: tuple[RankQuery, ...]
    round: int

    is_durable = False

    @property
    def folder(self) -> Path:
        return self.work / "digits" / f"{self.round:02d}-{self.number:06d}"

    @property
    def inputs(self) -> str:
        return digest(
            self.made_of, [[*query.sources, query.best_first, query.rank, query.known.hex()] for query in self.queries]
        )

    def make(self, folder: Path) -> dict[str, Any]:
        identities, scores = self.scored("identities"), self.scored("scores")
        keys = {
            best_first: keys_of(scores, identities, best_first)
            for best_first in {one.best_first for one in self.queries}
        }
        rows = [np.zeros((0, 3), dtype=np.int64)]
        for number, query in enumerate(self.queries):
            if self.source in query.sources:
                counts = digit_counts(keys[query.best_first], query.known)
                digits = np.flatnonzero(counts)
                rows.append(np.column_stack([np.full(len(digits), number), digits, counts[digits]]))
        np.save(folder / DIGIT_COUNTS, np.concatenate(rows))
        return {}

    def add_to(self, totals: Sequence[np.ndarray]) -> None:
        """Add the counts of the finished task to those of each query (DIGITS of them)."""
        rows = load_array(self.folder / DIGIT_COUNTS)
        for number in np.unique(rows[:, 0]).tolist():
            here = rows[rows[:, 0] == number]
            totals[number][here[:, 1]] += here[:, 2]


def no_counts() -> np.ndarray:
    """Counts of a query before any is added."""
    return np.zeros(DIGITS, dtype=np.int64)


@dataclass(frozen=True)
class DecideDocuments(QualityTask):
    """Decide on the documents of a bucket: `stays.npy` (bool) and `band.npy` (int8, -1: none), by row. cuts: of its source."""

    is_judged: bool
    cuts: tuple[bytes, ...]

    @property
    def folder(self) -> Path:
        return decisions_folder(self.work, self.number)

    @property
    def inputs(self) -> str:
        return digest(self.made_of, self.is_judged, [cut.hex() for cut in self.cuts])

    def make(self, folder: Path) -> dict[str, Any]:
        identities, scores = self.scored("identities"), self.scored("scores")
        settings, band = self.settings, np.full(len(scores), -1, dtype=np.int8)
        keep, facts = np.ones(len(scores), dtype=np.bool_), dict[str, Any]()
        if self.is_judged:
            is_weighted = settings.use == "weight"
            keep = scoring.stays(settings, scores, identities, None if is_weighted else next(iter(self.cuts), None))
            if is_weighted:
                band = scoring.bands(scores, identities, self.cuts)
                members = [scores[band == place] for place in range(len(settings.band_weights))]
                facts["bands"] = [[len(one), float(one.min(initial=1.0))] for one in members]
            if settings.use == "pareto":
                facts["expected"] = scoring.fixed_sum(scoring.pareto_share(scores.astype(np.float64), settings.alpha))
        np.save(folder / "stays.npy", keep)
        np.save(folder / "band.npy", band)
        return facts | {
            "kept": int(keep.sum()),
            "sum": scoring.fixed_sum(scores),
            "least_kept": float(scores[keep].min()) if keep.any() else None,
            "most_rejected": float(scores[~keep].max(initial=0.0)),
        }
