"""Steps over all documents of a corpus: quality classifier, duplicates, repeated lines.

Each judges the documents that the steps before it kept, by tasks, in a folder with receipts:

    steps/NAME/result/           counts and statistics of the step; report/: files published with the corpus
    steps/NAME/verdicts/000000/  the verdicts on a part: a file for each of its buckets (verdicts.py)
    steps/NAME/TASK/000000/      what other tasks wrote, until the step ends
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
from bessemer.common.hashing import digest
from bessemer.corpus.filters.chain import filters_of
from bessemer.corpus.partition import Bucket, rows_together
from bessemer.corpus.readers.parts import in_groups
from bessemer.corpus.verdicts import Spans, VerdictFile, full_reason, make_verdicts, read_table, write_table
from bessemer.recipe import Corpus
from bessemer.recipe.section import first_duplicate
from bessemer.recipe.uses import ExtensionBase, make
from bessemer.run_tasks.run import run_tasks
from bessemer.run_tasks.task import Task, build_once, check_stop, from_plain, require, to_plain
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import each, entries, is_complete, read_receipt, remove_tree, write_file

# The steps in their order; those that a recipe adds come before the last one, which changes texts
BUILT_IN: Mapping[str, str] = {
    "quality": "bessemer.corpus.filters.quality.decide:QualityStep",
    "duplicates": "bessemer.corpus.dedup.search:DuplicateStep",
    "lines": "bessemer.corpus.dedup.lines:LineStep",
}
TABLES = {"quality": "quality", "duplicates": "dedup", "lines": "dedup"}  # of [corpus], with the settings
OTHER_STATISTICS = ("version", "sources", "totals", "contamination", "reasons")  # keys of statistics.json
DECIDED = "decided.json"
RESULT, VERDICTS, REPORT = "result", "verdicts", "report"
CUT = ("edited", "spans", "removed_characters")  # counts of what is cut out of documents
GROUP_BYTES = 16 << 20  # of rows in buckets that are one part: many small ones cost more to exchange than to compare

Receipts = list[dict[str, Any]]
Perform = Callable[[Sequence[Task]], Receipts]


def perform_here(tasks: Sequence[Task]) -> Receipts:
    """Do tasks one after the other in this process."""
    return [task.run() for task in tasks]


class DocumentPart(ABC):
    """Documents that one task reads: they arrive in the same order each time."""

    corpus: str = ""  # the earlier corpus that they are of; "" for this one

    @property
    @abstractmethod
    def size(self) -> int:
        """Documents, or a bound of them."""

    @abstractmethod
    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Tables with those of the columns that exist."""


# A part as a field of a task
AnyPart = Annotated[DocumentPart, PlainValidator(partial(from_plain, base=DocumentPart)), PlainSerializer(to_plain)]


@dataclass(frozen=True)
class BucketPart(DocumentPart):
    """The documents of some buckets that the steps so far kept."""

    buckets: tuple[Bucket, ...]

    @property
    def size(self) -> int:
        """Documents, rejected ones included."""
        return sum(bucket.size for bucket in self.buckets)

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """A table for each bucket, sorted by identity, with those of the columns that exist."""
        for bucket, table in rows_together(self.buckets, sorted({*columns, "identity", "reason"})):
            table = table.filter(pc.is_null(table["reason"]))
            if "source" in columns:
                table = table.append_column("source", pa.array([bucket.source] * len(table), pa.large_string()))
            yield table.select([name for name in columns if name in table.column_names])


@dataclass(frozen=True)
class StepTask(Task):
    """A part or range (`number`) in a step; its result is in a folder named after the class of the task."""

    made_of: str  # digest of the documents
    number: int
    amount: int  # of work: documents

    @property
    def size(self) -> int:
        return self.amount

    @property
    def folder(self) -> AnyPath:
        return self.result(type(self).__name__, self.number)

    @property
    def inputs(self) -> str:
        return self.made_of

    def __str__(self) -> str:
        return f"{self.work.name}, {type(self).__name__} {self.number}"

    def result(self, task: str, number: int) -> AnyPath:
        """Return what the task of this class and number wrote."""
        return self.work / task / f"{number:06d}"


