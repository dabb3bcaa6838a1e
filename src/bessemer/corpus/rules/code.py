"""Rules for source code: the filters of The Stack and StarCoder as their code has them (bigcode-project/bigcode-dataset,
preprocessing) and StarCoder2's basic filters (Lozhkov et al. 2024, section 2.1): line lengths, letters, generated files,
XML under another name, encoded data; and, by choice, the licence at the top is removed."""

from __future__ import annotations

import re

from bessemer.corpus.rules import spans
from bessemer.corpus.rules.characters import table
from bessemer.corpus.rules.counts import Statistics
from bessemer.corpus.rules.findings import Finding, against
from bessemer.recipe.rules import Code

XML_WITHIN = 100
HEADER_LINES = 200
"""Lines of a comment at the top that are looked at."""
LINE_COMMENTS = ("#", "//", "--", ";", "%", "!", "dnl ")
BLOCK_COMMENTS = (("/*", "*/"), ("<!--", "-->"), ("(*", "*)"), ("{-", "-}"))
LICENCE = re.compile(r"copyright|licen[sc]e|spdx-|\(c\)|all rights reserved")
KEPT = re.compile(r"#!|#[ \t]{0,8}-\*-|#[ \t]{0,8}(?:vim?|coding)[:=]")
"""Lines of a header that are no part of a licence: the interpreter, the encoding."""


def judge(statistics: Statistics, settings: Code) -> Finding | None:
    """Shares are of all characters; lines are cut at line feeds, blank ones counted in the mean."""
    text = statistics.text
    characters = statistics.characters
    num_lines = characters.line_feeds + 1
    if num_lines > settings.max_lines:
        return Finding("code.lines", f"{against(num_lines, settings.max_lines)} lines")
    if settings.reject_xml and "<?xml version=" in text[:XML_WITHIN]:
        return Finding("code.xml", "")
    if statistics.lines.longest > settings.max_line_length:
        return Finding(
            "code.line_length", f"a line of {against(statistics.lines.longest, settings.max_line_length)} characters"
        )
    mean = (characters.total + 1) / num_lines - 1
    if mean > settings.max_mean_line_length:
        return Finding(
            "code.mean_line_length", f"mean line of {against(mean, settings.max_mean_line_length, 0)} characters"
        )
    total = max(characters.total, 1)
    if (share := characters.alphanumeric / total) < settings.min_alphanumeric_share:
        shown = against(share, settings.min_alphanumeric_share)
        return Finding("code.alphanumeric", f"{shown} of the characters are letters or digits")
    if (share := characters.alphabetic / total) < settings.min_alphabetic_share:
        shown = against(share, settings.min_alphabetic_share)
        return Finding("code.alphabetic", f"{shown} of the characters are letters")
    if settings.reject_generated:
        head = "\n".join(text.split("\n", settings.generated_lines)[: settings.generated_lines]).lower()
        marker = next((marker for marker in settings.generated_markers if marker.lower() in head), None)
        if marker is not None:
            return Finding("code.generated", marker)
    longest, encoded = spans.encoded_runs(statistics.codes, table(), settings.min_encoded_run)
    if longest > settings.max_encoded_run:
        return Finding(
            "code.encoded", f"{against(longest, settings.max_encoded_run)} characters of encoded data in a row"
        )
    if encoded / total > settings.max_encoded_share:
        return Finding(
            "code.encoded", f"{against(encoded / total, settings.max_encoded_share)} of the characters are encoded data"
        )
    return None


def strip_licence(text: str) -> str:
    """The text without the comment it begins with, when that speaks of a licence or copyright.

    The interpreter line and the encoding stay. What is taken for the comment ends at the first blank line after a
    licence was found, or where the comment ends.
    """
    lines = text.split("\n", HEADER_LINES)
    head = lines[:HEADER_LINES]
    first = 0
    while first < len(head) and (not head[first].strip() or KEPT.match(head[first])):
        first += 1
    end = _comment_end(head, first)
    if end <= first or not LICENCE.search("\n".join(head[first:end]).lower()):
        return text
    while end < len(head) and not head[end].strip():
        end += 1
    return "\n".join(head[:first] + lines[end:])


def _comment_end(lines: list[str], first: int) -> int:
    """The line after the comment that begins at `first`; `first` itself when there is none."""
    if first >= len(lines):
        return first
    start = lines[first].strip()
    for opening, closing in BLOCK_COMMENTS:
        if start.startswith(opening):
            for at in range(first, len(lines)):
                if closing in lines[at]:
                    return at + 1 if lines[at].rstrip().endswith(closing) else first
            return first
    mark = next((mark for mark in LINE_COMMENTS if start.startswith(mark)), None)
    if mark is None:
        return first
    end = first
    while end < len(lines) and lines[end].strip().startswith(mark) and not lines[end].startswith("#!"):
        if mark == "#" and lines[end].startswith(("#include", "#define", "#if", "#pragma")):
            break
        end += 1
    return end
