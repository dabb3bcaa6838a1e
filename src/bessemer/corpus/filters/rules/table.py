"""The rules that compare a measured value with a limit: those of recipe/rule_sets.toml."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from bessemer.corpus.document import Reject
from bessemer.corpus.filters.base import against
from bessemer.recipe.rules import SETS
from bessemer.text.normalise import searchable

if TYPE_CHECKING:
    from bessemer.text.statistics import Statistics

XML_WITHIN = 100  # characters

# From the text's counts and the set's keys. A list counts by its length; None: no line that is not blank, or, of what a
# rule rejects, that it is not there.
Measure = Callable[["Statistics", Any], float | str | list[str] | None]


class Rule(NamedTuple):
    """One rule of a set; its fields are described in rule_sets.toml."""

    reason: str
    limit: str
    measure: Measure
    means: str
    detail: str = ""
    digits: int = 2


def _xml(text: Statistics, settings: Any) -> str | None:
    return "" if "<?xml version=" in text.text[:XML_WITHIN] else None


def _generated(text: Statistics, settings: Any) -> str | None:
    head = "\n".join(text.text.split("\n", settings.generated_lines)[: settings.generated_lines])
    head = searchable(head)
    return next((marker for marker in settings.generated_markers if searchable(marker) in head), None)


def _boilerplate_phrases(text: Statistics, settings: Any) -> list[str]:
    small = searchable(text.text)
    return [phrase for phrase in settings.boilerplate_phrases if searchable(phrase) in small]


def _alphabetic_words(text: Statistics, settings: Any) -> float:
    return text.words.alphabetic / max(text.num_words if settings.marks_are_words else text.words.proper, 1)


MEASURES: dict[str, Measure] = {
    "xml": _xml,
    "generated": _generated,
    "boilerplate_phrases": _boilerplate_phrases,
    "alphabetic_words": _alphabetic_words,
}


def _measure(value: str) -> Measure:
    """The measure that a rule's `value` describes. With a denominator of 0 a share of lines is None, any other 0."""
    if value in MEASURES:
        return MEASURES[value]
    name, _, whole = value.partition(" / ")
    name, _, argument = name.removesuffix(")").partition("(")
    count, total = attrgetter(name), attrgetter(whole or "text")
    if argument:

        def counted(text: Statistics, settings: Any) -> Any:
            of = count(text)(int(argument) if argument.isdecimal() else getattr(settings, argument))
            return of / (total(text) or 1) if whole else of

        return counted
    if whole == "lines.total":
        return lambda text, _: count(text) / total(text) if total(text) else None
    return (lambda text, _: count(text) / (total(text) or 1)) if whole else (lambda text, _: count(text))


RULES = {
    name: [
        Rule(measure=_measure(row["value"]), **{key: row[key] for key in row if key != "value"})
        for row in rows["rules"]
    ]
    for name, rows in SETS.items()
    if "rules" in rows
}
# Reasons of these sets, which are off unless the recipe names them
RULE_REASONS = {f"{name}.{rule.reason}": rule.means for name, rules in RULES.items() for rule in rules}
RULE_KEYS = {
    f"{name}.{rule.reason}": f"see corpus.rules.{name}.{rule.limit}" for name, rules in RULES.items() for rule in rules
}


def check(name: str, statistics: Statistics, settings: Any) -> Reject | None:
    """The first rule of a set that a text breaks; None when there is none."""
    for rule in RULES[name]:
        limit = getattr(settings, rule.limit)
        if limit is False:
            continue
        measured, reason, names = rule.measure(statistics, settings), f"{name}.{rule.reason}", ""
        value = measured
        if isinstance(measured, list):
            value, names = len(measured), ", ".join(measured)
        if rule.limit.startswith("reject_"):
            if value is not None:
                return Reject(reason, str(value))
        elif not isinstance(value, int | float):
            return Reject(reason, "no line that is not blank")
        elif value > limit if rule.limit.startswith("max_") else value < limit:
            shown = against(value, limit, rule.digits)
            return Reject(reason, rule.detail.format_map({**vars(settings), "shown": shown, "names": names}))
    return None
