"""The rules of a recipe on one document, in a fixed order. The first rule that it breaks is the reason for its rejection.

The order is: basic rules, code, textbook, gopher_quality, gopher_repetition, refinedweb (removes lines), c4 (removes lines),
fineweb (on the remaining lines), adult, toxic, and the basic length rule again if lines were removed.
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
from bessemer.recipe.rules import C4, PHRASES, SETS, RefinedWeb
from bessemer.text.characters import table
from bessemer.text.normalise import searchable

if TYPE_CHECKING:
    from bessemer.text.statistics import Statistics

# The rule sets, in the order in which they are applied
ORDER = (
    "code", "textbook", "gopher_quality", "gopher_repetition", "refinedweb", "c4", "fineweb", "adult", "toxic",
)  # fmt: skip


def apply(text: str, rules: Rules, language: str = "en") -> Reject | str:
    """Return the first rule that a normalised text breaks, or the text as edited by the rules.

    `language` (ISO 639-1) selects the word lists. Raises InputError for an unreadable list or model.
    """
    from bessemer.text.statistics import Statistics  # loads numba

    statistics = Statistics(text)
    finding = judge(statistics, rules)
    for name in ORDER:
        settings = getattr(rules, name)
        if finding is not None or settings is None:
            continue
        if name in EDITS:
            statistics, finding = EDITS[name](statistics, settings)
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
    """Return the basic rule that a normalised text breaks, with the measured value, or None to keep it."""
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
    """Return the reason to reject a text of which rules removed lines, or None."""
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
    """A rule of a rule set. recipe/rule_sets.toml describes its fields."""

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
    """Return the function for a rule's `value`. With a denominator of 0, a share of lines is None and any other share is 0."""
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
# Reasons of these rule sets, which apply only if the recipe names them
RULE_REASONS = {f"{name}.{rule.reason}": rule.means for name, rules in RULES.items() for rule in rules}
RULE_KEYS = {
    f"{name}.{rule.reason}": f"see corpus.rules.{name}.{rule.limit}" for name, rules in RULES.items() for rule in rules
}


def check(name: str, statistics: Statistics, settings: Any) -> Reject | None:
    """Return the first rule of a rule set that a text breaks, or None."""
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


# --- Rules of C4 and RefinedWeb, which remove lines from a text

CITATION = re.compile(r"\[\d{0,12}\]|\[edit\]|\[citation needed\]")
CLOSING = (".", "?", "!", '"', "'")
COUNTER = re.compile(rf"\W{{0,20}}\d[\d,.]{{0,20}}[kmb]?\s{{1,20}}(?:{'|'.join(PHRASES['counted'])})\W{{0,20}}")
MAX_COUNTER_CHARACTERS = 100
SHORT_LINE_WORDS, SHORT_LINE_CHARACTERS = 10, 1000  # phrases are removed from lines up to this size


def edit_c4(statistics: Statistics, settings: C4) -> tuple[Statistics, Reject | None]:
    """Apply C4's line filters. Returns the edited text and the reason for rejection, if any.

    The rules are from Raffel et al. 2020, section 2.2, and from its code as in datatrove (pipeline/filters/c4_filters.py).
    Sentences are split like spaCy's sentencizer does.
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
        if settings.remove_policy and any(phrase in small for phrase in PHRASES["c4_policy"]):
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


def edit_refinedweb(statistics: Statistics, settings: RefinedWeb) -> tuple[Statistics, Reject | None]:
    """Remove menu and counter lines. Returns the edited text and the reason for rejection, if any.

    The rules are from Penedo et al. 2023, section 3.2 and appendix, in DCLM's implementation and order
    (baselines_configs/dclm_baseline_refinedweb.yaml, mappers/modifiers.py). White space separates words. Unlike DCLM, URLs
    are not removed before lines are compared.
    """
    from bessemer.text import lines

    codes, text = statistics.codes, statistics.text
    spans = lines.find_lines(codes, table(), False)
    counts = lines.count_in_lines(codes, table(), *spans)
    kept: list[str] = []
    for start, end, upper, digits in zip(*(array.tolist() for array in (*spans, *counts)), strict=True):
        length = end - start
        if length == 0:
            kept.append("")
            continue
        if upper / length > settings.max_line_upper_share or (settings.remove_numeric_lines and digits == length):
            continue
        line = text[start:end]
        if settings.remove_counter_lines and length <= MAX_COUNTER_CHARACTERS and COUNTER.fullmatch(line.lower()):
            continue
        if settings.min_line_words > 1 and len(line.split(maxsplit=settings.min_line_words)) < settings.min_line_words:
            continue
        if settings.remove_phrases and length <= SHORT_LINE_CHARACTERS:
            without = _without_phrases(line)
            if without is not line and not without.strip():
                continue
            line = without
        kept.append(line)
    edited = "\n".join(kept).strip()
    before, after = len(text.split()), len(edited.split())
    removed = (before - after) / max(before, 1)
    if removed > settings.max_removed_word_share:
        shown = against(removed, settings.max_removed_word_share)
        return statistics, Reject("refinedweb.removed_words", f"{shown} of the words are removed")
    return (statistics if edited == text else type(statistics)(edited)), None


def _without_phrases(line: str) -> str:
    """Return a short line without phrases of shops and blogs; the same object if it has none."""
    small = line.lower()
    if not ("items in cart" in small or small.startswith("sign-in") or small.endswith("read more...")):
        return line
    if len(small) != len(line) or len(line.split()) > SHORT_LINE_WORDS:
        return line  # a character has a longer lower-case form, so indices in `small` are not valid in `line`
    while (at := line.lower().find("items in cart")) >= 0:
        line = line[:at].removesuffix(" ") + line[at + len("items in cart") :]
    if line.lower().endswith("read more..."):
        line = line[: -len("read more...")].removesuffix(" ")
    if line.lower().startswith("sign-in"):
        line = line[len("sign-in") :].removeprefix(" ")
    return line


EDITS: dict[str, Callable[[Any, Any], tuple[Any, Reject | None]]] = {"refinedweb": edit_refinedweb, "c4": edit_c4}
