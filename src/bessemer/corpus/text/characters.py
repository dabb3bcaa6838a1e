"""Character classes as a 32-bit value for every code point.

The classes are Python's (str.isspace and so on), Unicode's categories, and those of datatrove 0.10 (utils/text.py) and
spaCy 3.8 (lang/char_classes.py, lang/punctuation.py), so that the same documents are kept.
"""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np
import numpy.typing as npt

from bessemer.corpus.extract import ASSIGNED

# str.isspace, isalpha, isdecimal (0 to 9 of any script), isdigit (superscripts and circled digits too), isalnum, isupper;
# where str.splitlines breaks
SPACE, ALPHABETIC, DECIMAL, NUMERIC, ALPHANUMERIC, UPPER, LINE_END = (1 << bit for bit in range(7))
# datatrove: a word of SYMBOL alone is no word for Gopher's counts; a line that ends in TERMINAL ends a sentence (FineWeb).
# spaCy's sentencizer: a token SENTENCE_END ends a sentence. PUNCTUATION is Unicode's category P.
SYMBOL, TERMINAL, SENTENCE_END, PUNCTUATION = (1 << bit for bit in range(7, 11))
# The tokenizer's letters; LOWER_LETTER and UPPER_LETTER include letters without case; PLAIN: it never splits there.
LETTER, LOWER_LETTER, UPPER_LETTER, PLAIN = (1 << bit for bit in range(11, 15))
# Split off alone at the start (PREFIX) or end (SUFFIX) of a word; may be split inside it (INFIX); ICON: Unicode's So, split
# anywhere; a full stop after BEFORE_DOT is split off; CURRENCY is split off after a digit.
PREFIX, SUFFIX, INFIX, ICON, QUOTE, BEFORE_DOT, CURRENCY = (1 << bit for bit in range(15, 22))
# a-z A-Z 0-9 line feed ? ! , . (NeMo Curator's letters and digits); {} ⟨⟩ [] (); a-z A-Z 0-9 + / =; 0-9 a-f A-F
COMMON, BRACKET, BASE64, HEXADECIMAL = (1 << bit for bit in range(22, 26))
# line feed; #; …; tab, line feed, carriage return, backspace and space
LINE_FEED, HASH, ELLIPSIS, BLANK = (1 << bit for bit in range(26, 30))