@dataclass(frozen=True)
class VerdictTask(StepTask):
    """Write the verdicts of a step on the documents of a part, and count them."""

    @property
    def folder(self) -> AnyPath:
        return self.result(VERDICTS, self.number)

    @abstractmethod
    def judge(self) -> Iterator[tuple[int, pa.Table]]:
        """Yield the number of documents in each table of the part, and the verdicts on them."""

    def make(self, folder: Path) -> dict[str, Any]:
        documents, rejected, cut, tables = 0, Counter[str](), dict.fromkeys(CUT, 0), list[int]()
        for number, (num_rows, verdicts) in enumerate(self.judge()):
            write_table(folder / f"{number:06d}.arrow", verdicts.sort_by("row"))
            documents += num_rows
            tables.append(len(verdicts) - verdicts["reason"].null_count)
            rejected.update(verdicts["reason"].drop_null().to_pylist())
            edits = verdicts["spans"].drop_null().to_pylist()
            cut["edited"] += len(edits)
            cut["spans"] += sum(map(len, edits))
            cut["removed_characters"] += sum(end - start for spans in edits for start, end in spans)
        return {"documents": documents, "rejected": rejected, "cut": cut, "tables": tables}


@dataclass(frozen=True)
class CorpusDocuments:
    """The documents that come to a step, in parts, and where it works. made_of: their digest."""

    parts: Sequence[DocumentPart]
    folder: AnyPath
    made_of: str
    corpus: Corpus = field(default_factory=Corpus)
    perform: Perform = perform_here

    @cached_property
    def sizes(self) -> list[int]:
        """Documents of each part."""
        return [part.size for part in self.parts]

    def tables(self, columns: Sequence[str], sources: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the tables of all parts, as far as possible those of some sources only."""
        for part in self.parts:
            if isinstance(part, BucketPart):
                part = BucketPart(tuple(bucket for bucket in part.buckets if bucket.source in sources))
            yield from part(columns)

    def on_parts(
        self, task: type[StepTask], sizes: Sequence[int] | None = None, reads: bool = False, **more: Any
    ) -> Receipts:
        """Do a task for each part; `reads`: of its documents. sizes: the work of each part."""
        numbered = enumerate(zip(self.parts, sizes or self.sizes, strict=True))
        return self.perform([
            task(self.folder, self.made_of, number, size, **more, **({"part": part} if reads else {}))
            for number, (part, size) in numbered
        ])  # fmt: skip

    def on_ranges(self, task: type[StepTask], num_ranges: int, **more: Any) -> Receipts:
        """Do a task for each of `num_ranges` ranges."""
        size = sum(self.sizes) // max(num_ranges, 1)
        return self.perform([task(self.folder, self.made_of, number, size, **more) for number in range(num_ranges)])


class DocumentVerdict(NamedTuple):
    """What a step decides about one document.

    Attributes:
        row: Its place in the table of facts.
        reason: Why it is rejected, in a word; "" in a step with one reason, None to keep it.
        detail: The measured value, or what was found.
        spans: Characters [start, end) to cut out of the text of a document that is kept, ascending.
    """

    row: int
    reason: str | None = ""
    detail: str = ""
    spans: Spans = ()


class GlobalStep(ExtensionBase, ABC):
    """Judges documents by what all documents of the corpus say together. Fields of a subclass are its settings.

    A subclass defines `judge`, and where it needs them `collect` and `decide`; or `run`, for a step with tasks of its own.

    Attributes:
        columns: What `collect` reads of each document: identity, text, source, path, url, language, metadata, label,
            characters.
        reasons: The meaning of each reason for which it rejects, by its word.
        advice: How to keep what it rejects.
    """

    columns: ClassVar[tuple[str, ...]] = ("identity", "text")
    reasons: ClassVar[Mapping[str, str]] = {}
    advice: ClassVar[str] = ""
    action: ClassVar[str] = ""  # for the progress bar
    document_bytes: ClassVar[int] = 1000  # of input that a document costs, compared with cleaning

    @property
    def is_on(self) -> bool:
        """Whether the recipe asks for it."""
        return True

    @property
    def prefix(self) -> str:
        """What comes before its reasons in statistics."""
        return "" if self.name in TABLES else self.name

    def collect(self, documents: pa.Table) -> pa.Table:
        """Return a row of facts about each document of a bucket, which `decide` and `judge` read. Runs in worker processes."""
        return documents

    def decide(self, facts: Iterator[pa.Table], report: Path) -> Any:
        """Return what the facts about all documents say, as a value of JSON; it is in statistics.json under the name of the step.

        Runs once. `facts` has a table for each bucket, in the order of the published corpus; files in the folder `report` are
        published with it.
        """
        return None

    def judge(self, facts: pa.Table, decided: Any) -> Iterable[DocumentVerdict]:
        """Return verdicts on the documents of a bucket; those without one are kept. Runs in worker processes."""
        raise InputError(f"{self.name}: {type(self).__qualname__} lacks the method judge(self, facts, decided)")

    def run(self, documents: CorpusDocuments, report: Path) -> Any:
        """Judge all documents: a `VerdictTask` for each part at the end.

        `report` takes files to publish with the corpus. Returns what statistics.json shows under the name of the step, or None.
        """
        collected = documents.on_parts(CollectFacts, reads=True, step=self)
        places = [
            documents.folder / CollectFacts.__name__ / f"{number:06d}" / f"{place:06d}.arrow"
            for number, done in enumerate(collected)
            for place in range(done["tables"])
        ]
        decided = self._attempt("decide", "over all documents", json.dumps, each(read_table, places), report)
        write_file(documents.folder / DECIDED, decided.encode())
        documents.on_parts(JudgeFacts, step=self)
        return json.loads(decided)

    def _attempt(self, method: str, where: str, then: Callable[[Any], Any], *arguments: Any) -> Any:
        """Return `then` of what a method returns; an exception in the code of a user becomes an error that names it."""
        try:
            return then(getattr(self, method)(*arguments))
        except (BessemerError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            raise extensions.failure(self, method, error, where) from error


# A step as a field of a task
AnyStep = Annotated[GlobalStep, PlainValidator(partial(from_plain, base=GlobalStep)), PlainSerializer(to_plain)]


@dataclass(frozen=True)
class CollectFacts(StepTask):
    """Write the facts that a step collects about the documents of a part, a file for each table."""

    step: AnyStep
    part: AnyPart

    def make(self, folder: Path) -> dict[str, Any]:
        number = 0
        for number, table in enumerate(self.part(self.step.columns), 1):
            then = partial(_check_facts, len(table))
            facts = self.step._attempt("collect", str(self), then, table)
            write_table(folder / f"{number - 1:06d}.arrow", facts)
            check_stop()
        return {"tables": number}


def _check_facts(num_rows: int, facts: Any) -> pa.Table:
    if not isinstance(facts, pa.Table) or len(facts) != num_rows:
        raise ValueError(f"it returned no pyarrow.Table of {num_rows} rows, one for each document")
    return facts


@dataclass(frozen=True)
class JudgeFacts(VerdictTask):
    """Write the verdicts of a step by the facts."""

    step: AnyStep

    def judge(self) -> Iterator[tuple[int, pa.Table]]:
        decided = json.loads((self.work / DECIDED).read_bytes())
        before = self.result(CollectFacts.__name__, self.number)
        for number in range(read_receipt(before)["tables"]):
            facts = read_table(before / f"{number:06d}.arrow")
            then = partial(_make_table, len(facts))
            yield len(facts), self.step._attempt("judge", str(self), then, facts, decided)


def _make_table(num_rows: int, verdicts: Iterable[DocumentVerdict]) -> pa.Table:
    """Return verdicts as a table. Raises ValueError for a document that does not exist or has two, and for spans in disorder."""
    found = list(verdicts)
    rows = [one.row for one in found]
    for one in found:
        places = list(chain(*one.spans))
        if not 0 <= one.row < num_rows or places != sorted(places) or min(places, default=0) < 0:
            raise ValueError(f"{one} is no verdict on {num_rows} documents with ascending spans")
    if len(set(rows)) < len(rows):
        raise ValueError("two verdicts on one document")
    columns = {name: [getattr(one, name) for one in found] for name in ("reason", "detail")}
    return make_verdicts(rows, spans=[list(one.spans) or None for one in found], **columns)


def list_steps(corpus: Corpus) -> list[GlobalStep]:
    """Return the steps in their order, with the settings of the recipe. Raises InputError for one that cannot be used."""
    steps = [
        extensions.find("global_steps", name).target(**dict(getattr(corpus, table))) for name, table in TABLES.items()
    ]
    steps[-1:-1] = [make("global_steps", one.use, one.settings) for one in corpus.steps]
    others = {*OTHER_STATISTICS, *(one.name for one in filters_of(corpus))}
    if twice := first_duplicate([*others, *(step.name for step in steps)]):
        raise InputError(f"corpus.steps: the name {twice!r} is taken; give the class another `name`")
    return steps


def run_step(step: GlobalStep, documents: CorpusDocuments) -> dict[str, Any]:
    """Run a step unless it is done; its receipt: `documents`, `rejected` by reason, and `statistics`."""
    result = documents.folder / RESULT
    written = [documents.folder / VERDICTS / f"{number:06d}" for number in range(len(documents.parts))]

    def make(folder: Path) -> dict[str, Any]:
        (folder / REPORT).mkdir()
        statistics, rejected = step.run(documents, folder / REPORT), Counter[str]()
        receipts = list(each(read_receipt, written))
        for done in receipts:
            rejected.update({full_reason(step.prefix, word): count for word, count in done["rejected"].items()})
        count = sum(done["documents"] for done in receipts)
        return {"documents": count, "rejected": dict(sorted(rejected.items())), "statistics": statistics}

    if not all(is_complete(folder, documents.made_of) for folder in written):
        remove_tree(result)
    recorded = build_once(result, documents.made_of, make)
    for place in entries(documents.folder):
        if place.name not in (RESULT, VERDICTS):
            remove_tree(place)
    return recorded


def step_folder(work: AnyPath, name: str) -> AnyPath:
    """Return the folder of a step in the work folder of a build."""
    return work / "steps" / name


def report_folder(work: AnyPath, name: str) -> AnyPath:
    """Return the folder of the files of a step that are published with the corpus."""
    return step_folder(work, name) / RESULT / REPORT


def run_global_steps(
    corpus: Corpus, work: AnyPath, buckets: Sequence[Bucket], inputs: str, expected: int
) -> tuple[list[Bucket], dict[str, dict[str, Any]]]:
    """Run the steps that are not done. Returns the buckets with the verdicts on them, and the receipt of each step by name.

    inputs: digest of the partitions; expected: documents that these kept. Raises BessemerError when another number comes to a
    step, InputError when one was read twice.
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
            VerdictFile(step.name, folder / VERDICTS / f"{number:06d}" / f"{place:06d}.arrow", step.prefix)
            for number, part in enumerate(parts)
            for place in range(len(part.buckets))
        )
        buckets = [
            replace(bucket, verdicts=(*bucket.verdicts, file)) for bucket, file in zip(buckets, files, strict=True)
        ]
    return list(buckets), receipts
