"""Normalised forms of text: clean text for documents, folded text for comparison, and code points.

Clean text has normalised Unicode, control characters and white space. Folded text also ignores case, Unicode
compatibility and invisible characters.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from functools import cache

import numpy as np

from bessemer.common.errors import NotText

# Longest run of combining marks in text (Unicode Annex 15, Stream-Safe Text Format); normalisation sorts each run in
# quadratic time.
MAX_COMBINING_RUN = 30
FIRST_MARK = 0x300  # the first combining mark of Unicode: text below it has none
ASSIGNED = (range(0x40000), range(0xE0000, 0xE1000))  # where Unicode has characters, except for private use

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff]")
_ASCII_CONTROL = bytes([*range(9), 11, 12, *range(14, 32), 127])
# Control characters that separate lines (as in str.splitlines) or words, and the characters of Windows-1252 at C1 controls
_SEPARATORS = dict.fromkeys("\x0b\x0c\x1c\x1d\x1e\x85", "\n") | {"\x1f": " "}
_WINDOWS = {chr(byte): bytes([byte]).decode("cp1252", "ignore") for byte in range(0x80, 0xA0)}


def points(ranges: str) -> list[int]:
    """Return the code points of hexadecimal ranges such as 30-39."""
    bounds = [part.partition("-") for part in ranges.split()]
    return [point for first, _, last in bounds for point in range(int(first, 16), int(last or first, 16) + 1)]


# blocks of scripts without spaces between words (Unicode, Blocks.txt): Thai and Lao, Myanmar, Khmer, Han, kana
UNSPACED = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3040, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0xFF66, 0xFF9F), (0x20000, 0x323AF),
)  # fmt: skip
TIBETAN = (0x0F00, 0x0FFF)  # no spaces either, but its syllables are separated by punctuation

# Characters that are not visible (Unicode, Default_Ignorable_Code_Point), the elongation mark of Arabic, and the dot above,
# which case folding adds to İ
INVISIBLE = dict.fromkeys(
    points(
        "AD 307 34F 61C 640 115F-1160 17B4-17B5 180B-180F 200B-200F 202A-202E 2060-206F 3164 FE00-FE0F FEFF FFA0 E0000-E01EF"
    )
)


def replace_controls(text: str, counts: Counter[str]) -> str:
    """Replace control characters other than tab and line ends.

    A separator becomes a line end or space. In a text with control codes that are characters in Windows-1252, these codes
    become those characters. All others are removed. Adds the number of replacements to `counts` under "Windows-1252",
    "separators" and "removed".
    """
    if text.isascii() and len(text.encode("ascii").translate(None, _ASCII_CONTROL)) == len(text):
        return text
    controls = Counter(_CONTROL.findall(text))
    # 0x85 is an ellipsis in Windows-1252, and a line end (NEL) in other text.
    windows = _WINDOWS if any(_WINDOWS.get(sign) and sign != "\x85" for sign in controls) else {}
    for sign, number in controls.items():
        kind = "Windows-1252" if windows.get(sign) else "separators" if sign in _SEPARATORS else "removed"
        counts[kind] += number
    return text.translate({ord(sign): windows.get(sign) or _SEPARATORS.get(sign, "") for sign in controls})


def normalise(text: str, counts: Counter[str] | None = None) -> str:
    r"""Normalise text. Raises NotText for overlong runs of combining marks.

    The result has NFC, \n line ends without trailing space, no control characters except tab (`replace_controls`), no
    blank lines at either end, and the original indentation.
    """
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = replace_controls(text, Counter() if counts is None else counts)
    if text.isascii():
        if " \n" not in text and "\t\n" not in text:  # the usual case: no line ends in white space
            return text.lstrip("\n").rstrip()
    else:
        if longest_combining_run(text) > MAX_COMBINING_RUN:
            raise NotText(f"more than {MAX_COMBINING_RUN} combining marks in a row")
        text = unicodedata.normalize("NFC", text)
    return "\n".join([line.rstrip() for line in text.split("\n")]).strip("\n")


def normalise_foreign(text: str) -> str:
    """Normalise text that is only compared with documents, such as an evaluation set.

    Text that `normalise` rejects is returned unchanged, because no document contains it.
    """
    try:
        return normalise(text)
    except NotText:
        return text


def fold(text: str) -> str:
    """Return text with case folded and words separated by single spaces; exact duplicates are equal in this form."""
    return " ".join(text.casefold().split())


def text_digest(folded: str) -> bytes:
    """Return a 128-bit BLAKE2b hash (RFC 7693) of text from `fold`, which is equal for exact duplicates."""
    return hashlib.blake2b(folded.encode(), digest_size=16).digest()


def code_points(text: str) -> np.ndarray:
    """Return the characters of a text as uint32 numbers; a lone surrogate keeps its value."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def longest_combining_run(text: str) -> int:
    """Return the length of the longest run of combining marks."""
    codes = code_points(text)
    if codes.max(initial=0) < FIRST_MARK:
        return 0
    marks = np.flatnonzero(_combining()[codes])
    ends = np.append(np.flatnonzero(np.diff(marks) > 1), len(marks) - 1)
    return int(np.diff(ends, prepend=-1).max()) if len(marks) else 0


@cache
def _combining() -> np.ndarray:
    """Return an array, (0x110000,), that is True for each code point that is a combining mark."""
    marks = np.zeros(0x110000, dtype=bool)
    for plane in ASSIGNED:
        classes = map(unicodedata.combining, map(chr, plane))
        marks[plane.start : plane.stop] = np.fromiter(classes, dtype=np.uint8, count=len(plane))
    return marks


def caseless(text: str) -> str:
    """Return text with case folded, including the Turkish dotless i."""
    return text.casefold().replace("ı", "i")


def searchable(text: str) -> str:
    """Return text for searching words regardless of case, compatibility forms (NFKC) and invisible characters."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", caseless(unicodedata.normalize("NFKC", text))).translate(INVISIBLE)
