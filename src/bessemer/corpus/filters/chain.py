"""Cleaning steps of a document, in order; each may edit the text, reject the document, or count.

A step is a pure function of the record and the recipe. Recipe, word lists and models are loaded once per process into
`CleaningContext`; counts go into `Tally`, which adds up over documents, partitions and sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bessemer.common.console import counted
from bessemer.common.errors import BessemerError
from bessemer.corpus.conversation import contents, with_contents, with_strings
from bessemer.corpus.document import Document
from bessemer.corpus.extract.webpage import DAMAGE, EXTRACTION
from bessemer.corpus.filters import language, personal
from bessemer.corpus.filters.rules.apply import apply
from bessemer.corpus.filters.rules.lists import judge_url
from bessemer.recipe import Corpus, Rules, Source
from bessemer.run_tasks.engine import require
from bessemer.text.normalise import NotText, normalise, replace_controls

if TYPE_CHECKING:
    from bessemer.corpus.filters.contamination import GramIndex


@dataclass(frozen=True)
class CleaningContext:
    """What the steps read: the recipe's [corpus], and whatever a step prepares once for a process."""

    corpus: Corpus
    sources: dict[str, Source]
    evaluation_sets: GramIndex | None = None
    # by source, format and language, filled on demand
    rules: dict[tuple[str, str, str | None], Rules] = field(default_factory=dict)

    @classmethod
    def of(cls, corpus: Corpus) -> CleaningContext:
        """Load the lists and models of a recipe. Raises InputError for one that cannot be used."""
        language.check(corpus.language)
        sets = None
        if corpus.contamination.sets:
            from bessemer.corpus.filters.contamination import build

            sets = build(corpus.contamination)
        return cls(corpus, {source.name: source for source in corpus.sources}, sets)

    def rules_for(self, record: Document) -> Rules:
        """The rules for a document of its source, without the sets that are for other languages only."""
        code = record.language if self.corpus.language.looks_at(record.format) else None
        key = record.source, record.format, code
        if key not in self.rules:
            only_for = self.corpus.language.only_for
            others = [name for name, codes in only_for.items() if code is not None and code not in codes]
            rules = self.corpus.rules_of(self.sources.get(record.source), record.format)
            self.rules[key] = rules.model_copy(update=dict.fromkeys(others))
        return self.rules[key]


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


Step = Callable[[Document, CleaningContext, Tally], None]

# Tables that the chain itself keeps: documents that came to each step, those that it rejected, and those rejected by
# reason; bytes of the input
ENTERED, REJECTED_IN, REJECTED, BYTES = "entered", "rejected_in", "rejected", "bytes"
# Tables of the step that looks for evaluation sets: documents by set, and documents by item of a set
CONTAMINATED_DOCUMENTS, CONTAMINATED_ITEMS = "contaminated_documents", "contaminated_items"
HIDDEN = (ENTERED, REJECTED_IN, REJECTED, BYTES, CONTAMINATED_DOCUMENTS, CONTAMINATED_ITEMS)  # that no report shows
PASSED_OVER = "passed_over"  # table of records that hold no document by nature, by type
READ = "read"  # name of the reader among the steps: it may reject a record as well


def check_text(record: Document, settings: CleaningContext, tally: Tally) -> None:
    """Too long to be worth more work, or not what UTF-8 can hold."""
    if len(record.text) > 4 * settings.corpus.rules.max_characters:
        # Normalising what is far too long would only cost time.
        record.reject("too_long", f"{len(record.text)} characters")
        return
    try:
        record.text.encode()
    except UnicodeEncodeError as error:
        record.reject("not_utf8", f"half of a surrogate pair, written as an escape, at character {error.start}")


def normalise_text(record: Document, settings: CleaningContext, tally: Tally) -> None:
    """NFC, line ends, control characters; those of conversations within their strings, as JSON escapes them."""
    counts = Counter[str]()
    try:
        if record.format == "chat":
            record.text = with_strings(record.text, lambda text: replace_controls(text, counts))
        record.text = normalise(record.text, counts)
    except NotText as error:
        record.reject("not_text", str(error))
    for kind, number in counts.items():
        tally.count("replaced_characters", kind, number)


def identify_language(record: Document, settings: CleaningContext, tally: Tally) -> None:
    """Which language it is in, and whether that is wanted."""
    of = settings.corpus.language
    if not of.looks_at(record.format):
        return
    record.language, score = language.identify(record.text, of)
    record.metadata |= {"language": record.language, "language_score": round(score, 3)}
    if (verdict := language.verdict(record.language, score, of)) is not None:
        record.reject(*verdict)


