"""Rules that remove lines from a text: C4's and RefinedWeb's."""

from __future__ import annotations

import re

from bessemer.common.console import counted
from bessemer.corpus.document import Reject
from bessemer.corpus.filters.base import against
from bessemer.recipe.rules import C4, PHRASES, RefinedWeb
from bessemer.text import lines
from bessemer.text.characters import table
from bessemer.text.statistics import Statistics

CITATION = re.compile(r"\[\d{0,12}\]|\[edit\]|\[citation needed\]")
CLOSING = (".", "?", "!", '"', "'")
COUNTER = re.compile(rf"\W{{0,20}}\d[\d,.]{{0,20}}[kmb]?\s{{1,20}}(?:{'|'.join(PHRASES['counted'])})\W{{0,20}}")
MAX_COUNTER_CHARACTERS = 100
SHORT_LINE_WORDS, SHORT_LINE_CHARACTERS = 10, 1000  # of lines from which phrases are removed


def edit_c4(statistics: Statistics, settings: C4) -> tuple[Statistics, Reject | None]:
    """Apply C4's line filters; returns the edited text and the reason for rejection, if any.

    Raffel et al. 2020, section 2.2, and the rules of its code as in datatrove (pipeline/filters/c4_filters.py);
    sentences as in spaCy's sentencizer.
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
    every = Statistics("\n".join(kept))
    if settings.min_sentences and every.sentences < settings.min_sentences:
        return statistics, Reject(
            "c4.sentences", f"{counted(every.sentences, 'sentence')} in the {counted(len(kept), 'line')} kept"
        )
    stripped = every.text.strip()
    edited = every if stripped == every.text else Statistics(stripped)
    if settings.min_long_lines:
        num_long = sum(len(line) >= settings.long_line_characters for line in edited.text.split("\n"))
        if num_long < settings.min_long_lines:
            return edited, Reject(
                "c4.long_lines", f"{counted(num_long, 'line')} of {settings.long_line_characters} characters"
            )
    return edited, None


def edit_refinedweb(statistics: Statistics, settings: RefinedWeb) -> tuple[Statistics, Reject | None]:
    """Remove menu and counter lines; returns the edited text and the reason for rejection, if any.

    Penedo et al. 2023, section 3.2 and appendix, as in DCLM (baselines_configs/dclm_baseline_refinedweb.yaml,
    mappers/modifiers.py), in its order. Words are separated by white space. Unlike DCLM, URLs are not removed before
    lines are compared.
    """
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
    return (statistics if edited == text else Statistics(edited)), None


def _without_phrases(line: str) -> str:
    """A short line without the phrases of shops and blogs; the same object when there are none."""
    small = line.lower()
    if not ("items in cart" in small or small.startswith("sign-in") or small.endswith("read more...")):
        return line
    if len(small) != len(line) or len(line.split()) > SHORT_LINE_WORDS:
        return line  # a character whose small form is longer: places would not agree
    while (at := line.lower().find("items in cart")) >= 0:
        line = line[:at].removesuffix(" ") + line[at + len("items in cart") :]
    if line.lower().endswith("read more..."):
        line = line[: -len("read more...")].removesuffix(" ")
    if line.lower().startswith("sign-in"):
        line = line[len("sign-in") :].removeprefix(" ")
    return line
