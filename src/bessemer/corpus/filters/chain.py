"""The filters of a corpus on one document, in order; each may edit the text, reject the document, or count.

Counts go into `Tally`, which adds up over documents, partitions and sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bessemer.common.errors import BessemerError
from bessemer.common.extensions import failure
from bessemer.corpus.conversation import record_in
from bessemer.corpus.document import Document, Reject
from bessemer.corpus.extract.webpage import DAMAGE, EXTRACTION
from bessemer.corpus.filters.base import CleaningStep, Filter
from bessemer.corpus.filters.steps import CONTAMINATED_DOCUMENTS, CONTAMINATED_ITEMS, READ, filters_of
from bessemer.recipe import Corpus, Source
from bessemer.recipe.corpus import is_web
from bessemer.run_tasks.task import require
from bessemer.text.normalise import normalise

# Tables that the chain itself keeps: documents that came to each filter, those that it rejected, and those rejected by
# reason; bytes of the input
ENTERED, REJECTED_IN, REJECTED, BYTES = "entered", "rejected_in", "rejected", "bytes"
HIDDEN = (ENTERED, REJECTED_IN, REJECTED, BYTES, CONTAMINATED_DOCUMENTS, CONTAMINATED_ITEMS)  # that no report shows
PASSED_OVER = "passed_over"  # table of records that hold no document by nature, by type


@dataclass
class Tally:
    """What was counted over many documents, by table and key; two tallies add up to the tally of both."""

    tables: dict[str, Counter[str]] = field(default_factory=dict)

    def count(self, table: str, key: str, amount: int = 1) -> None:
        """Add to one number, for example count("personal_data", "email", 2)."""
        self.tables.setdefault(table, Counter())[key] += amount

    def of(self, table: str) -> Counter[str]:
        """The counts of a table; empty where nothing was counted."""
        return self.tables.get(table, Counter())

    @property
    def documents_in(self) -> int:
        """Documents that were read."""
        return self.of(ENTERED)[READ]

    @property
    def passed(self) -> int:
        """Documents that no step rejected."""
        return self.documents_in - self.of(REJECTED).total()

    def merge(self, other: dict[str, dict[str, int]]) -> None:
        """Add another tally, as `to_json` gives it."""
        for table, counts in other.items():
            self.tables.setdefault(table, Counter()).update(counts)

    def to_json(self) -> dict[str, dict[str, int]]:
        """Tables and keys in alphabetical order."""
        return {table: dict(sorted(self.tables[table].items())) for table in sorted(self.tables)}


@dataclass(frozen=True)
class Chain:
    """The filters of a corpus, prepared once in a process."""

    corpus: Corpus
    filters: tuple[Filter, ...]

    @classmethod
    def of(cls, corpus: Corpus) -> Chain:
        """Load the code, lists and models of a recipe. Raises InputError for one that cannot be used."""
        filters = filters_of(corpus)
        for one in filters:
            try:
                one.prepare()
            except (Exception, SystemExit) as error:
                if isinstance(one, CleaningStep):
                    raise
                raise failure(one, "prepare", error, "corpus.filters") from error
        return cls(corpus, filters)

    @property
    def sources(self) -> dict[str, Source]:
        """The sources by name."""
        return {source.name: source for source in self.corpus.sources}

    def clean(self, document: Document, tally: Tally) -> None:
        """Take one document through the filters, in place. A document that one rejects does not come to the next."""
        tally.count(BYTES, "in", document.num_bytes)
        last = READ
        tally.count(ENTERED, READ)
        for table in (EXTRACTION, DAMAGE) if is_web(document.format) else ():
            if isinstance(note := document.metadata.get(table), str):
                tally.count(table, note)
        for one in self.filters if document.reason is None else ():
            last = one.name
            tally.count(ENTERED, last)
            verdict = _judge_step(one, document) if isinstance(one, CleaningStep) else _judge(one, document)
            if isinstance(verdict, Reject):
                document.reject(one.reason_of(verdict), verdict.detail)
                break
            if verdict is not None:
                document.text = verdict
        for table, key, amount in document.counts:
            tally.count(table, key, amount)
        if document.reason is not None:
            tally.count(REJECTED_IN, last)
            tally.count(REJECTED, document.reason)


def _judge_step(step: CleaningStep, document: Document) -> Reject | str | None:
    """Ask a filter of this package. One that fails on the text costs the document (step_failed)."""
    try:
        return step.judge(document)
    except (BessemerError, OSError, MemoryError):
        raise
    except Exception as error:
        return Reject("step_failed", f"{step.name}: {type(error).__name__}: {error}"[:300])


def _judge(one: Filter, document: Document) -> Reject | str | None:
    """Ask a user's filter. Raises BessemerError, with class and document, where it fails."""
    text = document.text
    try:
        verdict = one.judge(document)
        if verdict is None or isinstance(verdict, Reject):
            return verdict
        if not isinstance(verdict, str):
            raise TypeError(f"it returned {verdict!r:.80}; return Reject(...), a text, or None to keep the document")
        if verdict == text:
            return None
        verdict.encode()  # halves of surrogate pairs can be published nowhere
        if document.format == "chat":
            record_in(verdict)
        verdict = normalise(verdict, Counter())
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        where = ", ".join(filter(None, (f"source {document.source}", document.path, document.key)))
        raise failure(one, "judge", error, where) from error
    document.count_edit(one.name, verdict)
    return verdict if verdict.strip() else Reject("", "no text is left")


def check_tally(tally: Tally, filters: Sequence[Filter], num_rows: int, where: str) -> list[dict[str, Any]]:
    """Rows {step, documents_in, rejected} of all filters. num_rows: documents that were written. Raises BessemerError
    where the counts do not add up."""
    entered, left = tally.of(ENTERED), tally.of(REJECTED_IN)
    rows, expected = [], num_rows
    for name in (READ, *(one.name for one in filters)):
        came = f"{expected} documents should have come to the step {name!r} but {entered[name]} did"
        require(entered[name] == expected, f"{where}: {came}")
        rows.append({"step": name, "documents_in": entered[name], "rejected": left[name]})
        expected -= left[name]
    counted = f"the steps rejected {num_rows - expected} documents but {num_rows - tally.passed} were counted"
    require(expected == tally.passed, f"{where}: {counted}")
    return rows
