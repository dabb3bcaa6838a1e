"""The chain of filters that each document passes. A filter may edit the text, reject the document, or add to counts.

`filters_of` defines the order of the built-in filters and of those that a recipe adds. `Tally` adds up counts over documents,
partitions and sources.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bessemer.common.console import counted
from bessemer.common.errors import BessemerError, InputError, NotText
from bessemer.common.extensions import find, is_own, naming_faults
from bessemer.corpus.conversation import contents, record_in, with_contents, with_strings
from bessemer.corpus.document import Document, Reject
from bessemer.corpus.extract.webpage import DAMAGE, EXTRACTION
from bessemer.corpus.filters import personal
from bessemer.corpus.filters.base import CleaningStep, Filter
from bessemer.corpus.filters.language import IdentifyLanguage
from bessemer.corpus.filters.rules.apply import RULE_KEYS, RULE_REASONS, apply
from bessemer.corpus.filters.rules.lists import judge_url
from bessemer.recipe import Contamination, Corpus, PersonalData, Rules, Source
from bessemer.recipe.corpus import is_web
from bessemer.recipe.rules import Limits
from bessemer.recipe.uses import make
from bessemer.text.normalise import normalise, replace_controls

if TYPE_CHECKING:
    from bessemer.corpus.filters.contamination import GramIndex

READ = "read"  # name of the reader in the list of steps, because it may also reject documents
# For each reason for rejection its meaning, and advice on how to keep the documents that it affects
_TABLE = tomllib.loads(Path(__file__).parents[1].joinpath("reasons.toml").read_text(encoding="utf-8"))
REASONS: dict[str, str] = {}  # in the order of the checks
for _name, _entry in _TABLE.items():
    REASONS |= RULE_REASONS | _entry if _name == "rules" else {_name: _entry["meaning"]}
ADVICE: dict[str, str] = {name: entry["advice"] for name, entry in _TABLE.items() if "advice" in entry} | RULE_KEYS
RESERVED = (READ, "quality", "duplicates", "lines")  # names of steps other than filters
# Tables of FindEvaluationSets: documents by set, and documents by item of a set
CONTAMINATED_DOCUMENTS, CONTAMINATED_ITEMS = "contaminated_documents", "contaminated_items"
# Tables of the chain: documents and bytes of the input, rejected documents by filter, and rejected documents by reason
INPUT, REJECTED_IN, REJECTED = "in", "rejected_in", "rejected"
DOCUMENTS, BYTES = "documents", "bytes"
HIDDEN = (INPUT, REJECTED_IN, REJECTED, CONTAMINATED_DOCUMENTS, CONTAMINATED_ITEMS)  # tables that no report shows
PASSED_OVER = "passed_over"  # table of records of types that never hold a document, by type


class CheckText(CleaningStep):
    """Reject texts longer than 4 times `max_characters`, before costly work on them, and texts that UTF-8 cannot encode."""

    name: ClassVar[str] = "check"
    max_characters: int

    def judge(self, document: Document) -> Reject | None:
        if len(document.text) > 4 * self.max_characters:
            # Do not spend time on normalising a text that the length rule rejects anyway.
            return Reject("too_long", f"{len(document.text)} characters")
        try:
            document.text.encode()
        except UnicodeEncodeError as error:
            half = f"half of a surrogate pair, written as an escape, at character {error.start}"
            return Reject("not_utf8", half)
        return None


class NormaliseText(CleaningStep):
    """Apply Unicode NFC and replace line ends and control characters.

    In conversations, escapes in JSON strings that stand for control characters are also replaced.
    """

    name: ClassVar[str] = "normalise"

    def judge(self, document: Document) -> Reject | str:
        counts = Counter[str]()
        try:
            if document.format == "chat":
                document.text = with_strings(document.text, lambda text: replace_controls(text, counts))
            return normalise(document.text, counts)
        except NotText as error:
            return Reject("not_text", str(error))
        finally:
            for kind, number in counts.items():
                document.count("replaced_characters", kind, number)


class JudgeAddress(CleaningStep):
    """Reject web pages by the URL rules `limits`, before any work on their text. None turns the rules off."""

    name: ClassVar[str] = "address"
    limits: Limits | None

    def judge(self, document: Document) -> Reject | None:
        url = document.metadata.get("url")
        return judge_url(url, self.limits) if self.limits is not None and isinstance(url, str) else None


class JudgeText(CleaningStep):
    """Apply the rules of `[corpus.rules]` to running text. Some rules remove lines. Conversations pass unchanged."""

    name: ClassVar[str] = "rules"
    counts_edits = True
    corpus: Corpus

    @cached_property
    def _rules(self) -> dict[tuple[str, str, str | None], Rules]:
        """Cache of the rules by source, format and language."""
        return {}

    def rules_for(self, document: Document) -> Rules:
        """Return the rules for a document by its source and format.

        Rule sets that `corpus.language.only_for` limits to other languages than the document's are left out.
        """
        code = document.language if self.corpus.language.looks_at(document.format) else None
        key = document.source, document.format, code
        if key not in self._rules:
            only_for = self.corpus.language.only_for
            others = [name for name, codes in only_for.items() if code is not None and code not in codes]
            source = next((one for one in self.corpus.sources if one.name == document.source), None)
            rules = self.corpus.rules_of(source, document.format)
            self._rules[key] = rules.model_copy(update=dict.fromkeys(others))
        return self._rules[key]

    def judge(self, document: Document) -> Reject | str | None:
        if document.format == "chat":
            return None
        return apply(document.text, self.rules_for(document), document.language or "en")


class FindEvaluationSets(CleaningStep):
    """Reject documents that contain text of evaluation sets, mask this text, or only report it, as `settings.action` says.

    The statistics count each matched item as SET/NUMBER, with the item's number in its set.
    """

    name: ClassVar[str] = "evaluation sets"
    settings: Contamination

    def prepare(self) -> None:
        if self.settings.sets:
            _ = self.index

    @cached_property
    def index(self) -> GramIndex:
        """The n-grams of the evaluation sets. Raises InputError for a set that cannot be read."""
        from bessemer.corpus.filters.contamination import build

        return build(self.settings)

    def judge(self, document: Document) -> Reject | str | None:
        if not self.settings.sets:
            return None
        from bessemer.corpus.filters.contamination import check
        from bessemer.corpus.verdicts import without

        overlap = check(contents(document.text) if document.format == "chat" else document.text, self.index)
        if not overlap.items:
            return None
        document.metadata["contamination"] = {name: list(numbers) for name, numbers in overlap.items.items()}
        for name, items in overlap.items.items():
            document.count(CONTAMINATED_DOCUMENTS, name)
            for item in items:
                document.count(CONTAMINATED_ITEMS, f"{name}/{item}")
        if self.settings.action == "drop":
            named = (f"{name}: {counted(len(items), 'item')}" for name, items in overlap.items.items())
            return Reject("contaminated", ", ".join(named))
        return without(document.text, overlap.spans, self.settings.mask) if self.settings.action == "mask" else None


class ReplacePersonalData(CleaningStep):
    """Replace personal data by placeholders for its kind. The statistics contain its counts by kind, never the data."""

    name: ClassVar[str] = "personal data"
    settings: PersonalData

    def judge(self, document: Document) -> str | None:
        if not self.settings.kinds:
            return None

        def replaced(text: str) -> str:
            text, counts = personal.replace(text, self.settings)
            for kind, number in counts.items():
                document.count("personal_data", kind, number)
            return text

        return with_contents(document.text, replaced) if document.format == "chat" else replaced(document.text)


def filters_of(corpus: Corpus) -> tuple[Filter, ...]:
    """Return the filters of a corpus in the order in which they run, built-in ones and those of the recipe.

    Raises InputError for an unusable filter of the recipe.
    """
    users: list[Filter] = [make("filters", one.use, one.settings) for one in corpus.filters]
    filters = (
        CheckText(max_characters=corpus.rules.max_characters),
        NormaliseText(),
        JudgeAddress(limits=corpus.rules.refinedweb),
        IdentifyLanguage(settings=corpus.language),
        JudgeText(corpus=corpus),
        *users,
        FindEvaluationSets(settings=corpus.contamination),  # before placeholders replace words of its items
        ReplacePersonalData(settings=corpus.personal),
    )
    for one, use in zip(users, corpus.filters, strict=True):
        names = [*RESERVED, *(other.name for other in filters if other is not one)]
        if one.name in names or (not is_own(type(one)) and one.name in {word.partition(".")[0] for word in REASONS}):
            raise InputError(
                f"corpus.filters: {find('filters', use.use).origin}: {type(one).__qualname__}: another step or reason is named "
                f"{one.name!r}; give the class another name, for example name: ClassVar[str] = 'my_filter'"
            )
    return filters


class Tally(defaultdict[str, Counter[str]]):
    """Counts over many documents: a dict from the name of a table to a Counter of its keys."""

    def __init__(self) -> None:
        super().__init__(Counter)

    @property
    def documents_in(self) -> int:
        """Number of documents that were read."""
        return self[INPUT][DOCUMENTS]

    @property
    def passed(self) -> int:
        """Number of documents that no filter rejected."""
        return self.documents_in - self[REJECTED].total()

    def merge(self, other: Mapping[str, Mapping[str, int]]) -> None:
        """Add the counts of another tally, a dict from table to {key: count} as `to_json` returns."""
        for table, counts in other.items():
            self[table].update(counts)

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return the counts with tables and keys in alphabetical order."""
        return {table: dict(sorted(self[table].items())) for table in sorted(self) if self[table]}


