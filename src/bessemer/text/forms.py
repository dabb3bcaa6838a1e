"""Text in one form for comparison: case, Unicode compatibility and invisible characters do not matter."""

from __future__ import annotations

import unicodedata


def points(ranges: str) -> list[int]:
    """Code points of ranges in hexadecimal, such as 30-39."""
    bounds = [part.partition("-") for part in ranges.split()]
    return [point for first, _, last in bounds for point in range(int(first, 16), int(last or first, 16) + 1)]


# blocks of scripts without spaces between words (Unicode, Blocks.txt): Thai and Lao, Myanmar, Khmer, Han, kana
UNSPACED = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3040, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0xFF66, 0xFF9F), (0x20000, 0x323AF),
)  # fmt: skip
TIBETAN = (0x0F00, 0x0FFF)  # no spaces either, but its syllables are separated by punctuation

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
