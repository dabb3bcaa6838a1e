"""The classifier over a whole corpus: tasks, each over the documents of one bucket, which has one source; and what the scores
of all documents decide, by the counts that the driver holds.

Writes quality.json, for the report. Independent of the order of documents, and of how they are cut into buckets.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bessemer.corpus import engine
from bessemer.corpus.dedup.exchange import load_array
from bessemer.corpus.dedup.verdicts import identity_of
from bessemer.corpus.quality import scores as scoring
from bessemer.corpus.quality.classify import (
    EXAMPLES,
    FILE,
    SCORED_COLUMNS,
    VERSION,
    Examples,
    TableScores,
    learned_classifier,
    score_table,
)
from bessemer.corpus.quality.scores import DIGITS, Bools, RankQuery, Scores, digit_counts, find_cuts, keys_of
from bessemer.corpus.work import CorpusTask
from bessemer.hashing import digest
from bessemer.recipe import Quality
from bessemer.recipe.corpus import band_part
from bessemer.run import write_json

EXAMPLES_FILE, DIGIT_COUNTS = "examples.pickle", "digits.npy"


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
        model = learned_classifier(self.settings, self.learned)
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
        (folder / EXAMPLES_FILE).write_bytes(pickle.dumps([table.examples for table in tables]))
        return {"documents": len(scores), "histogram": scoring.histogram(scores)}


@dataclass(frozen=True)
class CountDigits(QualityTask):
    """Count the next digit of the bucket's keys for each query: rows of query, digit and count."""

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


# --- Decisions

Receipts = list[dict[str, Any]]
Perform = Callable[[Sequence[QualityTask]], Receipts]


@dataclass(frozen=True)
class BucketQuality:
    """What became of the documents of a bucket that came to the classifier, by row."""

    scores: Scores
    stays: Bools  # false: rejected as low_quality
    band: npt.NDArray[np.int8]  # with use = "weight" the band of quality within the source, 0 the lowest; else -1
    limit: str  # what a rejected document did not reach, in words

    def detail(self, row: int) -> str:
        """Why a document was rejected, for rejected/."""
        return f"score {self.scores[row]:.6f}; {self.limit}"


@dataclass(frozen=True)
class QualityVerdicts:
    """The decisions on all documents, bucket by bucket."""

    work: Path
    limit: str

    def __call__(self, bucket: int) -> BucketQuality:
        """Those on a bucket."""
        decided = decisions_folder(self.work, bucket)
        scores = load_array(scores_folder(self.work, bucket) / "scores.npy")
        return BucketQuality(scores, load_array(decided / "stays.npy"), load_array(decided / "band.npy"), self.limit)


