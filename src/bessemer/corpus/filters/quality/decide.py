"""The quality step over a whole corpus: scores of documents, and decisions from the scores of all documents.

It writes quality.json for the report. Results depend neither on the order of documents nor on the partitioning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bessemer.corpus.dedup.task import packed
from bessemer.corpus.filters.quality.classify import EXCERPT_CHARACTERS, FILE, FOLDER, learn, learned_classifier
from bessemer.corpus.filters.quality.sample import keys
from bessemer.corpus.global_steps import CorpusDocuments, DocumentVerdict, GlobalStep
from bessemer.recipe import Quality
from bessemer.run.files import stage_facts, write_json
from bessemer.run_tasks.local import run_in_thread
from bessemer.run_tasks.task import build_once
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import copy_folder

EXAMPLES = 3  # documents shown per score bin, drawn by the hash of their identity
UNITS = 1_000_000  # scores are summed in these integer units, so that the sum does not depend on the order
HISTOGRAM_BINS = 20
CLASSIFIER = "classifier"  # folder of the trained classifier

Scores = npt.NDArray[np.float32]


class QualityStep(GlobalStep, Quality):
    """Score documents with a classifier, and reject those with low scores if the recipe says so.

    `classifier` is the folder of the classifier, once it is trained.
    """

    name = "quality"
    action = "scoring quality"
    columns = ("identity", "source", "text")
    classifier: AnyPath = Path()  # folder of the trained classifier, once it is trained

    @property
    def is_on(self) -> bool:
        return self.on

    def run(self, documents: CorpusDocuments, report: Path) -> None:
        """Score all documents, and write quality.json to `report`, with the classifier if it was trained in this build."""
        names = sorted(source.name for source in documents.corpus.sources)
        path = documents.folder / CLASSIFIER

        def train(folder: Path) -> dict[str, Any]:
            return learn(self, names, documents.tables, folder)

        run_in_thread(lambda: build_once(path, documents.made_of, train))
        copy_folder(path / FOLDER, report / FOLDER)
        GlobalStep.run(self.model_copy(update={"classifier": path}), documents, report)

    def collect(self, documents: pa.Table) -> pa.Table:
        """Return a table with identity, source, score, draw and excerpt of each document.

        `draw` is a pseudorandom number that selects the example documents of quality.json. `excerpt` is the beginning of the
        text, or null for a document that is no example.
        """
        texts, names = documents["text"].to_pylist(), packed(documents["identity"].to_pylist())
        scores, draws = learned_classifier(self, self.classifier).score(texts), keys(names, "example", self.seed)
        facts = documents.drop_columns("text").append_column("score", [scores]).append_column("draw", [draws])
        shown = set(example_rows(facts).tolist())
        excerpts = [text[:EXCERPT_CHARACTERS] if row in shown else None for row, text in enumerate(texts)]
        return facts.append_column("excerpt", [pa.array(excerpts, pa.string())])

    def decide(self, facts: Iterator[pa.Table], report: Path) -> float:
        """Write quality.json to `report` and return the lowest score that is kept. `facts` are the tables of `collect`."""
        by_source, shown = defaultdict[str, list[Scores]](lambda: [np.zeros(0, np.float32)]), list[pa.Table]()
        for table in facts:
            for name in pc.unique(table["source"]).to_pylist():
                by_source[name].append(scores_of(table.filter(pc.equal(table["source"], name))))
            every = pa.concat_tables([*shown, table.filter(pc.is_valid(table["excerpt"]))])
            shown = [every.take(example_rows(every))]
        scores = {name: np.concatenate(parts) for name, parts in sorted(by_source.items())}
        cut = 0.5 if self.threshold is None else self.threshold
        if self.keep_share is not None:
            judged = [scores[name] for name in scores if self.judges(name)]
            cut = cut_of_share(np.concatenate([np.zeros(0, np.float32), *judged]), self.keep_share)
        rows = [
            {
                "source": name,
                "judged": self.judges(name),
                "documents": len(values),
                "kept": int((stays(self, values, cut) | (not self.judges(name))).sum()),
                "mean_score": int(np.rint(values.astype(np.float64) * UNITS).sum()) / UNITS / len(values),
            }
            for name, values in scores.items()
        ]
        use: dict[str, Any] = {"kind": self.use, "limit": limit_in_words(self, cut), "sources": rows}
        use |= {"threshold": cut} if self.use == "filter" else {}
        histograms = {name: np.bincount(bin_of(values), minlength=HISTOGRAM_BINS) for name, values in scores.items()}
        examples = [row for table in shown for row in table.drop_columns("draw").to_pylist()]
        content = {
            **stage_facts(self.classifier),
            "scores": {name: counts.tolist() for name, counts in histograms.items()},
            "use": use,
            "examples": sorted(examples, key=lambda row: (row["score"], row["identity"])),
        }
        write_json(report / FILE, content)
        return cut

    def judge(self, facts: pa.Table, decided: float) -> Iterator[DocumentVerdict]:
        """Yield a verdict with the score of each document, which rejects it if its score is below `decided`.

        `facts` is a table of `collect`. Documents of sources that `judges` excludes are never rejected.
        """
        scores, limit = scores_of(facts), limit_in_words(self, decided)
        is_good, sources = stays(self, scores, decided).tolist(), facts["source"].to_pylist()
        for row, score in enumerate(scores.tolist()):
            is_low = self.judges(sources[row]) and not is_good[row]
            reason, detail = ("low_quality", f"score {score:.6f}; {limit}") if is_low else (None, "")
            yield DocumentVerdict(row, reason, detail, score=score)

    def judges(self, source: str) -> bool:
        """Return True if documents of this source may be rejected."""
        return source in self.sources if self.sources else source not in self.high


def scores_of(facts: pa.Table) -> Scores:
    """Return the scores in a table of `QualityStep.collect` as float32."""
    return np.asarray(facts["score"].to_numpy(), np.float32)


def example_rows(facts: pa.Table) -> npt.NDArray[np.int64]:
    """Select EXAMPLES random documents from each score bin of a table of `QualityStep.collect`.

    Returns their row numbers, sorted by bin, then `draw`.
    """
    bins = bin_of(facts["score"].to_numpy())
    order = np.lexsort((facts["draw"].to_numpy(), bins))
    rank = np.arange(len(order)) - np.searchsorted(bins[order], bins[order])
    return order[rank < EXAMPLES]


def stays(settings: Quality, scores: npt.NDArray[np.float32], cut: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the scores of documents to keep.

    With use = "filter" they are those of at least `cut`. Other values of `use` keep all.
    """
    kept: npt.NDArray[np.bool_] = scores.astype(np.float64) >= (np.float32(cut) if settings.use == "filter" else 0.0)
    return kept


def cut_of_share(scores: npt.NDArray[np.float32], share: float) -> float:
    """Return the lowest of the best `share` (0 to 1) of some scores.

    The share includes at least one score. Returns 0 if there are no scores.
    """
    if not len(scores):
        return 0.0
    return float(np.sort(scores)[::-1][max(round(share * len(scores)), 1) - 1])


def limit_in_words(settings: Quality, cut: float) -> str:
    """Describe the lowest score `cut` that is kept, for the details of rejected documents; "" if no document is rejected."""
    if settings.use == "filter" and settings.keep_share is not None:
        return f"the best {settings.keep_share:g} of the documents have {cut:.6f} or more"
    return f"threshold {cut:g}" if settings.use == "filter" else ""


def bin_of(scores: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the index of the histogram bin of each score. HISTOGRAM_BINS bins of equal width divide the range from 0 to 1."""
    return np.minimum((scores * HISTOGRAM_BINS).astype(np.int64), HISTOGRAM_BINS - 1)
