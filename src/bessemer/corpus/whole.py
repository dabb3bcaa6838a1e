"""Steps over the whole corpus: quality classifier, duplicates, repeated paragraphs and spans.

Each runs on the documents kept so far, into a folder with a receipt; scores and duplicates as tasks, the others once, in
canonical order and bucket by bucket:

    classifier/, scores/000000/                     the classifier; the scores of a bucket (quality/task.py)
    quality/{identities,scores,stays,band}.npy      one row a document, sorted by identity
    quality/report/                                 quality.json and the model, published with the corpus
    duplicates/result/, duplicates/NameKeepers/     the counts; verdicts, by the bucket of what stays (dedup/search.py)
    repeats/texts.parquet                           identity, text of edited documents; a row group a bucket
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bessemer.corpus import engine
from bessemer.corpus.dedup.search import RESULT, find_duplicates, verdicts_of
from bessemer.corpus.dedup.verdicts import (
    DuplicateVerdicts,
    Edit,
    EditStatistics,
    earlier_files,
    parquet_tables,
    with_texts,
)  # fmt: skip
from bessemer.corpus.partition import Bucket
from bessemer.corpus.work import CorpusTask, build_once
from bessemer.corpus.worker import run_tasks
from bessemer.hashing import digest
from bessemer.recipe import Corpus, Dedup
from bessemer.run import STAGE_FILE, read_json

if TYPE_CHECKING:
    from bessemer.corpus.quality.classify import QualityVerdicts

QUALITY_REPORT = "report"
LEARNED = "classifier"  # folder of the trained classifier
EDITED_TEXTS = "texts.parquet"

# of documents whose columns are read, compared with cleaning when the start-up time of workers is weighed
DEDUP_BYTES, QUALITY_BYTES = 25, 1000

Clock: TypeAlias = "Callable[[str], AbstractContextManager[None]]"  # records the seconds of a named step


@dataclass(frozen=True)
class Decisions:
    """What the steps that are finished decided about each document, mapped into memory."""

    quality: QualityVerdicts | None = None
    verdicts: DuplicateVerdicts | None = None
    edited: EditedTexts | None = None

    @classmethod
    def load(cls, work: Path, corpus: Corpus) -> Decisions:
        """Read the folders of all steps that the recipe asks for."""
        quality = None
        if corpus.quality.on:
            from bessemer.corpus.quality.classify import QualityVerdicts

            quality = QualityVerdicts.load(work / "quality")
        edited = EditedTexts.load(work / "repeats") if cuts_repeats(corpus.dedup) else None
        return cls(quality, _verdicts(work, corpus.dedup), edited)


def _verdicts(work: Path, settings: Dedup) -> DuplicateVerdicts:
    folder = work / "duplicates"
    return verdicts_of(folder, read_json(folder / RESULT / STAGE_FILE)["parts"], settings)


@dataclass(frozen=True)
class KeptDocuments:
    """The documents that all steps so far kept. A call with column names yields them as tables, by source and identity,
    each time in the same order. Column `quality` exists when the documents have scores."""

    buckets: Sequence[Bucket]  # in the order of the published corpus
    decided: Decisions = Decisions()

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        for _, table in self.by_bucket(columns):
            yield table

    def by_bucket(self, columns: Sequence[str]) -> Iterator[tuple[Bucket, pa.Table]]:
        """Each bucket that has documents, with them."""
        quality, verdicts, edited = self.decided.quality, self.decided.verdicts, self.decided.edited
        for bucket in self.buckets:
            table = bucket.rows(sorted({*columns, "identity", "reason"} - {"source", "quality"}))
            table = table.filter(pc.is_null(table["reason"]))
            if quality is not None:
                rows = quality.rows(table["identity"].to_pylist())
                table = table.append_column("quality", pa.array(quality.scores[rows]))
                table = table.filter(pa.array(quality.stays[rows]))
            if verdicts is not None:
                table = table.filter(pa.array(verdicts(bucket.place).stays(table.num_rows)))
            if edited is not None and "text" in columns:
                table = with_edited(table, edited(bucket))
            if "source" in columns:
                sources = pa.array([bucket.source] * table.num_rows, pa.large_string())
                table = table.append_column("source", sources)
            if table.num_rows:
                yield bucket, table.select([name for name in columns if name in table.column_names])


@dataclass(frozen=True)
class GlobalStepReceipts:
    """Receipts of the global steps; None for a step that is off."""

    quality: dict[str, Any] | None
    duplicates: dict[str, Any]
    repeats: dict[str, Any] | None

    @property
    def rejected(self) -> dict[str, int]:
        """Documents that the steps reject, by reason."""
        removed = self.duplicates["statistics"]["removed"]
        found = {"exact_duplicate": removed["exact"], "near_duplicate": removed["near"]}
        return found if self.quality is None else found | {"low_quality": self.quality["rejected"]}

    def statistics(self) -> dict[str, Any]:
        """For statistics.json."""
        duplicates = self.duplicates["statistics"]
        values = {"duplicates": duplicates | duplicates["removed"]}
        return values if self.repeats is None else values | {"repeats": self.repeats["counts"]}


def run_global_steps(
    corpus: Corpus, work: Path, buckets: Sequence[Bucket], inputs: str, expected: int, timed: Clock
) -> GlobalStepReceipts:
    """Run the steps that are not finished. inputs: digest of the partitions; expected: documents that these kept."""
    documents = KeptDocuments(buckets)
    quality = repeats = None

    def step(name: str, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        with timed(name):
            return engine.run(lambda: build_once(work / name, digest(name, inputs), make))

    if corpus.quality.on:
        from bessemer.corpus.quality.classify import QualityVerdicts

        with timed("quality"):
            quality = _judge_quality(corpus, buckets, work, digest("quality", inputs))
        expected -= quality["rejected"]
        documents = replace(documents, decided=Decisions(QualityVerdicts.load(work / "quality")))
    with timed("duplicates"):
        parts = [BucketPart(bucket, corpus.quality.on) for bucket in buckets]
        duplicates = run_dedup_step(parts, corpus, work / "duplicates", digest("duplicates", inputs), expected)
    if cuts_repeats(corpus.dedup):
        decided = replace(documents.decided, verdicts=_verdicts(work, corpus.dedup))
        documents = replace(documents, decided=decided)
        repeats = step("repeats", lambda staged: _cut_repeats(documents, corpus.dedup, staged))
    return GlobalStepReceipts(quality, duplicates, repeats)


def _judge_quality(corpus: Corpus, buckets: Sequence[Bucket], work: Path, made_of: str) -> dict[str, Any]:
    """Train or load the classifier, score every document as tasks, decide; the receipt of the step. made_of: digest."""
    from bessemer.corpus.quality.classify import FOLDER, decide, learn
    from bessemer.corpus.quality.task import ScoreDocuments

    settings, names = corpus.quality, tuple(source.name for source in corpus.sources)
    labelled = KeptDocuments([bucket for bucket in buckets if bucket.source in (*settings.high, *settings.low)])
    model = work / LEARNED
    learned = engine.run(lambda: build_once(model, made_of, lambda staged: learn(settings, names, labelled, staged)))
    started = perf_counter()
    tasks = [
        ScoreDocuments(work, bucket.place, BucketPart(bucket, False), bucket.size, settings, names, made_of, model)
        for bucket in buckets
    ]
    for _ in run_tasks("scoring quality", "documents", tasks, QUALITY_BYTES, corpus):
        pass  # the scores are read where they are needed

    def judge(staged: Path) -> dict[str, Any]:
        report = staged / QUALITY_REPORT
        report.mkdir()
        if (model / FOLDER).exists():
            shutil.copytree(model / FOLDER, report / FOLDER)
        scores = chain.from_iterable(task.scores() for task in tasks)
        judgement = decide(settings, names, learned, scores, started, report)
        judgement.save(staged)
        num_rejected = int((~judgement.stays).sum())
        return {"limit": judgement.limit, "documents": len(judgement.scores), "rejected": num_rejected}

    return engine.run(lambda: build_once(work / "quality", made_of, judge))


@dataclass(frozen=True)
class BucketPart:
    """The documents of one bucket that the steps before the search for duplicates kept."""

    bucket: Bucket
    is_scored: bool  # there are quality scores
    corpus: str = ""

    @property
    def size(self) -> int:
        """Documents, rejected ones included."""
        return self.bucket.size

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """They as a table, with those of the columns that exist."""
        decided = Decisions()
        if self.is_scored:
            from bessemer.corpus.quality.classify import QualityVerdicts

            decided = Decisions(QualityVerdicts.load(self.bucket.work / "quality"))
        return KeptDocuments([self.bucket], decided)(columns)


def run_dedup_step(
    parts: Sequence[BucketPart], corpus: Corpus, folder: Path, made_of: str, expected: int
) -> dict[str, Any]:
    """Find the duplicates, as tasks. Raises BessemerError when another number of documents than `expected` arrives,
    InputError when one was read twice."""

    def perform(tasks: Sequence[CorpusTask]) -> list[dict[str, Any]]:
        return list(run_tasks("finding duplicates", "documents", tasks, DEDUP_BYTES, corpus))

    names = [source.name for source in corpus.sources]
    done = find_duplicates(parts, corpus.dedup, folder, made_of, names, perform)
    came = done["statistics"]["documents"]
    problem = f"{expected} documents passed the steps but {came} came to the search for duplicates"
    engine.require(came == expected, problem)
    return done


# --- Repeated paragraphs and spans


def cuts_repeats(settings: Dedup) -> bool:
    """Whether the recipe removes repeated paragraphs or spans."""
    return settings.paragraphs.mode != "off" or settings.substrings.unit != "off"


def _cut_repeats(documents: KeptDocuments, settings: Dedup, staged: Path) -> dict[str, Any]:
    """Remove repeats from all documents: paragraphs, then spans of what stays."""
    counts: dict[str, Any] = {}
    groups: list[list[Any]] = []
    passes = {
        "paragraphs": (settings.paragraphs.mode, _without_paragraphs),
        "substrings": (settings.substrings.unit, _without_spans),
    }
    for name, (mode, remove) in passes.items():
        if mode == "off":
            continue
        statistics, new = EditStatistics(), staged / f"new-{EDITED_TEXTS}"
        groups = _write_edited(documents, remove(documents, settings, staged), new, statistics)
        new.replace(staged / EDITED_TEXTS)
        edited = EditedTexts.of(staged / EDITED_TEXTS, groups)
        documents = replace(documents, decided=replace(documents.decided, edited=edited))
        counts[name] = vars(statistics)
    return {"groups": groups, "counts": counts}


def _without_paragraphs(
    documents: KeptDocuments, settings: Dedup, staged: Path
) -> Iterator[tuple[pa.Table, list[Edit]]]:
    from bessemer.corpus.dedup.paragraphs import insert_paragraphs, paragraph_filter, remove_paragraphs

    earlier = [parquet_tables(earlier_files(folder)) for folder in settings.against]
    words = sum(pc.sum(table["words"]).as_py() or 0 for table in documents(["words"]))
    for read in earlier:
        words += sum(text.count(" ") + 1 for table in read(["text"]) for text in table["text"].to_pylist())
    bloom = paragraph_filter(words, settings.paragraphs)
    for read in earlier:
        insert_paragraphs(read(["text"]), bloom, settings.paragraphs)
    yield from remove_paragraphs(documents(["identity", "text"]), bloom, settings.paragraphs)


def _without_spans(documents: KeptDocuments, settings: Dedup, staged: Path) -> Iterator[tuple[pa.Table, list[Edit]]]:
    from bessemer.corpus.dedup.substrings import remove_substrings

    return remove_substrings(documents, settings.substrings, staged / "scratch", ("identity", "text"))


@dataclass(frozen=True)
class EditedTexts:
    """Texts of the documents that lost repeats: a Parquet file with a row group for each bucket that has some."""

    path: Path
    groups: dict[tuple[str, int], int]  # row group by source and bucket

    @classmethod
    def of(cls, path: Path, groups: list[list[Any]]) -> EditedTexts:
        """groups: source and bucket of each row group."""
        return cls(path, {(source, bucket): number for number, (source, bucket) in enumerate(groups)})

    @classmethod
    def load(cls, folder: Path) -> EditedTexts:
        """The result of the finished step."""
        return cls.of(folder / EDITED_TEXTS, read_json(folder / STAGE_FILE)["groups"])

    def __call__(self, bucket: Bucket) -> dict[str, str]:
        """The edited texts of a bucket by identity."""
        group = self.groups.get((bucket.source, bucket.number))
        if group is None:
            return {}
        with pq.ParquetFile(self.path) as file:
            table = file.read_row_group(group)
        return dict(zip(table["identity"].to_pylist(), table["text"].to_pylist(), strict=True))


def with_edited(table: pa.Table, edited: dict[str, str]) -> pa.Table:
    """The table (columns identity, text) with the edited texts by identity, and their lengths."""
    if not edited:
        return table
    columns = (table[name].to_pylist() for name in ("identity", "text"))
    return with_texts(table, [edited.get(name, old) for name, old in zip(*columns, strict=True)])


def _write_edited(
    documents: KeptDocuments, passed: Iterable[tuple[pa.Table, list[Edit]]], path: Path, statistics: EditStatistics
) -> list[list[Any]]:
    """Write the documents that lost something in this pass or the one before; returns [source, bucket] by row group."""
    schema = pa.schema([("identity", pa.string()), ("text", pa.large_string())])
    before = documents.decided.edited
    groups: list[list[Any]] = []
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        # One table comes for each bucket that has documents.
        for (bucket, _), (table, edits) in zip(documents.by_bucket(["identity"]), passed, strict=True):
            statistics.add(table, edits)
            new = before(bucket) if before is not None else {}
            names, texts = table["identity"].to_pylist(), table["text"]
            new |= {names[edit.row]: texts[edit.row].as_py() for edit in edits}
            if new:
                chosen = sorted(new)
                file.write_table(pa.table({"identity": chosen, "text": [new[name] for name in chosen]}, schema=schema))
                groups.append([bucket.source, bucket.number])
    return groups
