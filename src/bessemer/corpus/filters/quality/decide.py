"""The quality classifier over a whole corpus: tasks that score documents, and decisions from the scores of all documents.

It writes quality.json for the report. Results depend neither on the order of documents nor on the partitioning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bessemer.corpus.dedup.task import load_array, packed
from bessemer.corpus.filters.quality.classify import EXCERPT_CHARACTERS, FILE, FOLDER, learn, learned_classifier
from bessemer.corpus.filters.quality.sample import keys, uniforms
from bessemer.corpus.global_steps import AnyPart, CorpusDocuments, GlobalStep, StepTask, VerdictTask
from bessemer.corpus.verdicts import make_verdicts
from bessemer.recipe import Quality
from bessemer.run.files import write_json
from bessemer.run_tasks.local import run_in_thread
from bessemer.run_tasks.task import build_once
from bessemer.storage.path import copy_folder, read_receipt

SAMPLED = 1_000_000  # documents whose scores determine the limit for `keep_share`
EXAMPLES = 3  # documents shown per score bin, drawn by the hash of their identity
UNITS = 1_000_000  # scores are summed in these integer units, so that the sum does not depend on the order
HISTOGRAM_BINS = 20
CLASSIFIER = "classifier"  # folder of the trained classifier


@dataclass(frozen=True)
class ScoreDocuments(StepTask):
    """A task that scores the documents of a part and writes scores.npy.

    sample.npy has the scores of the share `sampled` of the documents in judged sources.
    """

    settings: Quality
    judged: tuple[str, ...]
    sampled: float
    part: AnyPart

    def make(self, folder: Path) -> dict[str, Any]:
        """Score the documents. Raises InputError for a model that cannot be read here, OSError for a full disk."""
        model = learned_classifier(self.settings, self.work / CLASSIFIER)
        parts, samples = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)]
        tables, examples = list[dict[str, Any]](), list[list[Any]]()
        for table in self.part(("identity", "source", "text")):
            identities, texts = table["identity"].to_pylist(), table["text"].to_pylist()
            source = table["source"][0].as_py() if texts else ""
            found, names = model.score(texts), packed(identities)
            parts.append(found.astype(np.float32))
            if source in self.judged:
                samples.append(parts[-1][uniforms(names, "cut", self.settings.seed) < self.sampled])
            bins, drawn = bin_of(found).tolist(), keys(names, "example", self.settings.seed).tolist()
            rows = zip(bins, drawn, identities, found.tolist(), texts, strict=True)
            examples += [[*known, source, score, text[:EXCERPT_CHARACTERS]] for *known, score, text in rows]
            examples = first_of_each_bin(examples)
            histogram = np.bincount(bin_of(parts[-1]), minlength=HISTOGRAM_BINS)
            total = int(np.rint(parts[-1].astype(np.float64) * UNITS).sum())
            tables.append({"source": source, "documents": len(texts), "histogram": histogram.tolist(), "sum": total})
        np.save(folder / "scores.npy", np.concatenate(parts))
        np.save(folder / "sample.npy", np.concatenate(samples))
        return {"tables": tables, "examples": examples}


def first_of_each_bin(examples: list[list[Any]]) -> list[list[Any]]:
    """Return the first EXAMPLES rows of each score bin. A row is (bin, key, identity, source, score, excerpt)."""
    ordered = sorted(examples)
    return [row for at, row in enumerate(ordered) if at < EXAMPLES or ordered[at - EXAMPLES][0] != row[0]]


@dataclass(frozen=True)
class JudgeScores(VerdictTask):
    """A task that writes the verdicts for the scores of a part, and all scores. `cut` is the lowest score to keep."""

    settings: Quality
    judged: tuple[str, ...]
    cut: float

    def judge(self) -> Iterator[tuple[int, pa.Table]]:
        before, first = self.result(ScoreDocuments.__name__, self.number), 0
        every, limit = load_array(before / "scores.npy"), limit_in_words(self.settings, self.cut)
        for table in read_receipt(before)["tables"]:
            scores = every[first : first + table["documents"]]
            first += len(scores)
            goes = ~stays(self.settings, scores, self.cut) & (table["source"] in self.judged)
            facts = list(zip(goes.tolist(), scores.tolist(), strict=True))
            reasons = ["low_quality" if is_low else None for is_low, _ in facts]
            details = [f"score {score:.6f}; {limit}" if is_low else None for is_low, score in facts]
            yield len(scores), make_verdicts(range(len(scores)), score=scores, reason=reasons, detail=details)


class QualityStep(GlobalStep, Quality):
    """Score documents with a classifier, and reject those with low scores if the recipe says so."""

    name = "quality"
    action = "scoring quality"

    @property
    def is_on(self) -> bool:
        return self.on

    def run(self, documents: CorpusDocuments, report: Path) -> None:
        """Write quality.json to `report`, and the classifier if it was trained here."""
        names = sorted(source.name for source in documents.corpus.sources)
        judged = tuple(self.sources or [name for name in names if name not in self.high])
        place = documents.folder / CLASSIFIER

        def train(folder: Path) -> dict[str, Any]:
            return learn(self, names, lambda columns: documents.tables(columns, (*self.high, *self.low)), folder)

        learned = run_in_thread(lambda: build_once(place, documents.made_of, train))
        copy_folder(place / FOLDER, report / FOLDER)
        sampled = SAMPLED / max(sum(documents.sizes), 1)
        scored = documents.on_parts(ScoreDocuments, reads=True, settings=self, judged=judged, sampled=sampled)
        cut = 0.5 if self.threshold is None else self.threshold
        if self.keep_share is not None:
            folders = [documents.folder / ScoreDocuments.__name__ / f"{number:06d}" for number in range(len(scored))]
            samples = [np.zeros(0, np.float32), *(load_array(folder / "sample.npy") for folder in folders)]
            cut = cut_of_share(np.concatenate(samples), self.keep_share)
        done = documents.on_parts(JudgeScores, settings=self, judged=judged, cut=cut)
        rows, histograms = list[dict[str, Any]](), dict[str, list[int]]()
        tables = list(chain.from_iterable(one["tables"] for one in scored))
        gone = list(chain.from_iterable(one["tables"] for one in done))
        for name in names:
            own = [(table, lost) for table, lost in zip(tables, gone, strict=True) if table["source"] == name]
            count, total = (sum(table[key] for table, _ in own) for key in ("documents", "sum"))
            row = {"source": name, "judged": name in judged and count > 0, "documents": count}
            mean = total / UNITS / count if count else None
            rows.append({**row, "kept": count - sum(lost for _, lost in own), "mean_score": mean})
            histograms[name] = [sum(counts) for counts in zip(*(table["histogram"] for table, _ in own), strict=True)]
        used: dict[str, Any] = {"kind": self.use, "limit": limit_in_words(self, cut), "sources": rows}
        used |= {"threshold": cut} if self.use == "filter" else {}
        shown = first_of_each_bin(list(chain.from_iterable(one["examples"] for one in scored)))
        examples = [
            {"identity": identity, "source": name, "score": score, "excerpt": text}
            for _, _, identity, name, score, text in sorted(shown, key=lambda row: (row[4], row[2]))
        ]
        write_json(report / FILE, {**learned, "scores": histograms, "use": used, "examples": examples})


def stays(settings: Quality, scores: npt.NDArray[np.float32], cut: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the documents to keep. `cut` is the lowest score that use = "filter" keeps."""
    kept: npt.NDArray[np.bool_] = scores.astype(np.float64) >= (np.float32(cut) if settings.use == "filter" else 0.0)
    return kept


def cut_of_share(sample: npt.NDArray[np.float32], share: float) -> float:
    """Return the score that `share` of a sample reaches. Documents with equal scores are kept together."""
    if not len(sample):
        return 0.0
    return float(np.sort(sample)[::-1][max(round(share * len(sample)), 1) - 1])


def limit_in_words(settings: Quality, cut: float) -> str:
    """Describe the limit that a rejected document did not reach."""
    if settings.use == "filter" and settings.keep_share is not None:
        return f"the best {settings.keep_share:g} of the documents have {cut:.6f} or more"
    return f"threshold {cut:g}" if settings.use == "filter" else ""


def bin_of(scores: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the histogram bin of each score from 0 to 1."""
    return np.minimum((scores * HISTOGRAM_BINS).astype(np.int64), HISTOGRAM_BINS - 1)
