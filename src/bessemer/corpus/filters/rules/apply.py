"""All rules of a recipe on one document, in a fixed order; the first rule that it breaks is its reason.

Basic rules; code; textbook; gopher_quality; gopher_repetition; refinedweb (removes lines); c4 (removes lines);
fineweb, on the remaining lines; adult; toxic; and, when lines were removed, the basic length rule once more.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from bessemer.corpus.document import Reject
from bessemer.corpus.filters.base import against
from bessemer.corpus.filters.rules.lists import judge_flagged
from bessemer.corpus.filters.rules.table import check
from bessemer.recipe import Rules
from bessemer.text.characters import ALPHANUMERIC, SPACE, python_table
from bessemer.text.normalise import code_points

# sets that need the compiled statistics, in their order
COUNTING = ("code", "textbook", "gopher_quality", "gopher_repetition", "refinedweb", "c4", "fineweb")


def apply(text: str, rules: Rules, language: str = "en") -> Reject | str:
    """Return the first rule that a normalised text breaks, or the text as the rules edit it.

    `language` (ISO 639-1) selects the word lists. Raises InputError for an unreadable list or model.
    """
    if None in (rules.min_characters, rules.min_alphanumeric_share, rules.min_unique_line_share):
        rules = rules.of_source()
    least = rules.min_characters or 0
    if (basic := judge(text, rules)) is not None:
        return basic
    edited, finding = (
        (text, None) if all(getattr(rules, name) is None for name in COUNTING) else count_and_edit(text, rules)
    )
    for name in ("adult", "toxic"):
        if finding is None and getattr(rules, name) is not None:
            finding = judge_flagged(edited, name, getattr(rules, name), language)
    if finding is None and edited != text:
        if not edited or edited.isspace():
            finding = Reject("empty", "no line is left")
        elif len(edited) < least:
            finding = Reject("too_short", f"{against(len(edited), least)} characters are left")
    return edited if finding is None else finding


def count_and_edit(text: str, rules: Rules) -> tuple[str, Reject | None]:
    """The text as the counting sets leave it, and the first rule of theirs that it breaks."""
    from bessemer.corpus.filters.rules.edits import edit_c4, edit_refinedweb
    from bessemer.text.statistics import Statistics

    edits: dict[str, Any] = {"refinedweb": edit_refinedweb, "c4": edit_c4}
    statistics, finding = Statistics(text), None
    for name in COUNTING:
        settings = getattr(rules, name)
        if settings is None:
            continue
        if name in edits:
            statistics, finding = edits[name](statistics, settings)
        else:
            finding = check(name, statistics, settings)
        if finding is not None:
            break
    return statistics.text, finding


# --- The basic rules: one pass each at C speed (str methods, bytes.translate, a NumPy look-up), without regular expressions

# mean line in characters from which a document could be minified code or a dump of data: prose seldom has such
# paragraphs, but JSONL often has whole documents on one line
LONG_LINE = 1000.0
LONG_WORD = 40  # ASCII characters: longer than words, shorter than base64, hashes and minified statements
CODE_SIGNS = '{}[]()<>=;:_$|\\&#*+/^~@%"`0123456789'
# Above this `data_share` long lines are code or data. docs/rules.md has the measurement: prose of 100 languages has
# less (99.4% of the pages), minified code and dumps have more (99% of the files); few lie between 0.25 and 0.3.
MAX_DATA_SHARE = 0.3
ASCII_ALPHANUMERIC = bytes(code for code in range(128) if chr(code).isalnum())
ASCII_SPACE = bytes(code for code in range(128) if chr(code).isspace())


def judge(text: str, rules: Rules) -> Reject | None:
    """The reason and the measured value for which `text` (normalised) is rejected; None when it is kept."""
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
    # A share is never below 0: such a threshold switches its rule off, and nothing is counted for it.
    if (limit := rules.min_alphanumeric_share) and (share := alphanumeric_share(text)) < limit:
        return Reject("not_text", f"{against(share, limit)} of the characters are letters or digits")
    if limit := rules.min_unique_line_share:
        unique = len(set(map(str.strip, lines))) / len(lines)
        if unique < limit:
            return Reject("repetitive", f"{against(unique, limit)} of the lines are distinct")
    return None


def data_share(text: str) -> float:
    """Share of code signs, digits, and words over LONG_WORD ASCII characters among the characters that are not white
    space. Prose of any script has few: languages without spaces are not written in ASCII."""
    words = text.split()
    visible = sum(map(len, words))
    short = "".join([word for word in words if len(word) <= LONG_WORD or not word.isascii()])
    return (visible - len(short) + sum(map(short.count, CODE_SIGNS))) / max(visible, 1)


def alphanumeric_share(text: str) -> float:
    """Letters and digits of any script, divided by the characters other than white space."""
    if text.isascii():
        raw = text.encode("ascii")
        others = len(raw.translate(None, ASCII_ALPHANUMERIC))
        visible = len(raw.translate(None, ASCII_SPACE))
        return (len(raw) - others) / max(visible, 1)

    codes = code_points(text)
    _, alphanumeric, space = np.bincount(_classes()[codes], minlength=3)
    return float(alphanumeric / max(len(codes) - space, 1))


@cache
def _classes() -> np.ndarray:
    """Class of every code point: 1 letter or digit, 2 white space, 0 anything else."""
    bits = python_table()
    return (bits & ALPHANUMERIC > 0) + 2 * (bits & SPACE > 0).astype(np.uint8)