@dataclass(frozen=True)
class Chain:
    """The filters of a corpus in the order in which they run, prepared once per process."""

    corpus: Corpus
    filters: tuple[Filter, ...]

    @classmethod
    def prepare(cls, corpus: Corpus) -> Chain:
        """Create the filters of a recipe and load their code, lists and models. Raises InputError for an unusable filter."""
        filters = filters_of(corpus)
        for one in filters:
            with naming_faults(one, "prepare", "corpus.filters"):
                one.prepare()
        return cls(corpus, filters)

    @property
    def sources(self) -> dict[str, Source]:
        """The sources of the recipe by name."""
        return {source.name: source for source in self.corpus.sources}

    def clean(self, document: Document, tally: Tally) -> None:
        """Pass a document through the filters, in place, up to the first that rejects it, and count the results in `tally`."""
        tally[INPUT][DOCUMENTS] += 1
        tally[INPUT][BYTES] += document.num_bytes
        last = READ
        for table in (EXTRACTION, DAMAGE) if is_web(document.format) else ():
            if isinstance(note := document.metadata.get(table), str):
                tally[table][note] += 1
        for one in self.filters if document.reason is None else ():
            last = one.name
            verdict = _judge_step(one, document) if isinstance(one, CleaningStep) else _judge(one, document)
            if isinstance(verdict, Reject):
                document.reject(one.reason_of(verdict), verdict.detail)
                break
            if verdict is not None:
                if one.counts_edits and verdict != document.text:
                    tally["edited_characters"][one.name] += len(document.text) - len(verdict)
                    tally["edited_documents"][one.name] += 1
                document.text = verdict
        for table, key, amount in document.counts:
            tally[table][key] += amount
        if document.reason is not None:
            tally[REJECTED_IN][last] += 1
            tally[REJECTED][document.reason] += 1


