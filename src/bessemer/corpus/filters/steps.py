"""The cleaning steps of this package, and the order in which a document takes them and the filters of its recipe."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from bessemer.common.console import counted
from bessemer.common.errors import InputError, NotText
from bessemer.common.extensions import find
from bessemer.corpus.conversation import contents, with_contents, with_strings
from bessemer.corpus.document import Document, Reject
from bessemer.corpus.filters import language, personal
from bessemer.corpus.filters.base import CleaningStep, Filter
from bessemer.corpus.filters.rules.apply import apply
from bessemer.corpus.filters.rules.lists import judge_url
from bessemer.recipe import Contamination, Corpus, Language, PersonalData, Rules
from bessemer.recipe.rules import RefinedWeb
from bessemer.recipe.section import first_duplicate
from bessemer.recipe.uses import make
from bessemer.text.normalise import normalise, replace_controls

if TYPE_CHECKING:
    from bessemer.corpus.filters.contamination import GramIndex

READ = "read"  # name of the reader among the steps: it may reject a document as well
RESERVED = (READ, "quality", "duplicates", "lines")  # names of steps that are no filters
# Tables of the step that looks for evaluation sets: documents by set, and documents by item of a set
CONTAMINATED_DOCUMENTS, CONTAMINATED_ITEMS = "contaminated_documents", "contaminated_items"


class CheckText(CleaningStep):
    """Reject what is too long to be worth more work, or not what UTF-8 can hold."""

    name: ClassVar[str] = "check"
    max_characters: int

    def judge(self, document: Document) -> Reject | None:
        if len(document.text) > 4 * self.max_characters:
            # Normalising what is far too long would only cost time.
            return Reject("too_long", f"{len(document.text)} characters")
        try:
            document.text.encode()
        except UnicodeEncodeError as error:
            half = f"half of a surrogate pair, written as an escape, at character {error.start}"
            return Reject("not_utf8", half)
        return None


class NormaliseText(CleaningStep):
    """Apply NFC and replace line ends and control characters; in conversations within their strings, as JSON escapes them."""

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
    """Apply the rules on where a page comes from, before anything is spent on its text."""

    name: ClassVar[str] = "address"
    limits: RefinedWeb | None

    def judge(self, document: Document) -> Reject | None:
        url = document.metadata.get("url")
        return judge_url(url, self.limits) if self.limits is not None and isinstance(url, str) else None


class IdentifyLanguage(CleaningStep):
    """Identify the language, and reject what is not wanted."""

    name: ClassVar[str] = "language"
    settings: Language

    def prepare(self) -> None:
        language.check(self.settings)

    def judge(self, document: Document) -> Reject | None:
        if not self.settings.looks_at(document.format):
            return None
        document.language, score = language.identify(document.text, self.settings)
        document.metadata |= {"language": document.language, "language_score": round(score, 3)}
        return language.verdict(document.language, score, self.settings)


class JudgeText(CleaningStep):
    """Apply the rules on running text, some of which take lines out of it; conversations pass."""

    name: ClassVar[str] = "rules"
    corpus: Corpus

    @cached_property
    def _rules(self) -> dict[tuple[str, str, str | None], Rules]:
        """By source, format and language, filled on demand."""
        return {}

    def rules_for(self, document: Document) -> Rules:
        """Return the rules for a document of its source, without the sets that are for other languages only."""
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
        verdict = apply(document.text, self.rules_for(document), document.language or "en")
        if isinstance(verdict, str):
            document.count_edit(self.name, verdict)
        return verdict


class FindEvaluationSets(CleaningStep):
    """Drop, mask or report text of evaluation sets. Items are counted as SET/NUMBER."""

    name: ClassVar[str] = "evaluation sets"
    settings: Contamination

    def prepare(self) -> None:
        if self.settings.sets:
            _ = self.index

    @cached_property
    def index(self) -> GramIndex:
        """The n-grams of the sets. Raises InputError for one that cannot be read."""
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
    """Replace personal data by typed placeholders; what was found is counted and nothing else."""

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
    """Return the filters of a corpus in their order. Raises InputError for one of the recipe that cannot be used."""
    users: list[Filter] = [make("filters", one.use, one.settings) for one in corpus.filters]
    filters = (
        CheckText(max_characters=corpus.rules.max_characters),
        NormaliseText(),
        JudgeAddress(limits=corpus.rules.refinedweb),
        IdentifyLanguage(settings=corpus.language),
        JudgeText(corpus=corpus),
        *users,
        FindEvaluationSets(settings=corpus.contamination),  # before placeholders stand for what its items hold
        ReplacePersonalData(settings=corpus.personal),
    )
    for one, use in zip(users, corpus.filters, strict=True):
        if first_duplicate([one.name, *(other.name for other in filters if other is not one), *RESERVED]) == one.name:
            raise InputError(
                f"corpus.filters: {find('filters', use.use).origin}: {type(one).__qualname__}: another step is named "
                f"{one.name!r}; give the class another name, as name: ClassVar[str] = '...'"
            )
    return filters
