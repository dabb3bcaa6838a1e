"""Steps that judge documents by the whole corpus: quality classifier, duplicates, repeated lines.

Each step judges the documents that the previous steps kept. Its tasks write to one folder, with receipts:

    steps/NAME/result/           counts and statistics of the step; report/ has files that are published with the corpus
    steps/NAME/verdicts/000000/  verdicts on a part, one file per bucket (see verdicts.py)
    steps/NAME/TASK/000000/      output of other tasks, deleted when the step ends
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import PlainSerializer, PlainValidator

from bessemer.common import extensions
from bessemer.common.errors import BessemerError, InputError
from bessemer.common.extensions import naming_faults
from bessemer.common.hashing import digest
from bessemer.corpus.filters.chain import filters_of
from bessemer.corpus.partition import Bucket, require, rows_together
from bessemer.corpus.readers.parts import in_groups
from bessemer.corpus.verdicts import Spans, VerdictFile, full_reason, make_verdicts, read_table, write_table
from bessemer.recipe import Corpus
from bessemer.recipe.section import first_duplicate
from bessemer.recipe.uses import ExtensionBase, make
from bessemer.run.files import stage_facts
from bessemer.run.stage import stage_is_current
from bessemer.run_tasks.run import run_tasks
from bessemer.run_tasks.task import Task, build_once, check_stop, from_plain, to_plain
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import each, entries, remove_tree, write_file

# In order. The steps that a recipe adds run before the last one, because that one edits texts.
BUILT_IN: Mapping[str, str] = {
    "quality": "bessemer.corpus.filters.quality.decide:QualityStep",
    "duplicates": "bessemer.corpus.dedup.search:DuplicateStep",
    "lines": "bessemer.corpus.dedup.lines:LineStep",
}
TABLES = {"quality": "quality", "duplicates": "dedup", "lines": "dedup"}  # step -> its table in [corpus]
OTHER_STATISTICS = ("version", "sources", "totals", "contamination", "reasons")  # keys of statistics.json
DECIDED = "decided/decided.json"
RESULT, VERDICTS, REPORT = "result", "verdicts", "report"
CUT = ("edited", "spans", "removed_characters")  # counts of edits: documents, cut spans, cut characters
GROUP_BYTES = 16 << 20  # target size of a part: exchanging data between many small parts costs more than comparing it

Receipts = list[dict[str, Any]]
Perform = Callable[[Sequence[Task]], Receipts]


def perform_here(tasks: Sequence[Task]) -> Receipts:
    """Run tasks one after another in this process. Returns the result dict (receipt) of each task."""
    return [task.run() for task in tasks]


class DocumentPart(ABC):
    """The documents that one task reads, a subset of the corpus. Each call yields them in the same order.

    Attributes:
        corpus: Path of the earlier corpus that has the documents; "" for this corpus.
        has_signatures: True if cleaning stored hashes and signatures of the documents.
    """

    corpus: str = ""
    has_signatures: ClassVar[bool] = False

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of documents, or an upper bound."""

    @abstractmethod
    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield tables of the documents with the requested columns that exist."""


# Pydantic type of a task's field that holds a part
AnyPart = Annotated[DocumentPart, PlainValidator(partial(from_plain, base=DocumentPart)), PlainSerializer(to_plain)]


@dataclass(frozen=True)
class BucketPart(DocumentPart):
    """The documents of some buckets, without those that previous steps rejected."""

    buckets: tuple[Bucket, ...]

    has_signatures = True

    @property
    def size(self) -> int:
        """Number of documents, including rejected ones."""
        return sum(bucket.size for bucket in self.buckets)

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield one table per bucket, sorted by identity, with the requested columns that exist."""
        for bucket, table in rows_together(self.buckets, sorted({*columns, "identity", "reason"})):
            table = table.filter(pc.is_null(table["reason"]))
            if "source" in columns:
                table = table.append_column("source", pa.array([bucket.source] * len(table), pa.large_string()))
            yield table.select([name for name in columns if name in table.column_names])


@dataclass(frozen=True)
class StepTask(Task):
    """A task of a step on one part or range (`number`). Its output folder is named after the class."""

    number: int

    @property
    def folder(self) -> AnyPath:
        return self.result(type(self).__name__, self.number)

    def __str__(self) -> str:
        return f"{self.work.name}, {type(self).__name__} {self.number}"

    def result(self, task: str, number: int) -> AnyPath:
        """Return the output folder of one task of this step, by the class name and the number of the task."""
        return self.work / task / f"{number:06d}"


