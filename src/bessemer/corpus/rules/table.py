"""The rules that compare a measured value with a limit, and the reasons of all rules. Sources: docs/rules.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from bessemer.corpus.text.statistics import Statistics

URL = re.compile(r"https?://[A-Za-z0-9$\-_@.&+/:=?#~!*(),%]+")
# what boilerplate paragraphs say; Curator's paragraph-long entries by a phrase of each
NEMO_POLICY = (
    "terms of use", "privacy policy", "cookie policy", "uses cookies", "privacy overview", "use of cookies", "use cookies",
    "privacy & cookies policy", "privacy and cookies policy", "necessary cookies are absolutely essential",
    "change your cookie settings, click here", "without changing your cookie settings",
)  # fmt: skip
XML_WITHIN = 100


class Finding(NamedTuple):
    """Why a rule rejects."""

    reason: str
    detail: str  # the measured value


class RulesVerdict(NamedTuple):
    """What the rules decide on a document."""

    text: str  # as the rules that edit left it
    reason: str | None  # None when it is kept
    detail: str


class Rule(NamedTuple):
    """One rule of a set."""

    reason: str
    description: str
    # The recipe's key: max_... or min_..., or reject_... (then `measure` returns the detail, or None to keep).
    limit: str
    # From the text's counts and the set's keys. A list counts by its length; None: no line that is not blank.
    measure: Callable[[Statistics, Any], float | str | list[str] | None]
    detail: str = ""  # with {shown} for the measured value and its limit, {names} of a list, and {keys} of the set
    digits: int = 2


def check(name: str, statistics: Statistics, settings: Any) -> Finding | None:
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
                return Finding(reason, str(value))
        elif not isinstance(value, int | float):
            return Finding(reason, "no line that is not blank")
        elif value > limit if rule.limit.startswith("max_") else value < limit:
            shown = against(value, limit, rule.digits)
            return Finding(reason, rule.detail.format_map({**vars(settings), "shown": shown, "names": names}))
    return None


def against(value: float, limit: float, digits: int = 2) -> str:
    """Such as "0.796 (limit 0.8)": with more than `digits` after the point where the side of the limit needs them."""
    if not isinstance(value, float):  # a count
        return f"{value} (limit {limit:.12g})"
    shown = f"{value:.{digits}f}"
    while (
        value != limit
        and digits < 17
        and (float(shown) < limit, float(shown) > limit) != (value < limit, value > limit)
    ):
        digits += 1
        shown = f"{value:.{digits}f}"
    return f"{shown} (limit {limit:.12g})"


def _of_characters(number: Callable[[Statistics], float]) -> Callable[[Statistics, Any], float]:
    """A share of all characters."""
    return lambda text, _: number(text) / max(text.characters.total, 1)


def _of_words(number: Callable[[Statistics], float]) -> Callable[[Statistics, Any], float]:
    """A number for each word."""
    return lambda text, _: number(text) / max(len(text.word_spans[0]), 1)


def _share_with_letter(text: Statistics, settings: Any) -> float:
    total = len(text.word_spans[0]) if settings.marks_are_words else text.words.proper
    return text.words.alphabetic / max(total, 1)


def _boilerplate_share(text: Statistics) -> float:
    small = text.text.lower()
    if "lorem ipsum" in small:
        return 1.0
    paragraphs = small.split("\n\n")
    return sum(any(phrase in paragraph for phrase in NEMO_POLICY) for paragraph in paragraphs) / len(paragraphs)


def _generated_marker(text: Statistics, settings: Any) -> str | None:
    head = "\n".join(text.text.split("\n", settings.generated_lines)[: settings.generated_lines]).lower()
    return next((marker for marker in settings.generated_markers if marker.lower() in head), None)


def _boilerplate_phrases(text: Statistics, settings: Any) -> list[str]:
    small = text.text.lower()
    return [phrase for phrase in settings.boilerplate_phrases if phrase.lower() in small]


def _distinct_share(text: Statistics) -> float:
    words = text.text.lower().split()
    return len(set(words)) / max(len(words), 1)


def _mean_line(text: Statistics) -> float:
    """Mean line in characters, blank lines counted."""
    return (text.characters.total + 1) / (text.characters.line_feeds + 1) - 1


def _mean_word(text: Statistics, settings: Any) -> float:
    return text.words.proper_characters / max(text.words.proper, 1)


CODE = (
    Rule("lines", "more lines than corpus.rules.code.max_lines", "max_lines",
         lambda text, _: text.characters.line_feeds + 1, "{shown} lines"),
    Rule("xml", "XML under another name", "reject_xml",
         lambda text, _: "" if "<?xml version=" in text.text[:XML_WITHIN] else None),
    Rule("line_length", "a line longer than corpus.rules.code.max_line_length", "max_line_length",
         lambda text, _: text.lines.longest, "a line of {shown} characters"),
    Rule("mean_line_length", "mean line longer than corpus.rules.code.max_mean_line_length", "max_mean_line_length",
         lambda text, _: _mean_line(text), "mean line of {shown} characters", 0),
    Rule("alphanumeric", "too few letters and digits for source code", "min_alphanumeric_share",
         _of_characters(lambda text: text.characters.alphanumeric), "{shown} of the characters are letters or digits"),
    Rule("alphabetic", "too few letters for source code", "min_alphabetic_share",
         _of_characters(lambda text: text.characters.alphabetic), "{shown} of the characters are letters"),
    Rule("generated", "the file says that a program wrote it", "reject_generated", _generated_marker),
    Rule("encoded", "data in base64 or hexadecimal", "max_encoded_run",
         lambda text, keys: text.encoded_runs(keys.min_encoded_run)[0], "{shown} characters of encoded data in a row"),
    Rule("encoded", "data in base64 or hexadecimal", "max_encoded_share",
         lambda text, keys: text.encoded_runs(keys.min_encoded_run)[1] / max(text.characters.total, 1),
         "{shown} of the characters are encoded data"),
)  # fmt: skip


TEXTBOOK = (
    Rule("characters", "fewer characters than corpus.rules.textbook.min_characters", "min_characters",
         lambda text, _: len(text.text), "{shown} characters"),
    Rule("line_feeds", "too many line feeds", "max_line_feeds_per_character",
         _of_characters(lambda text: text.characters.line_feeds), "{shown} line feeds per character"),
    Rule("distinct_words", "too few distinct words", "min_distinct_word_share",
         lambda text, _: _distinct_share(text), "{shown} of the words are distinct"),
    Rule("boilerplate", "too many boilerplate phrases", "max_boilerplate_phrases",
         _boilerplate_phrases, "{names}"),
)  # fmt: skip


GOPHER_QUALITY = (
    Rule("few_words", "fewer words than corpus.rules.gopher_quality.min_words", "min_words",
         lambda text, _: text.words.proper, "{shown} words"),
    Rule("many_words", "more words than corpus.rules.gopher_quality.max_words", "max_words",
         lambda text, _: text.words.proper, "{shown} words"),
    Rule("short_words", "mean word shorter than corpus.rules.gopher_quality.min_mean_word_length", "min_mean_word_length",
         _mean_word, "mean word of {shown} characters"),
    Rule("long_words", "mean word longer than corpus.rules.gopher_quality.max_mean_word_length", "max_mean_word_length",
         _mean_word, "mean word of {shown} characters"),
    Rule("hashes", "too many signs #", "max_hashes_per_word",
         _of_words(lambda text: text.characters.hashes), "{shown} signs # per word", 3),
    Rule("ellipses", "too many ellipses", "max_ellipses_per_word",
         _of_words(lambda text: text.characters.ellipses), "{shown} ellipses per word", 3),
    Rule("bullet_lines", "too many lines that begin with a bullet", "max_bullet_line_share",
         lambda text, _: text.bullets_and_ellipses[1] / max(text.bullets_and_ellipses[0], 1),
         "{shown} of the lines begin with a bullet"),
    Rule("ellipsis_lines", "too many lines that end with an ellipsis", "max_ellipsis_line_share",
         lambda text, _: text.bullets_and_ellipses[2] / max(text.bullets_and_ellipses[0], 1),
         "{shown} of the lines end with an ellipsis"),
    Rule("alphabetic_words", "too few words with a letter", "min_alphabetic_word_share", _share_with_letter,
         "{shown} of the words have a letter"),
    Rule("stop_words", "too few different stop words", "min_stop_words",
         lambda text, keys: text.num_stop_words(keys.stop_words), "{shown} different stop words"),
)  # fmt: skip

GOPHER_REPETITION = (
    Rule("paragraphs", "too many duplicate paragraphs", "max_duplicate_paragraph_share",
         lambda text, _: text.repeated_paragraphs.duplicates / text.repeated_paragraphs.total,
         "{shown} of the paragraphs are duplicates"),
    Rule("paragraph_characters", "too many characters in duplicate paragraphs",
         "max_duplicate_paragraph_character_share",
         _of_characters(lambda text: text.repeated_paragraphs.duplicate_characters),
         "{shown} of the characters are in duplicate paragraphs"),
    Rule("lines", "too many duplicate lines", "max_duplicate_line_share",
         lambda text, _: text.repeated_lines.duplicates / text.repeated_lines.total,
         "{shown} of the lines are duplicates"),
    Rule("line_characters", "too many characters in duplicate lines", "max_duplicate_line_character_share",
         _of_characters(lambda text: text.repeated_lines.duplicate_characters),
         "{shown} of the characters are in duplicate lines"),
    *(Rule(f"top_{n}gram", f"one run of {n} words is too much of the text", f"max_top_{n}gram_share",
           _of_characters(lambda text, n=n: text.top_ngram_characters(n)),  # type: ignore[misc]
           f"{{shown}} of the text is one run of {n} words")
      for n in (2, 3, 4)),
    *(Rule(f"duplicate_{n}grams", f"too much text in repeated runs of {n} words", f"max_duplicate_{n}gram_share",
           _of_characters(lambda text, n=n: text.repeated_ngram_characters(n)),  # type: ignore[misc]
           f"{{shown}} of the text in repeated runs of {n} words")
      for n in range(5, 11)),
)  # fmt: skip

NEMO = (
    Rule("non_alphanumeric", "too many characters other than letters, digits and marks", "max_non_alphanumeric_share",
         _of_characters(lambda text: text.characters.total - text.characters.common), "{shown} of the characters"),
    Rule("digits", "too many digits", "max_digit_share",
         _of_characters(lambda text: text.characters.decimal), "{shown} of the characters"),
    Rule("urls", "too much of the text is URLs", "max_url_share",
         _of_characters(lambda text: sum(map(len, URL.findall(text.text))) if "://" in text.text else 0),
         "{shown} of the characters"),
    Rule("white_space", "too much white space", "max_white_space_share",
         _of_characters(lambda text: text.characters.blanks), "{shown} of the characters"),
    Rule("brackets", "too many brackets", "max_bracket_share",
         _of_characters(lambda text: text.characters.brackets), "{shown} of the characters"),
    Rule("boilerplate", "too many paragraphs on cookies and policies, or lorem ipsum", "max_boilerplate_share",
         lambda text, _: _boilerplate_share(text), "{shown} of the paragraphs"),
    Rule("lines", "too few distinct lines", "min_distinct_line_share",
         lambda text, _: (text.lines.total - text.lines.duplicates) / text.lines.total if text.lines.total else None,
         "{shown} distinct"),
    Rule("paragraphs", "too few distinct paragraphs", "min_distinct_paragraph_share",
         lambda text, _: (text.paragraphs.total - text.paragraphs.duplicates) / text.paragraphs.total, "{shown} distinct"),
    Rule("line_characters", "too few characters in distinct lines", "min_distinct_line_character_share",
         lambda text, _: text.lines.distinct_characters / max(text.lines.characters, 1), "{shown} distinct"),
    Rule("paragraph_characters", "too few characters in distinct paragraphs", "min_distinct_paragraph_character_share",
         lambda text, _: text.paragraphs.distinct_characters
         / max(text.paragraphs.distinct_characters + text.paragraphs.duplicate_characters, 1), "{shown} distinct"),
    Rule("unmarked_lines", "too few lines with a closing mark", "max_unmarked_line_share",
         lambda text, _: 1 - text.lines.marked / text.lines.total, "{shown} of the lines have no closing mark"),
)  # fmt: skip

FINEWEB = (
    Rule("terminal_lines", "too few lines end in punctuation", "min_terminal_line_share",
         lambda text, _: text.lines.terminal / text.lines.total if text.lines.total else None,
         "{shown} of the lines end in punctuation"),
    Rule("short_lines", "too many short lines", "max_short_line_share",
         lambda text, keys: text.num_short_lines(keys.short_line_characters) / text.lines.total,
         "{shown} of the lines have at most {short_line_characters} characters"),
    Rule("duplicate_characters", "too many characters in duplicate lines", "max_duplicate_character_share",
         lambda text, _: text.lines.duplicate_characters
         / max(text.characters.total - text.characters.line_feeds, 1),
         "{shown} of the characters are in duplicate lines", 3),
    Rule("line_feeds", "too many line feeds for the words", "max_line_feeds_per_word",
         _of_words(lambda text: text.characters.line_feeds), "{shown} line feeds per word"),
)  # fmt: skip

RULES = {
    "code": CODE, "textbook": TEXTBOOK, "gopher_quality": GOPHER_QUALITY, "gopher_repetition": GOPHER_REPETITION,
    "nemo": NEMO, "fineweb": FINEWEB,
}  # fmt: skip

# Reasons of these sets, which are off unless the recipe names them
RULE_REASONS = {f"{name}.{rule.reason}": rule.description for name, rules in RULES.items() for rule in rules}
