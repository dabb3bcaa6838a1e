"""What the scores of all documents decide, by tasks over buckets; the driver holds counts.

Writes quality.json, for the report. Independent of the order of documents, and of how they are cut into buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.corpus.dedup.exchange import load_array
from bessemer.corpus.quality import scores as scoring
from bessemer.corpus.quality.classify import EXAMPLES, FILE, VERSION, Examples
from bessemer.corpus.quality.cuts import RankQuery, find_cuts
from bessemer.corpus.quality.scores import Bools, Scores
from bessemer.corpus.quality.task import (
    CountDigits,
    DecideDocuments,
    QualityTask,
    ScoreDocuments,
    decisions_folder,
    no_counts,
    scores_folder,
)
from bessemer.recipe import Quality
from bessemer.recipe.corpus import band_part
from bessemer.run import write_json

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
        for number, new in chain.from_iterable(examples.items() for examples in task.examples()):
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
        wanted, totals = {name for query in queries for name in query.sources}, [no_counts() for _ in queries]
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
