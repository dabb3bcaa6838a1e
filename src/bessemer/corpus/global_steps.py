"""Steps over the whole corpus: quality classifier, duplicates, repeated lines.

Each runs on the documents kept so far, as tasks, into folders with receipts:

    classifier/, scores/000000/  the classifier; scores of a bucket (quality/decide.py)
    quality/report/                                 quality.json and the model, published with the corpus
    duplicates/result/, duplicates/NameKeepers/     the counts; verdicts, by the bucket of what stays (dedup/search.py)
    lines/result/, lines/RepeatedLines/             the lines that are cut out of a bucket (dedup/lines.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from bessemer.common.hashing import digest
from bessemer.corpus.dedup.lines import LineVerdicts, find_lines
from bessemer.corpus.dedup.search import find_duplicates, verdicts_of
from bessemer.corpus.dedup.task import RESULT
from bessemer.corpus.dedup.verdicts import DuplicateVerdicts
from bessemer.corpus.partition import Bucket, rows_together
from bessemer.corpus.readers.units import in_groups
from bessemer.recipe import Corpus
from bessemer.run_tasks import engine
from bessemer.run_tasks.run import run_tasks
from bessemer.run_tasks.task import CorpusTask, build_once, receipt
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import copy_folder, read_receipt

if TYPE_CHECKING:
    from bessemer.corpus.filters.quality.decide import QualityVerdicts

QUALITY_REPORT, LINES = "report", "lines"
LEARNED = "classifier"  # folder of the trained classifier

GROUP_BYTES = 16 << 20  # of rows in buckets that are one part of the search for duplicates
# of documents whose columns are read, compared with cleaning when the start-up time of workers is weighed
DEDUP_BYTES, QUALITY_BYTES, LINE_BYTES = 25, 1000, 200


@dataclass(frozen=True)
class Decisions:
    """What the steps that are finished decided about each document."""

    quality: QualityVerdicts | None = None
    verdicts: DuplicateVerdicts | None = None
    lines: LineVerdicts | None = None

    @classmethod
    def load(cls, work: AnyPath, corpus: Corpus, searches: Sequence[str] = ("duplicates", LINES)) -> Decisions:
        """Read what the classifier and these searches decided, as far as the recipe asks for them."""
        quality = verdicts = lines = None
        if corpus.quality.on:
            from bessemer.corpus.filters.quality.decide import QualityVerdicts

            quality = QualityVerdicts.of_receipt(work, corpus.quality, read_receipt(work / "quality"))
        if "duplicates" in searches:
            verdicts = verdicts_of(work / "duplicates", read_receipt(work / "duplicates" / RESULT), corpus.dedup)
        if LINES in searches and corpus.dedup.lines:
            done = read_receipt(work / LINES / RESULT)
            lines = LineVerdicts(work / LINES, done["parts"], done["earlier"])
        return cls(quality, verdicts, lines)


def small_together(buckets: Sequence[Bucket]) -> list[tuple[Bucket, ...]]:
    """The buckets in their order, in groups of at most GROUP_BYTES, or of one: many small ones would cost more to exchange than
    to compare."""
    return in_groups(buckets, GROUP_BYTES, attrgetter("num_bytes"))


@dataclass(frozen=True)
class BucketPart:
    """The documents of some buckets that the steps so far kept. Column `quality` exists when they have scores."""

    buckets: tuple[Bucket, ...]
    decided: Decisions = Decisions()
    corpus: str = ""

    @property
    def size(self) -> int:
        """Documents, rejected ones included."""
        return sum(bucket.size for bucket in self.buckets)

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """A table for each bucket, sorted by identity, with those of the columns that exist."""
        quality, verdicts = self.decided.quality, self.decided.verdicts
        needed = sorted({*columns, "identity", "reason"} - {"source", "quality"})
        read = (rows_together(some, needed) for some in small_together(self.buckets))
        for bucket, table in chain.from_iterable(read):
            table = table.filter(pc.is_null(table["reason"]))
            if quality is not None:
                decided = quality(bucket.place)
                table = table.append_column("quality", pa.array(decided.scores))
                table = table.filter(pa.array(decided.stays))
            if verdicts is not None:
                table = table.filter(pa.array(verdicts(bucket.place).stays(table.num_rows)))
            if "source" in columns:
                sources = pa.array([bucket.source] * table.num_rows, pa.large_string())
                table = table.append_column("source", sources)
            yield table.select([name for name in columns if name in table.column_names])


def run_global_steps(
    corpus: Corpus, work: AnyPath, buckets: Sequence[Bucket], inputs: str, expected: int
) -> tuple[dict[str, int], dict[str, Any]]:
    """Run the steps that are not finished. Returns the documents that they reject, by reason, and the counts of the duplicates.

    inputs: digest of the partitions; expected: documents that these kept. Raises BessemerError when another number comes to the
    search for duplicates, InputError when one was read twice.
    """
    rejected = dict[str, int]()
    if corpus.quality.on:
        quality = _judge_quality(corpus, buckets, work, digest("quality", inputs))
        rejected["low_quality"] = quality["rejected"]
        expected -= quality["rejected"]
    decided = Decisions.load(work, corpus, ())
    parts = [BucketPart(some, decided) for some in small_together(buckets)]
    names, perform = (
        [source.name for source in corpus.sources],
        _performing("finding duplicates", DEDUP_BYTES, corpus),
    )
    made_of = digest("duplicates 3", inputs)
    found = find_duplicates(parts, corpus.dedup, work / "duplicates", made_of, names, perform)["statistics"]
    problem = f"{expected} documents passed the steps but {found['documents']} came to the search for duplicates"
    engine.require(found["documents"] == expected, problem)
    if corpus.dedup.lines:
        decided = Decisions.load(work, corpus, ("duplicates",))
        parts = [BucketPart((bucket,), decided) for bucket in buckets]
        perform = _performing("finding repeated lines", LINE_BYTES, corpus)
        find_lines(parts, corpus.dedup, work / LINES, digest(LINES, inputs), perform)
    removed = found["removed"]
    return rejected | {"exact_duplicate": removed["exact"], "near_duplicate": removed["near"]}, found


def _judge_quality(corpus: Corpus, buckets: Sequence[Bucket], work: AnyPath, made_of: str) -> dict[str, Any]:
    """Train or load the classifier, score every document, decide; the receipt of the step. made_of: digest."""
    from bessemer.corpus.filters.quality.classify import FOLDER, learn
    from bessemer.corpus.filters.quality.decide import SAMPLED, ScoreDocuments, decide

    settings, names = corpus.quality, tuple(source.name for source in corpus.sources)
    recorded = receipt(work / "quality", made_of)
    if recorded is not None:
        return recorded
    labelled = BucketPart(tuple(bucket for bucket in buckets if bucket.source in (*settings.high, *settings.low)))
    model = work / LEARNED
    learned = engine.run(lambda: build_once(model, made_of, lambda staged: learn(settings, names, labelled, staged)))

    sampled = SAMPLED / max(sum(one.size for one in buckets), 1)
    tasks = [
        ScoreDocuments(work, one.place, one.size, settings, one.source, made_of, BucketPart((one,)), model, sampled)
        for one in buckets
    ]

    def publish(staged: Path) -> dict[str, Any]:
        report = staged / QUALITY_REPORT
        report.mkdir()
        if (model / FOLDER).exists():
            copy_folder(model / FOLDER, report / FOLDER)
        return decide(settings, names, learned, tasks, _performing("scoring quality", QUALITY_BYTES, corpus), report)

    return build_once(work / "quality", made_of, publish)


def _performing(what: str, bytes_each: int, corpus: Corpus) -> Callable[[Sequence[CorpusTask]], list[dict[str, Any]]]:
    """Does tasks over documents, each of which counts as so many bytes, and gives their receipts."""
    return lambda tasks: list(run_tasks(what, "documents", tasks, bytes_each, corpus))
