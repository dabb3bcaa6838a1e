"""RefinedWeb's corrections of lines (Penedo et al. 2023, section 3.2 and appendix), as DCLM rebuilt them
(baselines_configs/dclm_baseline_refinedweb.yaml, mappers/modifiers.py), in its order.

Words are what white space separates. DCLM compares the lines of a text from which it has removed URLs first; this does
not.
"""

from __future__ import annotations

import re

from bessemer.corpus.rules import spans
from bessemer.corpus.rules.characters import table
from bessemer.corpus.rules.counts import Statistics
from bessemer.corpus.rules.findings import Finding, against
from bessemer.recipe.rules import RefinedWeb

COUNTED = (
    "likes", "shares", "comments", "retweets", "reposts", "quotes", "bookmarks", "upvotes", "downvotes", "downloads",
    "views", "followers",
)  # fmt: skip
COUNTER = re.compile(rf"\W{{0,20}}\d[\d,.]{{0,20}}[kmb]?\s{{1,20}}(?:{'|'.join(COUNTED)})\W{{0,20}}")
LONGEST_COUNTER = 100
SHORT_LINE_WORDS = 10
"""Phrases are removed from lines of at most so many words."""
SHORT_LINE_CHARACTERS = 1000


def edit(statistics: Statistics, settings: RefinedWeb) -> tuple[Statistics, Finding | None]:
    """The text without the lines that are menus and counters, and why it is rejected, if it is."""
    codes = statistics.codes
    starts, ends = spans.find_lines(codes, table(), False)
    upper, digits = spans.line_shares(codes, table(), starts, ends)
    text = statistics.text
    kept: list[str] = []
    for start, end, capitals, numbers in zip(
        starts.tolist(), ends.tolist(), upper.tolist(), digits.tolist(), strict=True
    ):
        length = end - start
        if length == 0:
            kept.append("")
            continue
        if capitals / length > settings.max_line_upper_share:
            continue
        if settings.remove_numeric_lines and numbers == length:
            continue
        line = text[start:end]
        if settings.remove_counter_lines and length <= LONGEST_COUNTER and COUNTER.fullmatch(line.lower()):
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
        return statistics, Finding(
            "refinedweb.removed_words", f"{against(removed, settings.max_removed_word_share)} of the words are removed"
        )
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
