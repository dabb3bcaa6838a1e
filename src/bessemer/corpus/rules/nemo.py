"""The heuristic filters of NVIDIA NeMo Curator (stages/text/filters/heuristic/string.py and repetition.py) that no other
set has, in the order of its English pipeline (config/text/heuristic_filter_english_pipeline.yaml)."""

from __future__ import annotations

import re

from bessemer.corpus.rules.counts import Repeats, Statistics
from bessemer.corpus.rules.findings import Finding, against
from bessemer.recipe.rules import Nemo

URL = re.compile(r"https?://[A-Za-z0-9$\-_@.&+/:=?#~!*(),%]+")
POLICY = (
    "terms of use", "privacy policy", "cookie policy", "uses cookies", "privacy overview", "use of cookies", "use cookies",
    "privacy & cookies policy", "privacy and cookies policy", "necessary cookies are absolutely essential",
    "change your cookie settings, click here", "without changing your cookie settings",
)  # fmt: skip
"""What boilerplate paragraphs say; Curator's paragraph-long entries by a phrase of each."""


def judge(statistics: Statistics, settings: Nemo) -> Finding | None:
    """Kinds of characters, URLs, boilerplate, repetition and closing marks."""
    found = statistics.characters
    total = max(found.total, 1)
    for name, number, limit in (
        ("non_alphanumeric", found.total - found.common, settings.max_non_alphanumeric_share),
        ("digits", found.decimal, settings.max_digit_share),
        ("urls", _url_characters(statistics.text), settings.max_url_share),
        ("white_space", found.blanks, settings.max_white_space_share),
        ("brackets", found.brackets, settings.max_bracket_share),
    ):
        if number / total > limit:
            return Finding(f"nemo.{name}", f"{against(number / total, limit)} of the characters")
    paragraphs = statistics.text.split("\n\n")
    share = _boilerplate(paragraphs)
    if share > settings.max_boilerplate_share:
        return Finding("nemo.boilerplate", f"{against(share, settings.max_boilerplate_share)} of the paragraphs")
    lines = statistics.lines
    if lines.total == 0:
        return Finding("nemo.lines", "no line that is not blank")
    blocks = _paragraph_repeats(paragraphs)
    for name, distinct, of, limit in (
        ("lines", lines.total - lines.duplicates, lines.total, settings.min_distinct_line_share),
        ("paragraphs", blocks.total - blocks.duplicates, blocks.total, settings.min_distinct_paragraph_share),
        ("line_characters", lines.distinct_characters, lines.characters, settings.min_distinct_line_character_share),
        (
            "paragraph_characters",
            blocks.distinct_characters,
            blocks.distinct_characters + blocks.duplicate_characters,
            settings.min_distinct_paragraph_character_share,
        ),
    ):
        if distinct / max(of, 1) < limit:
            return Finding(f"nemo.{name}", f"{against(distinct / max(of, 1), limit)} distinct")
    unmarked = 1 - lines.marked / lines.total
    if unmarked > settings.max_unmarked_line_share:
        return Finding(
            "nemo.unmarked_lines",
            f"{against(unmarked, settings.max_unmarked_line_share)} of the lines have no closing mark",
        )
    return None


def _url_characters(text: str) -> int:
    return sum(len(found.group()) for found in URL.finditer(text)) if "://" in text else 0


def _boilerplate(paragraphs: list[str]) -> float:
    number = 0
    for paragraph in paragraphs:
        small = paragraph.lower()
        if "lorem ipsum" in small:
            return 1.0
        number += any(phrase in small for phrase in POLICY)
    return number / len(paragraphs)


def _paragraph_repeats(paragraphs: list[str]) -> Repeats:
    seen: set[str] = set()
    duplicates = characters = distinct = 0
    for paragraph in paragraphs:
        if paragraph in seen:
            duplicates += 1
            characters += len(paragraph)
        else:
            seen.add(paragraph)
            distinct += len(paragraph)
    return Repeats(len(paragraphs), duplicates, characters, distinct)