def replace_personal_data(record: Document, settings: CleaningContext, tally: Tally) -> None:
    """Typed placeholders; what was found is counted and nothing else."""
    of = settings.corpus.personal
    if of.kinds:

        def replaced(text: str) -> str:
            text, counts = personal.replace(text, of)
            for kind, number in counts.items():
                tally.count("personal_data", kind, number)
            return text

        record.text = with_contents(record.text, replaced) if record.format == "chat" else replaced(record.text)


def look_for_evaluation_sets(record: Document, settings: CleaningContext, tally: Tally) -> None:
    """Text of evaluation sets: dropped, masked or reported. Items touched are tallied as SET/NUMBER."""
    index, of = settings.evaluation_sets, settings.corpus.contamination
    if index is None:
        return
    from bessemer.corpus.filters.contamination import check
    from bessemer.corpus.verdicts import without

    overlap = check(contents(record.text) if record.format == "chat" else record.text, index)
    if not overlap.items:
        return
    record.metadata["contamination"] = {name: list(numbers) for name, numbers in overlap.items.items()}
    for name, items in overlap.items.items():
        tally.count(CONTAMINATED_DOCUMENTS, name)
        for item in items:
            tally.count(CONTAMINATED_ITEMS, f"{name}/{item}")
    if of.action == "drop":
        record.reject(
            "contaminated", ", ".join(f"{name}: {counted(len(items), 'item')}" for name, items in overlap.items.items())
        )
    elif of.action == "mask":
        record.text = without(record.text, overlap.spans, of.mask)


def judge_address(record: Document, settings: CleaningContext, tally: Tally) -> None:
    """The rules on where a page comes from, before anything is spent on its text."""
    url = record.metadata.get("url")
    of = settings.corpus.rules.refinedweb
    if of is not None and isinstance(url, str) and (verdict := judge_url(url, of)) is not None:
        record.reject(*verdict)


def judge_text(record: Document, settings: CleaningContext, tally: Tally) -> None:
    """The rules on the text, some of which take lines out of it. They are for running text, not for conversations."""
    if record.format == "chat":
        return
    judged = apply(record.text, settings.rules_for(record), record.language or "en")
    if judged.reason is not None:
        record.reject(judged.reason, judged.detail)
    elif judged.text != record.text:
        tally.count("edited_characters", "rules", len(record.text) - len(judged.text))
        tally.count("edited_documents", "rules")
        record.text = judged.text


# The steps in their order. A document that one rejects does not come to the next.
STEPS: tuple[tuple[str, Step], ...] = (
    ("check", check_text),
    ("normalise", normalise_text),
    ("address", judge_address),
    ("language", identify_language),
    ("rules", judge_text),
    ("evaluation sets", look_for_evaluation_sets),  # before placeholders stand for the numbers and addresses of items
    ("personal data", replace_personal_data),
)


def clean_record(record: Document, settings: CleaningContext, tally: Tally) -> None:
    """Take one record through the steps, in place. A step that fails on its text costs the document (step_failed)."""
    tally.count(BYTES, "in", record.num_bytes)
    last = READ
    tally.count(ENTERED, READ)
    for table in (EXTRACTION, DAMAGE) if record.format in ("html", "warc") else ():
        if isinstance(note := record.metadata.get(table), str):
            tally.count(table, note)
    for last, step in STEPS if record.reason is None else ():
        tally.count(ENTERED, last)
        try:
            step(record, settings, tally)
        except (BessemerError, OSError, MemoryError):
            raise
        except Exception as error:
            record.reject("step_failed", f"{last}: {type(error).__name__}: {error}"[:300])
        if record.reason is not None:
            break
    if record.reason is not None:
        tally.count(REJECTED_IN, last)
        tally.count(REJECTED, record.reason)


def check_tally(tally: Tally, num_rows: int, where: str) -> list[dict[str, Any]]:
    """Rows {step, documents_in, rejected} of all steps. num_rows: documents that were written. Raises BessemerError
    where the counts do not add up."""
    entered, left = tally.of(ENTERED), tally.of(REJECTED_IN)
    rows, expected = [], num_rows
    for name in (READ, *(name for name, _ in STEPS)):
        came = f"{expected} documents should have come to the step {name!r} but {entered[name]} did"
        require(entered[name] == expected, f"{where}: {came}")
        rows.append({"step": name, "documents_in": entered[name], "rejected": left[name]})
        expected -= left[name]
    counted = f"the steps rejected {num_rows - expected} documents but {num_rows - tally.passed} were counted"
    require(expected == tally.passed, f"{where}: {counted}")
    return rows
