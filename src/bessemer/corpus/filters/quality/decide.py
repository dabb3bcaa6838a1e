"""The classifier over a whole corpus: tasks that score the documents of one bucket, which has one source; and the decisions
by the scores of all documents.

Writes quality.json, for the report. Independent of the order of documents, and of how they are cut into buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bessemer.corpus.dedup.exchange import load_array
from bessemer.corpus.dedup.verdicts import packed
from bessemer.corpus.filters.quality import scores as scoring
from bessemer.corpus.filters.quality.classify import EXCERPT_CHARACTERS, FILE, learned_classifier
from bessemer.corpus.filters.quality.sample import keys, uniforms
from bessemer.corpus.filters.quality.scores import Bools, Scores
from bessemer.recipe import Quality
from bessemer.run.files import write_json
from bessemer.run_tasks import engine
from bessemer.run_tasks.task import CorpusTask
from bessemer.storage.filesystem import AnyPath

SAMPLED = 1_000_000  # documents among whose scores a share is cut off
EXAMPLES = 3  # documents shown for each bin of the scores, drawn by the hash of their identity
UNITS = 1_000_000  # of a score, so that sums are integers, equal in any order


@dataclass(frozen=True)
class ScoreDocuments(CorpusTask):
    """Score the documents of a bucket: scores.npy, and sample.npy with the scores of the share `sampled`."""

    number: int
    num_documents: int
    settings: Quality
    source: str
    made_of: str  # digest of all documents and settings
    documents: Callable[[Sequence[str]], Iterator[pa.Table]]
    learned: AnyPath  # folder of the classifier
    sampled: float = 1.0

    @property
    def folder(self) -> AnyPath:
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
        """Return an array that the finished task wrote, by row."""
        return load_array(self.folder / f"{name}.npy")

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises InputError for a model that cannot be read here, OSError for a full disk, BessemerError for a document that
        comes twice."""
        model = learned_classifier(self.settings, self.learned)
        names, parts = [np.zeros(0, "S16")], [np.zeros(0, np.float32)]
        examples: list[list[Any]] = []
        for table in self.documents(("identity", "text")):
            identities, texts = table["identity"].to_pylist(), table["text"].to_pylist()
            found = model.score(texts)
            names.append(packed(identities))
            parts.append(found.astype(np.float32))
            bins = scoring.bin_of(found).tolist()
            drawn = keys(names[-1], "example", self.settings.seed).tolist()
            examples += [
                [number, key, identity, self.source, score, text[:EXCERPT_CHARACTERS]]
                for number, key, identity, score, text in zip(
                    bins, drawn, identities, found.tolist(), texts, strict=True
                )
            ]
            examples = first_of_each_bin(examples)
        identities, scores = np.concatenate(names), np.concatenate(parts)
        is_once = len(np.unique(identities)) == len(identities)
        engine.require(is_once, f"a document of bucket {self.number} came twice to the quality classifier")
        np.save(folder / "scores.npy", scores)
        np.save(folder / "sample.npy", scores[uniforms(identities, "cut", self.settings.seed) < self.sampled])
        histogram = np.bincount(scoring.bin_of(scores), minlength=scoring.HISTOGRAM_BINS)
        total = int(np.rint(scores.astype(np.float64) * UNITS).sum())
        return {"documents": len(scores), "histogram": histogram.tolist(), "sum": total, "examples": examples}


def scores_folder(work: AnyPath, number: int) -> AnyPath:
    """Return the folder of a bucket that `ScoreDocuments` wrote."""
    return work / "scores" / f"{number:06d}"


def first_of_each_bin(examples: list[list[Any]]) -> list[list[Any]]:
    """Return the EXAMPLES first rows of each bin of the scores: bin, key, identity, source, score, excerpt."""
    ordered = sorted(examples)
    return [row for at, row in enumerate(ordered) if at < EXAMPLES or ordered[at - EXAMPLES][0] != row[0]]