def _judge_step(step: CleaningStep, document: Document) -> Reject | str | None:
    """Run a built-in filter. An exception of the filter rejects the document as `step_failed`."""
    try:
        return step.judge(document)
    except (BessemerError, OSError, MemoryError):
        raise
    except Exception as error:
        return Reject("step_failed", f"{step.name}: {type(error).__name__}: {error}"[:300])


def _judge(one: Filter, document: Document) -> Reject | str | None:
    """Run a user's filter and check its result. An exception becomes a BessemerError that names the class and the document."""
    text = document.text
    where = ", ".join(filter(None, (f"source {document.source}", document.path, document.key)))
    with naming_faults(one, "judge", where):
        verdict = one.judge(document)
        if verdict is None or isinstance(verdict, Reject):
            return verdict
        if not isinstance(verdict, str):
            raise TypeError(f"it returned {verdict!r:.80}; return Reject(...), a text, or None to keep the document")
        if verdict == text:
            return None
        verdict.encode()  # unpaired surrogates cannot be written as UTF-8
        if document.format == "chat":
            record_in(verdict)
        verdict = normalise(verdict, Counter())
    return verdict if verdict.strip() else Reject("", "no text is left")


def list_step_counts(tally: Tally, filters: Sequence[Filter]) -> list[dict[str, Any]]:
    """Return a row {step, documents_in, rejected} for the reader and for each filter, in the order in which they run.

    `tally` has the counts over the documents, as `Chain.clean` adds them.
    """
    rows, left = [], tally.documents_in
    for name in (READ, *(one.name for one in filters)):
        rejected = tally[REJECTED_IN][name]
        rows.append({"step": name, "documents_in": left, "rejected": rejected})
        left -= rejected
    return rows
