"""The rules of a recipe on one document, in a fixed order. The first rule that it breaks is the reason for its rejection.

The order is: basic rules, code, textbook, gopher_quality, gopher_repetition, c4 (removes lines), fineweb (on the remaining
lines), adult, toxic, and the basic length rule again if lines were removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from bessemer.common.console import counted
from bessemer.corpus.document import Reject
from bessemer.corpus.filters.base import against
from bessemer.corpus.filters.rules.lists import judge_flagged
from bessemer.recipe import Rules
from bessemer.recipe.rules import SETS, Limits
from bessemer.text.normalise import searchable

if TYPE_CHECKING:
    from bessemer.text.statistics import Statistics

# The rule sets, in the order in which they are applied
ORDER = (
    "code", "textbook", "gopher_quality", "gopher_repetition", "c4", "fineweb", "adult", "toxic",
)  # fmt: skip


def apply(text: str, rules: Rules, language: str = "en") -> Reject | str:
    """Return the rejection by the first rule that a normalised text breaks, or else the text as edited by the rules.

    `language` (ISO 639-1) selects the word lists. Raises InputError for an unreadable list or model.
    """
    from bessemer.text.statistics import Statistics  # loads numba

    statistics = Statistics(text)
    finding = judge(statistics, rules)
    for name in ORDER:
        settings = getattr(rules, name)
        if finding is not None or settings is None:
            continue
        if name == "c4":
            statistics, finding = edit_c4(statistics, settings)
        elif name in RULES:
            finding = check(name, statistics, settings)
        else:
            finding = judge_flagged(statistics.text, name, settings, language)
    if finding is None and statistics.text != text:
        finding = _judge_rest(statistics.text, rules)
    return statistics.text if finding is None else finding


# --- Basic rules

# A longer mean line in characters suggests minified code or a data dump. Paragraphs of prose are rarely that long, but
# JSONL often has whole documents on one line.
LONG_LINE = 1000.0
LONG_WORD = 40  # ASCII characters; longer than words, shorter than base64, hashes and minified statements
CODE_SIGNS = '{}[]()<>=;:_$|\\&#*+/^~@%"`0123456789'
# Above this `data_share`, long lines are code or data. Of pages in 100 languages 99.4% are below it, and 99% of files of
# minified code and dumps are above; few are between 0.25 and 0.3 (docs/background/quality-rules.md).
MAX_DATA_SHARE = 0.3


def judge(statistics: Statistics, rules: Rules) -> Reject | None:
    """Return the rejection by the first basic rule that a normalised text breaks, with the measured value, or None.

    The basic rules limit the length, the mean line length, and the shares of letters or digits and of distinct lines.
    """
    text = statistics.text
    if not text or text.isspace():
        return Reject("empty", "")
    if len(text) < (least := rules.min_characters or 0):
        return Reject("too_short", f"{against(len(text), least)} characters")
    if len(text) > rules.max_characters:
        return Reject("too_long", f"{against(len(text), rules.max_characters)} characters")
    lines = list(filter(None, text.split("\n")))
    mean = (len(text) - text.count("\n")) / len(lines)
    if rules.max_mean_line_length is not None:
        if mean > rules.max_mean_line_length:
            return Reject("long_lines", f"mean line of {against(mean, rules.max_mean_line_length, 0)} characters")
    elif mean > LONG_LINE and (share := data_share(text)) > MAX_DATA_SHARE:
        shown = against(share, MAX_DATA_SHARE)
        return Reject(
            "long_lines",
            f"minified code or data: {shown} of it is signs, digits and long runs, in lines of {mean:.0f}",
        )
    # No share is below 0, so a threshold of 0 turns the rule off. Skip its count.
    if (limit := rules.min_alphanumeric_share) and (share := statistics.alphanumeric_share) < limit:
        return Reject("not_text", f"{against(share, limit)} of the characters are letters or digits")
    if limit := rules.min_unique_line_share:
        unique = len(set(map(str.strip, lines))) / len(lines)
        if unique < limit:
            return Reject("repetitive", f"{against(unique, limit)} of the lines are distinct")
    return None


def data_share(text: str) -> float:
    """Return the share of code signs, digits and long ASCII words among the characters other than white space.

    Prose has few in any script: languages without spaces between words are not written in ASCII.
    """
    words = text.split()
    visible = sum(map(len, words))
    short = "".join([word for word in words if len(word) <= LONG_WORD or not word.isascii()])
    return (visible - len(short) + sum(map(short.count, CODE_SIGNS))) / max(visible, 1)


def _judge_rest(text: str, rules: Rules) -> Reject | None:
    """Return the reason to reject a text that has become too short because rules removed lines, or None."""
    if not text or text.isspace():
        return Reject("empty", "no line is left")
    if len(text) < (least := rules.min_characters or 0):
        return Reject("too_short", f"{against(len(text), least)} characters are left")
    return None


# --- Rules of recipe/rule_sets.toml, which compare a measured value with a limit

XML_WITHIN = 100  # characters

# A function of the text's counts and the rule set's keys. A list is compared by its length. None means that the text has
# only blank lines or, for a `reject_` rule, that there is no match.
Measure = Callable[["Statistics", Any], float | str | list[str] | None]


class Rule(NamedTuple):
    """A rule of a rule set in recipe/rule_sets.toml, which compares a measure of the text with a limit.

    Attributes:
        reason: One word for the reason of a rejection.
        limit: Recipe key of the limit: max_..., min_..., or reject_..., with which a value that is not None rejects the
            text.
        measure: Function that measures a text.
        means: Meaning of the reason.
        detail: Format of the detail of a rejection; {shown} is the value with its limit.
        digits: Decimals of the value.
    """

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
    """Return the function that measures a text as the field `value` of a rule in recipe/rule_sets.toml says.

    It is a count of text/statistics.py, such as "lines.total", a quotient "count / count", or a name in MEASURES. With
    a denominator of 0, a share of lines is None and any other share is 0.
    """
    if value in MEASURES:
        return MEASURES[value]
    name, _, whole = value.partition(" / ")
    name, _, argument = name.removesuffix(")").partition("(")
    count, total = attrgetter(name), attrgetter(whole or "text")
    if argument:

        def counted(text: Statistics, settings: Any) -> Any:
            value = count(text)(int(argument) if argument.isdecimal() else getattr(settings, argument))
            return value / (total(text) or 1) if whole else value

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
# Reasons of these rule sets, which apply only if the recipe names them
RULE_REASONS = {f"{name}.{rule.reason}": rule.means for name, rules in RULES.items() for rule in rules}
RULE_KEYS = {
    f"{name}.{rule.reason}": f"see corpus.rules.{name}.{rule.limit}" for name, rules in RULES.items() for rule in rules
}


def check(name: str, statistics: Statistics, settings: Any) -> Reject | None:
    """Return the rejection by the first rule of the rule set `name` that a text breaks, or None.

    `statistics` has the counts of the text, and `settings` the limits of the rule set.
    """
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


# --- Rules of C4, which remove lines from a text

CITATION = re.compile(r"\[\d{0,12}\]|\[edit\]|\[citation needed\]")
CLOSING = (".", "?", "!", '"', "'")


def edit_c4(statistics: Statistics, settings: Limits) -> tuple[Statistics, Reject | None]:
    """Apply C4's line filters. Returns the counts of the edited text, and the rejection of the text or None.

    The rules are from Raffel et al. 2020, section 2.2, and from its code as in datatrove
    (pipeline/filters/c4_filters.py). Sentences are split like spaCy's sentencizer does.
    """
    kept: list[str] = []
    for line in statistics.text.splitlines():
        words = line.split()
        line = line.strip()
        if len(line) > settings.max_word_characters and max(map(len, words)) > settings.max_word_characters:
            continue
        if settings.remove_citations and "[" in line:
            line = CITATION.sub("", line)
        if settings.require_terminal and (not line.endswith(CLOSING) or line.endswith("...")):
            continue
        if len(words) < settings.min_words_per_line:
            continue
        small = line.lower()
        if settings.reject_lorem_ipsum and "lorem ipsum" in small:
            return statistics, Reject("c4.lorem_ipsum", f"in the line {line[:80]!r}")
        if settings.remove_javascript and "javascript" in small:
            continue
        if settings.reject_curly_bracket and "{" in line:
            return statistics, Reject("c4.curly_bracket", f"in the line {line[:80]!r}")
        if settings.remove_policy and any(phrase in small for phrase in SETS["c4"]["policy"]):
            continue
        kept.append(line)
    every = type(statistics)("\n".join(kept))
    if settings.min_sentences and every.sentences < settings.min_sentences:
        return statistics, Reject(
            "c4.sentences", f"{counted(every.sentences, 'sentence')} in the {counted(len(kept), 'line')} kept"
        )
    stripped = every.text.strip()
    edited = every if stripped == every.text else type(statistics)(stripped)
    if settings.min_long_lines:
        num_long = sum(len(line) >= settings.long_line_characters for line in edited.text.split("\n"))
        if num_long < settings.min_long_lines:
            return edited, Reject(
                "c4.long_lines", f"{counted(num_long, 'line')} of {settings.long_line_characters} characters"
            )
    return edited, None
