"""C4's rules: Raffel et al. 2020, section 2.2, and those that only its code has; as datatrove applies them
(pipeline/filters/c4_filters.py). Lines are removed from the text; what stays is counted.

The sentences are counted over the words of `words.split`, as spaCy's sentencizer counts.
"""

from __future__ import annotations

import re

from bessemer.corpus.rules.counts import Statistics
from bessemer.corpus.rules.findings import Finding
from bessemer.recipe.rules import C4

CITATION = re.compile(r"\[\d{0,12}\]|\[edit\]|\[citation needed\]")
CLOSING = (".", "?", "!", '"', "'")
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


def edit(statistics: Statistics, settings: C4) -> tuple[Statistics, Finding | None]:
    """The text with only the lines that C4 keeps, and why it is rejected, if it is."""
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
            return statistics, Finding("c4.lorem_ipsum", f"in the line {line[:80]!r}")
        if settings.remove_javascript and "javascript" in small:
            continue
        if settings.reject_curly_bracket and "{" in line:
            return statistics, Finding("c4.curly_bracket", f"in the line {line[:80]!r}")
        if settings.remove_policy and any(phrase in small for phrase in POLICY):
            continue
        kept.append(line)
    lines = Statistics("\n".join(kept))
    if settings.min_sentences and lines.sentences < settings.min_sentences:
        return statistics, Finding("c4.sentences", f"{lines.sentences} sentences in {len(kept)} lines that stay")
    stripped = lines.text.strip()
    edited = lines if stripped == lines.text else Statistics(stripped)
    if settings.min_long_lines:
        num_long = sum(len(line) >= settings.long_line_characters for line in edited.text.split("\n"))
        if num_long < settings.min_long_lines:
            return edited, Finding("c4.long_lines", f"{num_long} lines of {settings.long_line_characters} characters")
    return edited, None
