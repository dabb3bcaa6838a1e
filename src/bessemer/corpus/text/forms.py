"""Text in one form for comparison: case, Unicode compatibility and invisible characters do not matter."""

from __future__ import annotations

import unicodedata


def points(ranges: str) -> list[int]:
    """Code points of ranges in hexadecimal, such as 30-39."""
    bounds = [part.partition("-") for part in ranges.split()]
    return [point for first, _, last in bounds for point in range(int(first, 16), int(last or first, 16) + 1)]


# Characters that a reader does not see (Unicode, Default_Ignorable_Code_Point), and the stretch of Arabic words; with the
# dot above, which a change of case adds to İ
INVISIBLE = dict.fromkeys(
    points(
        "AD 307 34F 61C 640 115F-1160 17B4-17B5 180B-180F 200B-200F 202A-202E 2060-206F 3164 FE00-FE0F FEFF FFA0 E0000-E01EF"
    )
)


def caseless(text: str) -> str:
    """Case folded, also that of the Turkish dotless i."""
    return text.casefold().replace("ı", "i")


def searchable(text: str) -> str:
    """Text in which a word is found however it was written: without case, compatibility forms (NFKC) and invisible
    characters."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", caseless(unicodedata.normalize("NFKC", text))).translate(INVISIBLE)
