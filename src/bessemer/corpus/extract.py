"""Text in its clean form: normalisation, folding, and the description in package metadata."""

from __future__ import annotations

import ast
import re
import unicodedata
from functools import cache

MAX_COMBINING_RUN = 30
"""Longest run of combining marks in text (Unicode Annex 15, Stream-Safe Text Format); normalisation sorts
such a run in quadratic time."""

_ASCII_CONTROL = bytes([*range(9), *range(11, 32), 127])
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")


class NotText(ValueError):
    """The document holds no text that could be used; the message says why."""


def normalise(text: str) -> str:
    """The form in which text is kept: NFC, lines ended by \\n without trailing space, no control characters
    but tab.

    Blank lines at the beginning and the end are dropped; indentation stays. Raises NotText when it cannot be.
    """
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii():
        text = text.encode("ascii").translate(None, _ASCII_CONTROL).decode("ascii")
    else:
        text = _CONTROL.sub("", text)
        if _combining_runs().search(text):
            raise NotText(f"more than {MAX_COMBINING_RUN} combining marks in a row")
        text = unicodedata.normalize("NFC", text)
    return "\n".join([line.rstrip() for line in text.split("\n")]).strip("\n")


def fold(text: str) -> str:
    """Case and white space folded: what exact duplicates share; words are parted by single spaces."""
    return " ".join(text.casefold().split())


def description(text: str) -> str:
    """The long description of a package METADATA file (core metadata: the body, or a folded Description
    header)."""
    text = text.replace("\r\n", "\n")
    header, _, body = text.partition("\n\n")
    if body.strip():
        return body
    lines = header.split("\n")
    for number, line in enumerate(lines):
        if line.startswith("Description:"):
            folded = [line.removeprefix("Description:").strip()]
            for more in lines[number + 1 :]:
                if not more.startswith((" ", "\t")):
                    break
                folded.append(re.sub(r"^(?: {7}\||\t| {1,8})", "", more))
            return "\n".join(folded)
    return ""


def topics(code: str) -> dict[str, str]:
    """The texts in pydoc_data/topics.py. The file is parsed as a literal, never run. Raises NotText."""
    try:
        for statement in ast.parse(code).body:
            if isinstance(statement, ast.Assign):
                value = ast.literal_eval(statement.value)
                if isinstance(value, dict):
                    return {str(name): text for name, text in value.items() if isinstance(text, str)}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotText(f"not a dictionary of texts: {error}") from None
    raise NotText("no dictionary of texts")


@cache
def _combining_runs() -> re.Pattern[str]:
    """More combining marks in a row than any language writes."""
    ranges: list[list[int]] = []
    for code in range(0x110000):
        if unicodedata.combining(chr(code)):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    marks = "".join(f"{chr(low)}-{chr(high)}" for low, high in ranges)
    return re.compile(f"[{marks}]{{{MAX_COMBINING_RUN + 1}}}")