def decide(
    settings: Quality,
    sources: Sequence[str],
    learned: dict[str, Any],
    scored: Sequence[ScoreDocuments],
    perform: Perform,
    started: float,
    folder: Path,
) -> dict[str, Any]:
    """Decide by the scores of finished tasks; writes `folder`/quality.json, and returns the facts for the receipt. learned: as
    `learn` returned it; perform: does tasks and gives their receipts; started: when scoring began (`perf_counter`)."""
    names = sorted(sources)
    judged_sources = settings.sources or [name for name in names if name not in settings.high]
    documents, histograms = dict.fromkeys(names, 0), {name: [0] * scoring.HISTOGRAM_BINS for name in names}
    shown: Examples = {}
    for task, done in zip(scored, perform(scored), strict=True):
        documents[task.source] += done["documents"]
        histograms[task.source] = [sum(pair) for pair in zip(histograms[task.source], done["histogram"], strict=True)]
        for number, new in chain.from_iterable(examples.items() for examples in task.load(EXAMPLES_FILE)):
            shown[number] = sorted([*shown.get(number, []), *new])[:EXAMPLES]
    judged = {name: documents[name] for name in judged_sources}
    queries = scoring.queries(settings, judged)
    cuts = find_cuts(queries, _Counting(scored, perform)) if queries else []
    of_source = {
        name: tuple(cut for query, cut in zip(queries, cuts, strict=True) if name in query.sources) for name in names
    }
    deciding = [
        DecideDocuments(*_common(task), is_judged=task.source in judged, cuts=of_source[task.source]) for task in scored
    ]
    totals = {name: _Totals(name, name in judged and documents[name] > 0, documents[name]) for name in names}
    for decision, done in zip(deciding, perform(deciding), strict=True):
        totals[decision.source].add(done)
    of_judged = [totals[name] for name in judged_sources]
    least = min((one.least_kept for one in of_judged if one.least_kept is not None), default=None)
    limit = scoring.limit(settings, 0.0 if least is None else least)
    used: dict[str, Any] = {
        "kind": settings.use,
        "limit": limit,
        "sources": [totals[name].to_json(settings) for name in names],
    }
    if settings.use == "filter":
        most = max((one.most_rejected for one in of_judged), default=0.0)
        reached = most if least is None else least
        used["threshold"] = scoring.threshold(settings) if settings.keep_share is None else reached
    if settings.use == "pareto":
        used["alpha"] = settings.alpha
        used["expected_kept"] = sum(one.expected for one in of_judged) / scoring.FIXED
    examples = [
        {"identity": identity, "source": name, "score": score, "excerpt": text}
        for _, identity, name, score, text in sorted(chain(*shown.values()), key=lambda row: (row[3], row[1]))
    ]
    seconds = {**learned["seconds"], "score": round(perf_counter() - started, 3)}
    content = {"version": VERSION, **learned["report"], "scores": histograms, "use": used, "examples": examples}
    write_json(folder / FILE, {**content, "seconds": seconds})
    total = sum(documents.values())
    return {"limit": limit, "documents": total, "rejected": total - sum(one.kept for one in totals.values())}


def _common(task: ScoreDocuments) -> tuple[Path, int, int, Quality, str, str]:
    return task.work, task.number, task.num_documents, task.settings, task.source, task.made_of


class _Counting:
    """Counts the digits of queries over all buckets, a round at each call."""

    def __init__(self, scored: Sequence[ScoreDocuments], perform: Perform) -> None:
        self.scored, self.perform, self.round = scored, perform, 0

    def __call__(self, queries: Sequence[RankQuery]) -> list[npt.NDArray[np.int64]]:
        wanted = {name for query in queries for name in query.sources}
        totals = [np.zeros(DIGITS, dtype=np.int64) for _ in queries]
        tasks = [
            CountDigits(*_common(task), queries=tuple(queries), round=self.round)
            for task in self.scored
            if task.source in wanted
        ]
        for task, _ in zip(tasks, self.perform(tasks), strict=True):
            task.add_to(totals)
        self.round += 1
        return totals


@dataclass
class _Totals:
    """What was decided about a source."""

    source: str
    is_judged: bool
    documents: int
    kept: int = 0
    sum: int = 0
    expected: int = 0
    least_kept: float | None = None
    most_rejected: float = 0.0
    bands: list[list[float]] | None = None

    def add(self, done: dict[str, Any]) -> None:
        """Add the receipt of a bucket."""
        self.kept += done["kept"]
        self.sum += done["sum"]
        self.expected += done.get("expected", 0)
        self.most_rejected = max(self.most_rejected, done["most_rejected"])
        if done["least_kept"] is not None:
            self.least_kept = min(done["least_kept"], 1e9 if self.least_kept is None else self.least_kept)
        if "bands" in done:
            before = self.bands or [[0, 1.0]] * len(done["bands"])
            self.bands = [
                [old[0] + new[0], min(old[1], new[1])] for old, new in zip(before, done["bands"], strict=True)
            ]

    def to_json(self, settings: Quality) -> dict[str, Any]:
        """For quality.json."""
        row = {
            "source": self.source,
            "judged": self.is_judged,
            "documents": self.documents,
            "kept": self.kept,
            "mean_score": self.sum / scoring.FIXED / self.documents if self.documents else None,
        }
        if settings.use == "weight" and self.is_judged:
            row["bands"] = [
                {"name": band_part(self.source, place), "documents": count, "from_score": least, "weight": weight}
                for place, ((count, least), weight) in enumerate(
                    zip(self.bands or [], settings.band_weights, strict=True)
                )
            ]
        return row
