"""What a rule says of a document, and the names under which it rejects."""

from __future__ import annotations

from typing import NamedTuple

RULE_REASONS = {
    "code.lines": "more lines than corpus.rules.code.max_lines",
    "code.xml": "XML under another name",
    "code.line_length": "a line longer than corpus.rules.code.max_line_length",
    "code.mean_line_length": "mean line longer than corpus.rules.code.max_mean_line_length",
    "code.alphanumeric": "too few letters and digits for source code",
    "code.alphabetic": "too few letters for source code",
    "code.generated": "the file says that a program wrote it",
    "code.encoded": "data in base64 or hexadecimal",
    "textbook.characters": "fewer characters than corpus.rules.textbook.min_characters",
    "textbook.line_feeds": "too many line feeds",
    "textbook.distinct_words": "too few distinct words",
    "textbook.boilerplate": "too many boilerplate phrases",
    "gopher_quality.few_words": "fewer words than corpus.rules.gopher_quality.min_words",
    "gopher_quality.many_words": "more words than corpus.rules.gopher_quality.max_words",
    "gopher_quality.short_words": "mean word shorter than corpus.rules.gopher_quality.min_mean_word_length",
    "gopher_quality.long_words": "mean word longer than corpus.rules.gopher_quality.max_mean_word_length",
    "gopher_quality.hashes": "too many signs #",
    "gopher_quality.ellipses": "too many ellipses",
    "gopher_quality.bullet_lines": "too many lines that begin with a bullet",
    "gopher_quality.ellipsis_lines": "too many lines that end with an ellipsis",
    "gopher_quality.alphabetic_words": "too few words with a letter",
    "gopher_quality.stop_words": "too few different stop words",
    "gopher_repetition.paragraphs": "too many paragraphs that stood before",
    "gopher_repetition.paragraph_characters": "too many characters in paragraphs that stood before",
    "gopher_repetition.lines": "too many lines that stood before",
    "gopher_repetition.line_characters": "too many characters in lines that stood before",
    **{f"gopher_repetition.top_{n}gram": f"one run of {n} words is too much of the text" for n in (2, 3, 4)},
    **{f"gopher_repetition.duplicate_{n}grams": f"too much text in repeated runs of {n} words" for n in range(5, 11)},
    "nemo.non_alphanumeric": "too many characters other than letters, digits and marks",
    "nemo.digits": "too many digits",
    "nemo.urls": "too much of the text is URLs",
    "nemo.white_space": "too much white space",
    "nemo.brackets": "too many brackets",
    "nemo.boilerplate": "too many paragraphs on cookies and policies, or lorem ipsum",
    "nemo.lines": "too few distinct lines",
    "nemo.paragraphs": "too few distinct paragraphs",
    "nemo.line_characters": "too few characters in distinct lines",
    "nemo.paragraph_characters": "too few characters in distinct paragraphs",
    "nemo.unmarked_lines": "too few lines with a closing mark",
    "refinedweb.domain": "the domain is on the list",
    "refinedweb.url": "the URL is on the list",
    "refinedweb.url_substring": "a string of the list stands in the URL",
    "refinedweb.url_word": "a word of the list stands in the URL",
    "refinedweb.url_soft_words": "several soft words of the list stand in the URL",
    "refinedweb.removed_words": "the corrections of lines remove too many words",
    "c4.lorem_ipsum": "lorem ipsum",
    "c4.curly_bracket": "a curly bracket",
    "c4.sentences": "too few sentences in the lines that stay",
    "c4.long_lines": "too few long lines",
    "fineweb.terminal_lines": "too few lines end in punctuation",
    "fineweb.short_lines": "too many short lines",
    "fineweb.duplicate_characters": "too many characters in lines that stood before",
    "fineweb.line_feeds": "too many line feeds for the words",
    "adult.words": "flagged words (corpus.rules.adult.path)",
    "adult.classifier": "the classifier of corpus.rules.adult says so",
    "toxic.words": "flagged words (corpus.rules.toxic.path)",
    "toxic.classifier": "the classifier of corpus.rules.toxic says so",
}
"""Reasons of the rule sets, which are off unless the recipe names them, in the order in which they are looked for;
the rules for URLs come before all others."""


class Finding(NamedTuple):
    """Why a rule rejects."""

    reason: str
    detail: str
    """The measured value."""


def against(value: float, limit: float, digits: int = 2) -> str:
    """A measured value and the limit that it breaks, as "0.796 (limit 0.8)": with `digits` after the point, or as many
    more as it takes to show on which side of the limit it lies."""
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


class Judgement(NamedTuple):
    """What the rules make of a document."""

    text: str
    """As the rules that edit left it."""
    reason: str | None
    """None when it is kept."""
    detail: str