@dataclass(frozen=True)
class BucketQuality:
    """The decisions on the documents of a bucket that came to the classifier, by row."""

    scores: Scores
    stays: Bools  # false: rejected as low_quality
    limit: str  # the limit that a rejected document did not reach, in words

    def detail(self, row: int) -> str:
        """Return why a document was rejected, for rejected/."""
        return f"score {self.scores[row]:.6f}; {self.limit}"


@dataclass(frozen=True)
class QualityVerdicts:
    """The decisions on all documents, bucket by bucket, from their scores."""

    work: AnyPath
    settings: Quality
    cut: float
    judged: frozenset[int]  # buckets whose documents may be rejected

    @classmethod
    def of_receipt(cls, work: AnyPath, settings: Quality, done: dict[str, Any]) -> QualityVerdicts:
        """Read what `decide` returned."""
        return cls(work, settings, done["cut"], frozenset(done["judged"]))

    def __call__(self, bucket: int) -> BucketQuality:
        """Return the decisions on a bucket."""
        scores = load_array(scores_folder(self.work, bucket) / "scores.npy")
        stays = np.ones(len(scores), dtype=np.bool_)
        if bucket in self.judged:
            stays = scoring.stays(self.settings, scores, self.cut)
        return BucketQuality(scores, stays, scoring.limit(self.settings, self.cut))


def decide(
    settings: Quality,
    sources: Sequence[str],
    learned: dict[str, Any],
    scored: Sequence[ScoreDocuments],
    perform: Callable[[Sequence[ScoreDocuments]], list[dict[str, Any]]],
    folder: Path,
) -> dict[str, Any]:
    """Decide by the scores of tasks; writes `folder`/quality.json, and returns the facts for the receipt.

    Args:
        learned: The result of `learn`.
        perform: Runs tasks and returns their receipts.
    """
    names = sorted(sources)
    judged_sources = settings.sources or [name for name in names if name not in settings.high]
    judged = [task for task in scored if task.source in judged_sources]
    receipts = perform(scored)
    cut = 0.5 if settings.threshold is None else settings.threshold
    if settings.keep_share is not None:
        sample = [np.zeros(0, np.float32), *(task.scored("sample") for task in judged)]
        cut = scoring.cut_of_share(np.concatenate(sample), settings.keep_share)
    facts = {"cut": cut, "judged": [task.number for task in judged], "limit": scoring.limit(settings, cut)}
    rows: list[dict[str, Any]] = []
    histograms: dict[str, list[int]] = {}
    for name in names:
        own = [(task, done) for task, done in zip(scored, receipts, strict=True) if task.source == name]
        documents, total = (sum(done[key] for _, done in own) for key in ("documents", "sum"))
        stays = (QualityVerdicts.of_receipt(task.work, settings, facts)(task.number).stays for task, _ in own)
        row = {"source": name, "judged": name in judged_sources and documents > 0, "documents": documents}
        rows.append({**row, "kept": sum(int(some.sum()) for some in stays), "mean_score": None})
        if documents:
            rows[-1]["mean_score"] = total / UNITS / documents
        histograms[name] = [sum(counts) for counts in zip(*(done["histogram"] for _, done in own), strict=True)]
    used: dict[str, Any] = {"kind": settings.use, "limit": facts["limit"], "sources": rows}
    used |= {"threshold": cut} if settings.use == "filter" else {}
    shown = first_of_each_bin(list(chain.from_iterable(done["examples"] for done in receipts)))
    examples = [
        {"identity": identity, "source": name, "score": score, "excerpt": text}
        for _, _, identity, name, score, text in sorted(shown, key=lambda row: (row[4], row[2]))
    ]
    content = {**learned, "scores": histograms}
    write_json(folder / FILE, {**content, "use": used, "examples": examples})
    documents, kept = (sum(row[name] for row in rows) for name in ("documents", "kept"))
    return {**facts, "documents": documents, "rejected": documents - kept}