@dataclass(frozen=True)
class VerdictTask(StepTask):
    """A task that writes and counts a step's verdicts on documents: rejections, edits and scores."""

    @property
    def folder(self) -> AnyPath:
        return self.result(VERDICTS, self.number)

    @abstractmethod
    def judge(self) -> Iterator[tuple[int, pa.Table]]:
        """Yield, for each table of documents in the part, its number of rows and a table of verdicts (verdicts.SCHEMA)."""

    def make(self, folder: Path) -> dict[str, Any]:
        documents, rejected, cut = 0, Counter[str](), dict.fromkeys(CUT, 0)
        for number, (num_rows, verdicts) in enumerate(self.judge()):
            write_table(folder / f"{number:06d}.arrow", verdicts.sort_by("row"))
            documents += num_rows
            rejected.update(verdicts["reason"].drop_null().to_pylist())
            edits = verdicts["spans"].drop_null().to_pylist()
            cut["edited"] += len(edits)
            cut["spans"] += sum(map(len, edits))
            cut["removed_characters"] += sum(end - start for spans in edits for start, end in spans)
        return {"documents": documents, "rejected": rejected, "cut": cut}


@dataclass(frozen=True)
class CorpusDocuments:
    """The documents that a step reads, in parts, and the folder where its tasks write.

    Attributes:
        parts: The documents; one task reads one part.
        folder: Folder of the step in the work folder of the build.
        made_of: Digest of the documents. Finished tasks are reused while it is equal.
        corpus: The `[corpus]` table of the recipe.
        perform: Function that runs tasks and returns the result dict (receipt) of each.
    """

    parts: Sequence[DocumentPart]
    folder: AnyPath
    made_of: str
    corpus: Corpus = field(default_factory=Corpus)
    perform: Perform = perform_here

    @cached_property
    def sizes(self) -> list[int]:
        """Number of documents in each part."""
        return [part.size for part in self.parts]

    def tables(self, columns: Sequence[str], sources: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the tables of all parts with some columns, skipping documents of other sources where possible."""
        for part in self.parts:
            if isinstance(part, BucketPart):
                part = BucketPart(tuple(bucket for bucket in part.buckets if bucket.source in sources))
            yield from part(columns)

    def on_parts(self, task: type[StepTask], reads: bool = False, **more: Any) -> Receipts:
        """Run one task of a class per part and return the result dict of each.

        With `reads`, each task gets its part as the field `part`. `more` are further fields of the tasks.
        """
        numbered = enumerate(zip(self.parts, self.sizes, strict=True))
        return self.perform([
            task(self.folder, self.made_of, size, number, **more, **({"part": part} if reads else {}))
            for number, (part, size) in numbered
        ])  # fmt: skip

    def on_ranges(self, task: type[StepTask], num_ranges: int, **more: Any) -> Receipts:
        """Run `num_ranges` tasks of a class, numbered from 0, and return the result dict of each. `more` are further fields."""
        size = sum(self.sizes) // max(num_ranges, 1)
        return self.perform([task(self.folder, self.made_of, size, number, **more) for number in range(num_ranges)])


class DocumentVerdict(NamedTuple):
    """The decision of a step on one document.

    Attributes:
        row: Row of the document in the table that `GlobalStep.judge` gets.
        reason: One word for the reason of a rejection; "" in a step with one reason, None to keep the document.
        detail: The measured value, or the text that caused the rejection.
        spans: Character ranges [start, end) to cut out of a document that is kept, in ascending order.
        score: A value of the document, which later steps read as a column with the name of this step.
    """

    row: int
    reason: str | None = ""
    detail: str = ""
    spans: Spans = ()
    score: float | None = None


class GlobalStep(ExtensionBase, ABC):
    """A step that judges each document by all documents of the corpus. The fields of a subclass are its settings.

    A subclass defines `judge`, and if needed `collect` and `decide`. A step with its own tasks overrides `run` instead.

    Attributes:
        columns: Columns of each document that `collect` reads: identity, text, source, path, url, language, metadata,
            label, characters.
        reasons: A dict from each reason for rejection to its meaning.
        advice: Advice to users on how to keep the documents that it rejects.
        action: What the step does, for the progress bar, such as "finding duplicates".
        document_bytes: Time per document, as the number of input bytes that cleaning handles in it.
    """

    columns: ClassVar[tuple[str, ...]] = ("identity", "text")
    reasons: ClassVar[Mapping[str, str]] = {}
    advice: ClassVar[str] = ""
    action: ClassVar[str] = ""
    document_bytes: ClassVar[int] = 1000

    @property
    def is_on(self) -> bool:
        """True if the recipe enables the step."""
        return True

    @property
    def prefix(self) -> str:
        """Prefix of the step's reasons in the statistics; "" for built-in steps."""
        return "" if self.name in TABLES else self.name

    def collect(self, documents: pa.Table) -> pa.Table:
        """Measure the documents of a bucket. Runs in worker processes.

        Returns a table of any columns with one row per document, which `decide` and `judge` get as `facts`.
        """
        return documents

    def decide(self, facts: Iterator[pa.Table], report: Path) -> Any:
        """Aggregate the facts about all documents into a JSON value, which statistics.json shows under the name of the step.

        Runs once.

        Args:
            facts: One table per bucket, in the order of the published corpus.
            report: A folder for files to publish with the corpus.
        """
        return None

    def judge(self, facts: pa.Table, decided: Any) -> Iterable[DocumentVerdict]:
        """Return verdicts on the documents of a bucket. A document without a verdict is kept. Runs in worker processes.

        Args:
            facts: The table that `collect` returned for this bucket.
            decided: The value that `decide` returned.
        """
        raise InputError(f"{self.name}: {type(self).__qualname__} lacks the method judge(self, facts, decided)")

    def run(self, documents: CorpusDocuments, report: Path) -> Any:
        """Judge all documents. The last tasks must be one `VerdictTask` per part.

        `report` is a folder for files to publish with the corpus. Returns a JSON value for statistics.json, or None.
        """
        collected = documents.on_parts(CollectFacts, reads=True, step=self)
        places = [
            documents.folder / CollectFacts.__name__ / f"{number:06d}" / f"{index:06d}.arrow"
            for number, done in enumerate(collected)
            for index in range(done["tables"])
        ]
        with naming_faults(self, "decide", "over all documents", BessemerError):
            decided = json.dumps(self.decide(each(read_table, places), report))
        write_file(documents.folder / DECIDED, decided.encode())
        documents.on_parts(JudgeFacts, step=self)
        return json.loads(decided)


# Pydantic type of a task's field that holds a step
AnyStep = Annotated[GlobalStep, PlainValidator(partial(from_plain, base=GlobalStep)), PlainSerializer(to_plain)]


@dataclass(frozen=True)
class CollectFacts(StepTask):
    """A task that calls `GlobalStep.collect` on each table of a part and writes the results, one file per table."""

    step: AnyStep
    part: AnyPart

    def make(self, folder: Path) -> dict[str, Any]:
        number = 0
        for number, table in enumerate(self.part(self.step.columns), 1):
            with naming_faults(self.step, "collect", str(self), BessemerError):
                facts = _check_facts(len(table), self.step.collect(table))
            write_table(folder / f"{number - 1:06d}.arrow", facts)
            check_stop()
        return {"tables": number}


def _check_facts(num_rows: int, facts: Any) -> pa.Table:
    if not isinstance(facts, pa.Table) or len(facts) != num_rows:
        raise ValueError(f"it must return a pyarrow.Table of {num_rows} rows, one for each document")
    return facts


@dataclass(frozen=True)
class JudgeFacts(VerdictTask):
    """A task that calls `GlobalStep.judge` on the tables of `CollectFacts` and writes the verdicts."""

    step: AnyStep

    def judge(self) -> Iterator[tuple[int, pa.Table]]:
        decided = json.loads((self.work / DECIDED).read_bytes())
        before = self.result(CollectFacts.__name__, self.number)
        for number in range(stage_facts(before)["tables"]):
            facts = read_table(before / f"{number:06d}.arrow")
            with naming_faults(self.step, "judge", str(self), BessemerError):
                verdicts = _make_table(len(facts), self.step.judge(facts, decided))
            yield len(facts), verdicts


def _make_table(num_rows: int, verdicts: Iterable[DocumentVerdict]) -> pa.Table:
    """Convert verdicts on `num_rows` documents to a table of verdicts.SCHEMA.

    Raises ValueError for a row out of range, two verdicts on a document, and spans that are not ascending.
    """
    verdicts = list(verdicts)
    rows = [verdict.row for verdict in verdicts]
    for verdict in verdicts:
        offsets = list(chain(*verdict.spans))
        if not 0 <= verdict.row < num_rows or offsets != sorted(offsets) or min(offsets, default=0) < 0:
            raise ValueError(f"{verdict}: a verdict needs a row below {num_rows} and ascending spans")
    if len(set(rows)) < len(rows):
        raise ValueError("it returned two verdicts on one document")
    columns = {name: [getattr(verdict, name) for verdict in verdicts] for name in ("reason", "detail", "score")}
    return make_verdicts(rows, spans=[list(verdict.spans) or None for verdict in verdicts], **columns)


def list_steps(corpus: Corpus) -> list[GlobalStep]:
    """Return the global steps of a corpus in order, built-in ones and those of the recipe, with their settings.

    Raises InputError for an unusable step of the recipe.
    """
    steps = [
        extensions.find("global_steps", name).target(**dict(getattr(corpus, table))) for name, table in TABLES.items()
    ]
    steps[-1:-1] = [make("global_steps", one.use, one.settings) for one in corpus.steps]
    others = {*OTHER_STATISTICS, *(one.name for one in filters_of(corpus))}
    if twice := first_duplicate([*others, *(step.name for step in steps)]):
        raise InputError(f"corpus.steps: the name {twice!r} is taken; set another `name` in the class")
    return steps


def run_step(step: GlobalStep, documents: CorpusDocuments) -> dict[str, Any]:
    """Run a step, or reuse its result if it is complete.

    Returns a dict with the number of `documents` that it judged, the number `rejected` by reason, and its `statistics`,
    the value that `step.run` returned.
    """
    result = documents.folder / RESULT
    written = [documents.folder / VERDICTS / f"{number:06d}" for number in range(len(documents.parts))]

    def make(folder: Path) -> dict[str, Any]:
        (folder / REPORT).mkdir()
        statistics, rejected = step.run(documents, folder / REPORT), Counter[str]()
        receipts = list(each(stage_facts, written))
        for done in receipts:
            rejected.update({full_reason(step.prefix, word): count for word, count in done["rejected"].items()})
        count = sum(done["documents"] for done in receipts)
        return {"documents": count, "rejected": dict(sorted(rejected.items())), "statistics": statistics}

    if not all(stage_is_current(folder, documents.made_of) for folder in written):
        remove_tree(result)
    recorded = build_once(result, documents.made_of, make)
    for path in entries(documents.folder):
        if path.name not in (RESULT, VERDICTS):
            remove_tree(path)
    return recorded


def step_folder(work: AnyPath, name: str) -> AnyPath:
    """Return the folder of a step in the work folder of a build."""
    return work / "steps" / name


def report_folder(work: AnyPath, name: str) -> AnyPath:
    """Return the folder with the files of a step that are published with the corpus."""
    return step_folder(work, name) / RESULT / REPORT


def run_global_steps(
    corpus: Corpus, work: AnyPath, buckets: Sequence[Bucket], inputs: str, expected: int
) -> tuple[list[Bucket], dict[str, dict[str, Any]]]:
    """Run the global steps that are not complete yet.

    Returns the buckets with the paths of their verdict files, and the result dict of `run_step` for each step by name.

    Args:
        corpus: The `[corpus]` table of the recipe.
        work: The work folder of the build.
        buckets: The cleaned documents.
        inputs: Digest of the cleaned documents.
        expected: Number of documents that the filters kept. A step that receives another number raises BessemerError.
    """
    receipts = dict[str, dict[str, Any]]()
    for step in list_steps(corpus):
        if not step.is_on:
            receipts[step.name] = {"rejected": {}, "statistics": None}
            continue
        parts = [BucketPart(some) for some in in_groups(buckets, GROUP_BYTES, attrgetter("num_bytes"))]

        def perform(tasks: Sequence[Task], step: GlobalStep = step) -> Receipts:
            return list(run_tasks(step.action or step.name, "documents", tasks, step.document_bytes, corpus))

        folder = step_folder(work, step.name)
        done = run_step(step, CorpusDocuments(parts, folder, digest(step.name, inputs), corpus, perform))
        came = done["documents"]
        require(came == expected, f"{expected} documents passed the steps but {came} came to the step {step.name!r}")
        expected -= sum(done["rejected"].values())
        receipts[step.name] = done
        files = (
            VerdictFile(step.name, folder / VERDICTS / f"{number:06d}" / f"{index:06d}.arrow", step.prefix)
            for number, part in enumerate(parts)
            for index in range(len(part.buckets))
        )
        buckets = [
            replace(bucket, verdicts=(*bucket.verdicts, file)) for bucket, file in zip(buckets, files, strict=True)
        ]
    return list(buckets), receipts
