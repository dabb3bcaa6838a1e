"""Character classes: a 32-bit set of flags for every code point.

The classes are those of Python (str.isspace and so on), Unicode's categories, and those of datatrove and spaCy
(spacy.toml), so that filters keep the same documents.
"""

from __future__ import annotations

import tomllib
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.text.normalise import ASSIGNED, code_points, points

# str.isspace, isalpha, isdecimal (0 to 9 of any script), isdigit (superscripts and circled digits too), isalnum, isupper,
# and line ends of str.splitlines
SPACE, ALPHABETIC, DECIMAL, NUMERIC, ALPHANUMERIC, UPPER, LINE_END = (1 << bit for bit in range(7))
# datatrove: Gopher's counts skip a word of only SYMBOL; a line that ends in TERMINAL ends a sentence (FineWeb).
# spaCy's sentencizer: a token SENTENCE_END ends a sentence. PUNCTUATION is Unicode's category P.
SYMBOL, TERMINAL, SENTENCE_END, PUNCTUATION = (1 << bit for bit in range(7, 11))
# Letters of spaCy's tokenizer; LOWER_LETTER and UPPER_LETTER include letters without case; it never splits at PLAIN.
LETTER, LOWER_LETTER, UPPER_LETTER, PLAIN = (1 << bit for bit in range(11, 15))
# Split off alone at the start (PREFIX) or end (SUFFIX) of a word; may be split inside it (INFIX); ICON: Unicode's So, split
# anywhere; a full stop after BEFORE_DOT is split off; CURRENCY is split off after a digit.
PREFIX, SUFFIX, INFIX, ICON, QUOTE, BEFORE_DOT, CURRENCY = (1 << bit for bit in range(15, 22))
# a-z A-Z 0-9 + / =; 0-9 a-f A-F; line feed; #; …
BASE64, HEXADECIMAL, LINE_FEED, HASH, ELLIPSIS = (1 << bit for bit in range(22, 27))


@cache
def spacy() -> dict[str, Any]:
    """Return the content of spacy.toml: ranges of code points, single characters and special words of spaCy."""
    return tomllib.loads(Path(__file__).with_name("spacy.toml").read_text(encoding="utf-8"))


@cache
def table() -> npt.NDArray[np.uint32]:
    """Return an array, (0x110000,), with the bit set of flags (SPACE, LETTER, ...) of every code point.

    It is computed once per process.
    """
    bits = np.zeros(0x110000, dtype=np.uint32)  # unassigned code points have no flag
    for plane in ASSIGNED:
        bits[plane.start : plane.stop] = [_python_bits(chr(point)) for point in plane]
    ranges = {name: points(text) for name, text in spacy()["ranges"].items()}
    bits[ranges["terminal"]] |= TERMINAL | SENTENCE_END | SYMBOL
    bits[ranges["no_sentence_end"]] &= ~np.uint32(SENTENCE_END)
    bits[ranges["other_symbols"]] |= SYMBOL
    for point in ranges["cased"]:
        bits[point] |= LETTER | (UPPER_LETTER if chr(point).isupper() else LOWER_LETTER)
    bits[ranges["uncased"]] |= LETTER | LOWER_LETTER | UPPER_LETTER
    for flag, characters in spacy()["characters"].items():
        bits[code_points(characters)] |= globals()[flag]
    bits[bits & ICON > 0] |= PREFIX | SUFFIX | INFIX
    bits[bits & LOWER_LETTER > 0] |= BEFORE_DOT
    bits[(bits & LETTER > 0) & (bits & (PREFIX | SUFFIX | INFIX | ICON) == 0)] |= PLAIN
    return bits


@cache
def classes() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """Group characters with equal flags into classes.

    Returns the class of every code point, (0x110000,), and the flags of each class.
    """
    bits = np.unique(table())
    return np.searchsorted(bits, table()).astype(np.uint8), bits


def _python_bits(character: str) -> int:
    """Return the bit set of a character's flags, limited to those that Python's str methods or its category define."""
    category = unicodedata.category(character)
    if category == "Cn":
        return 0
    flags = PUNCTUATION if category[0] == "P" else ICON if category == "So" else 0
    flags |= SPACE * character.isspace() | UPPER * character.isupper()
    if character.isalnum():
        flags |= ALPHANUMERIC | ALPHABETIC * character.isalpha()
        flags |= DECIMAL * character.isdecimal() | NUMERIC * character.isdigit()
    return flags