TERMINAL_PUNCTUATION = """
21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 17d4-17d6 17d9-17da
1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 2e2e 2e3c 2e53-2e54
3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb fe52 fe56-fe57 ff01 ff0e ff1f
ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 111c5-111c6 111cd 111de-111df 11238-11239
1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c
11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 16b37-16b38 16b44 16e98 1bc9f 1da88
"""
NO_SENTENCE_END = """
61d-61e 837 839 83d-83e 17d4-17d6 17d9-17da 1b7d-1b7e 2e53-2e54 10f55-10f59 10f86-10f89 11944 11946 11ef7-11ef8 11f43-11f44
16e98
"""
"""Terminal punctuation that spaCy's sentencizer does not know."""
OTHER_SYMBOLS = """
0-8 b-1f 21-2f 3a-40 5b-60 7b-9f ab b4 bb 2013-2014 2019 201c-201e 2026 2236 2501 25ba 3001-3002 3008-300d 3010-3011 ff01
ff05 ff08-ff09 ff0c ff0e ff11 ff1a-ff1b ff1f ff5e
"""
CASED = """
41-5a 61-7a c0-d6 d8-f6 f8-17f 180-1bf 1c4-24f 250-2af 1d00-1d25 1d6b-1d77 1d79-1d9a 1e00-1eff 2c60-2c7b 2c7e-2c7f
a722-a76f a771-a787 a78b-a78e a790-a7b9 a7fa ab30-ab5a ab60-ab64 ff21-ff3a ff41-ff5a
400-401 403-408 40a 40c-40d 410-44f 450-451 453-458 45a 45c-45d 409 459 490-491 496-497 4a2-4a3 4ae-4af 4ba-4bb 4d8-4d9
4e8-4e9 386 388-38a 38c 38e-38f 391-3a1 3a3-3a9 3ac-3af 3b1-3c9 3cc-3ce
"""
"""Latin with its extensions, the Cyrillic and the Greek letters that the splitter knows."""
UNCASED = """
1200-137f 980-9ff 591-5f4 fb1d-fb4f 620-64a 66e-6d5 6e5-6ff 750-77f 8a0-8bd fb50-fbb1 fbd3-fd3d fd50-fdc7 fdf0-fdfb
fe70-fefc 1ee00-1eebb d80-dff 900-97f c80-cff b80-bff c00-c7f ac00-d7af 1100-11ff 3040-30ff 4e00-62ff 6300-77ff 7800-8cff
8d00-9fff 3400-4dbf 20000-215ff 21600-230ff 23100-245ff 24600-260ff 26100-275ff 27600-290ff 29100-2a6df 2a700-2b73f
2b740-2b81f 2b820-2ceaf 2ceb0-2ebef 2e80-2eff 2f00-2fdf 2ff0-303f 31c0-31ef 3200-33ff f900-faff fe30-fe4f 1f200-1f2ff
2f800-2fa1f
"""
MARKS = "……,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪"
QUOTES = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉〈〉⟦⟧"
CURRENCIES = "$£€¥฿₽﷼₴₠₡₢₣₤₥₦₧₨₩₪₫€₭₮₯₰₱₲₳₵₶₷₸₹₺₻₼₾₿"


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """The characters of a text as numbers. A lone surrogate stays what it is."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


@cache
def table() -> npt.NDArray[np.uint32]:
    """The bits of every code point, 0x110000 values; made once in a process."""
    bits = python_table().copy()

    def mark(points: str | list[int], flags: int) -> None:
        bits[points if isinstance(points, list) else [ord(character) for character in points]] |= flags

    mark("\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029", LINE_END)
    mark(_points(TERMINAL_PUNCTUATION), TERMINAL | SENTENCE_END | SYMBOL)
    bits[_points(NO_SENTENCE_END)] &= ~np.uint32(SENTENCE_END)
    mark(_points(OTHER_SYMBOLS), SYMBOL)
    for point in _points(CASED):
        bits[point] |= LETTER | (UPPER_LETTER if chr(point).isupper() else LOWER_LETTER)
    mark(_points(UNCASED), LETTER | LOWER_LETTER | UPPER_LETTER)
    mark(MARKS, PREFIX | SUFFIX | BEFORE_DOT)
    mark(QUOTES, PREFIX | SUFFIX | BEFORE_DOT | QUOTE)
    mark("§%=—–", PREFIX)
    mark("—–", SUFFIX)
    mark(CURRENCIES, PREFIX | CURRENCY)
    mark("0123456789%²-+|", BEFORE_DOT)
    bits[bits & ICON > 0] |= PREFIX | SUFFIX | INFIX
    mark(".…+-*^–—~,:<>=/", INFIX)
    bits[bits & LOWER_LETTER > 0] |= BEFORE_DOT
    bits[(bits & LETTER > 0) & (bits & (PREFIX | SUFFIX | INFIX | ICON) == 0)] |= PLAIN
    letters_and_digits = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    mark(letters_and_digits + "\n?!,.", COMMON)
    mark("{}⟨⟩[]()", BRACKET)
    mark(letters_and_digits + "+/=", BASE64)
    mark("0123456789abcdefABCDEF", HEXADECIMAL)
    for characters, flag in (("\n", LINE_FEED), ("#", HASH), ("…", ELLIPSIS), ("\t\n\r\b ", BLANK)):
        mark(characters, flag)
    return bits


@cache
def classes() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """The class of every code point, and the bits of each class: characters with the same bits are one class."""
    bits, numbers = np.unique(table(), return_inverse=True)
    return numbers.astype(np.uint8), bits


@cache
def python_table() -> npt.NDArray[np.uint32]:
    """The bits that are Python's and Unicode's own, of every code point; unassigned ones have none."""
    bits = np.zeros(0x110000, dtype=np.uint32)
    for plane in ASSIGNED:
        bits[plane.start : plane.stop] = [_python_bits(chr(point)) for point in plane]
    return bits


def _python_bits(character: str) -> int:
    category = unicodedata.category(character)
    if category == "Cn":
        return 0
    found = PUNCTUATION if category[0] == "P" else ICON if category == "So" else 0
    found |= SPACE * character.isspace() | UPPER * character.isupper()
    if character.isalnum():
        found |= ALPHANUMERIC | ALPHABETIC * character.isalpha()
        found |= DECIMAL * character.isdecimal() | NUMERIC * character.isdigit()
    return found


def _points(ranges: str) -> list[int]:
    """Code points of ranges in hexadecimal, such as 30-39."""
    bounds = [part.partition("-") for part in ranges.split()]
    return [point for first, _, last in bounds for point in range(int(first, 16), int(last or first, 16) + 1)]
