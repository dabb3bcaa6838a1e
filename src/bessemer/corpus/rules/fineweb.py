"""FineWeb's own rules: Penedo et al. 2024, section 3.6; as datatrove counts (fineweb_quality_filter.py).

Its other rules are sets of their own: gopher_repetition, gopher_quality, and c4 without require_terminal; the language
score of 0.65 belongs to the language step.
"""

from __future__ import annotations

from bessemer.corpus.rules.counts import Statistics
from bessemer.corpus.rules.findings import Finding, against
from bessemer.recipe.rules import FineWeb


def judge(statistics: Statistics, settings: FineWeb) -> Finding | None:
    """Lines that end in punctuation, short lines, repeated lines, and line feeds."""
    lines = statistics.lines_up_to(settings.short_line_characters)
    if lines.total == 0:
        return Finding("fineweb.terminal_lines", "no line that is not blank")
    share = lines.terminal / lines.total
    if share < settings.min_terminal_line_share:
        return Finding(
            "fineweb.terminal_lines",
            f"{against(share, settings.min_terminal_line_share)} of the lines end in punctuation",
        )
    share = lines.short / lines.total
    if share > settings.max_short_line_share:
        shown = against(share, settings.max_short_line_share)
        return Finding(
            "fineweb.short_lines", f"{shown} of the lines have at most {settings.short_line_characters} characters"
        )
    line_feeds = statistics.text.count("\n")
    share = lines.duplicate_characters / max(len(statistics.codes) - line_feeds, 1)
    if share > settings.max_duplicate_character_share:
        return Finding(
            "fineweb.duplicate_characters",
            f"{against(share, settings.max_duplicate_character_share, 3)} of the characters stand in lines that stood before",
        )
    share = line_feeds / max(statistics.words.total, 1)
    if share > settings.max_line_feeds_per_word:
        return Finding("fineweb.line_feeds", f"{against(share, settings.max_line_feeds_per_word)} line feeds per word")
    return None
