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
from bessemer.corpus.quality.sample import uniforms
from bessemer.corpus.quality.scores import Bools, Scores
from bessemer.corpus.work import CorpusTask
from bessemer.hashing import digest
from bessemer.recipe import Quality
from bessemer.run import write_json
from bessemer.storage import Place

EXAMPLES_FILE = "examples.pickle"
SAMPLED = 1_000_000  # documents among whose scores a share is cut off


@dataclass(frozen=True)
class QualityTask(CorpusTask):
    """A step of the classifier over a bucket."""

    number: int
    num_documents: int
    settings: Quality
    source: str
    made_of: str  # digest of all documents and settings

    @property
    def folder(self) -> Place:
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


def scores_folder(work: Place, number: int) -> Place:
    """What `ScoreDocuments` wrote of a bucket."""
    return work / "scores" / f"{number:06d}"


def decisions_folder(work: Place, number: int) -> Place:
    """What `DecideDocuments` wrote of a bucket."""
    return work / "decisions" / f"{number:06d}"


@dataclass(frozen=True)
class ScoreDocuments(QualityTask):
    """Score the documents of a bucket. documents: their tables; learned: folder of the classifier; sampled: share of them whose
    scores are put into sample.npy."""

    documents: Callable[[Sequence[str]], Iterator[pa.Table]]
    learned: Place
    sampled: float = 1.0

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
        np.save(folder / "sample.npy", scores[uniforms(identities, "cut", self.settings.seed) < self.sampled])
        (folder / EXAMPLES_FILE).write_bytes(pickle.dumps([table.examples for table in tables]))
        return {"documents": len(scores), "histogram": scoring.histogram(scores)}


@dataclass(frozen=True)
class DecideDocuments(QualityTask):
    """Decide on the documents of a bucket: `stays.npy` (bool), by row. cut: the lowest score that use = "filter" keeps."""

    is_judged: bool
    cut: float

    @property
    def folder(self) -> Place:
        return decisions_folder(self.work, self.number)

    @property
    def inputs(self) -> str:
        return digest(self.made_of, self.is_judged, self.cut)

    def make(self, folder: Path) -> dict[str, Any]:
        identities, scores = self.scored("identities"), self.scored("scores")
        settings, keep, facts = self.settings, np.ones(len(scores), dtype=np.bool_), dict[str, Any]()
        if self.is_judged:
            keep = scoring.stays(settings, scores, identities, self.cut)
            if settings.use == "pareto":
                facts["expected"] = scoring.fixed_sum(scoring.pareto_share(scores.astype(np.float64), settings.alpha))
        np.save(folder / "stays.npy", keep)
        return facts | {"kept": int(keep.sum()), "sum": scoring.fixed_sum(scores)}


# --- Decisions

Receipts = list[dict[str, Any]]
Perform = Callable[[Sequence[QualityTask]], Receipts]


@dataclass(frozen=True)
class BucketQuality:
    """What became of the documents of a bucket that came to the classifier, by row."""

    scores: Scores
    stays: Bools  # false: rejected as low_quality
    limit: str  # what a rejected document did not reach, in words

    def detail(self, row: int) -> str:
        """Why a document was rejected, for rejected/."""
        return f"score {self.scores[row]:.6f}; {self.limit}"


@dataclass(frozen=True)
class QualityVerdicts:
    """The decisions on all documents, bucket by bucket."""

    work: Place
    limit: str

    def __call__(self, bucket: int) -> BucketQuality:
        """Those on a bucket."""
        scores = load_array(scores_folder(self.work, bucket) / "scores.npy")
        return BucketQuality(scores, load_array(decisions_folder(self.work, bucket) / "stays.npy"), self.limit)


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
    cut = 0.5 if settings.threshold is None else settings.threshold
    if settings.keep_share is not None:
        sample = [np.zeros(0, np.float32), *(task.scored("sample") for task in scored if task.source in judged)]
        cut = scoring.cut_of_share(np.concatenate(sample), settings.keep_share)
    deciding = [DecideDocuments(*_common(task), is_judged=task.source in judged, cut=cut) for task in scored]
    totals = {name: _Totals(name, name in judged and documents[name] > 0, documents[name]) for name in names}
    for decision, done in zip(deciding, perform(deciding), strict=True):
        totals[decision.source].add(done)
    of_judged = [totals[name] for name in judged_sources]
    limit = scoring.limit(settings, cut)
    used: dict[str, Any] = {
        "kind": settings.use,
        "limit": limit,
        "sources": [totals[name].to_json() for name in names],
    }
    if settings.use == "filter":
        used["threshold"] = cut
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


def _common(task: ScoreDocuments) -> tuple[Place, int, int, Quality, str, str]:
    return task.work, task.number, task.num_documents, task.settings, task.source, task.made_of


@dataclass
class _Totals:
    """What was decided about a source."""

    source: str
    is_judged: bool
    documents: int
    kept: int = 0
    sum: int = 0
    expected: int = 0

    def add(self, done: dict[str, Any]) -> None:
        """Add the receipt of a bucket."""
        self.kept += done["kept"]
        self.sum += done["sum"]
        self.expected += done.get("expected", 0)

    def to_json(self) -> dict[str, Any]:
        """For quality.json."""
        return {
            "source": self.source,
            "judged": self.is_judged,
            "documents": self.documents,
            "kept": self.kept,
            "mean_score": self.sum / scoring.FIXED / self.documents if self.documents else None,
        }
