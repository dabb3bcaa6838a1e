"""The passes over the bytes of documents, compiled: words, their hashes, document statistics, and scores.

A word is a run of letters and digits: ASCII ones, lower-cased, every digit read as 0; and the bytes of any character
outside ASCII that is no punctuation. A Chinese or Japanese character is a word of its own, so that pairs of words are
its bigrams. Letters outside ASCII keep their case. Only ever called through `features` and `model`.

Everything is bounded by the bytes that are read: no word, line or document makes a pass longer than linear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

Function = TypeVar("Function", bound=Callable[..., Any])

SPACE, NEWLINE, PUNCTUATION, SYMBOL, DIGIT, LOWER, UPPER, WIDE = range(8)

UNIQUE_WORDS = 256
"""Distinct words are counted among so many from the beginning: over whole texts the share falls with the length."""

SHORT_LINE = 30
"""Characters; FineWeb's limit for a short line (Penedo et al. 2024, section 3.6)."""

NUM_STATISTICS = 16

LINE_BITS = 16


def compiled(function: Function) -> Function:
    """Compile with Numba; machine code is kept between runs where the machine allows a cache."""
    try:
        made: Function = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder that a cache could be written to
        made = numba.njit(nogil=True)(function)
    return made


def _classes() -> npt.NDArray[np.uint8]:
    table = np.full(256, SYMBOL, dtype=np.uint8)
    for code in range(128):
        sign = chr(code)
        if sign == "\n":
            table[code] = NEWLINE
        elif sign.isspace():
            table[code] = SPACE
        elif sign.isdigit():
            table[code] = DIGIT
        elif sign.isalpha():
            table[code] = UPPER if sign.isupper() else LOWER
        elif sign in ".,;:!?'\"()-":
            table[code] = PUNCTUATION
    table[128:] = WIDE
    return table


CLASS = _classes()
FNV_OFFSET, FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
MIX, PAIR = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0x9E3779B97F4A7C15)
SHIFT = np.uint64(32)


@compiled
def bucket(value: np.uint64, bits: int) -> int:
    """The bucket of a hash: its upper bits after a multiplication that mixes them (MurmurHash3's first constant)."""
    value = (value ^ (value >> SHIFT)) * MIX
    return int(value >> np.uint64(64 - bits))


@compiled
def fnv(data: npt.NDArray[np.uint8], start: int, end: int) -> np.uint64:
    """FNV-1a of bytes as `scan` hashes a word: for the tables that are compared with it."""
    value = FNV_OFFSET
    for place in range(start, end):
        value = (value ^ np.uint64(data[place])) * FNV_PRIME
    return value


@compiled
def cut(data: npt.NDArray[np.uint8], start: int, end: int, limit: int) -> int:
    """The end of a text of which at most `limit` bytes are read, between two characters."""
    if end - start <= limit:
        return end
    place = start + limit
    while place > start and (data[place] & 0xC0) == 0x80:
        place -= 1
    return place


@compiled
def width(data: npt.NDArray[np.uint8], place: int, end: int) -> int:
    """Bytes of the character at `place`, not beyond `end`."""
    lead, size = data[place], 1
    if lead >= 0xF0:
        size = 4
    elif lead >= 0xE0:
        size = 3
    elif lead >= 0xC0:
        size = 2
    return min(size, end - place)


@compiled
def separates(data: npt.NDArray[np.uint8], place: int, size: int) -> bool:
    """Whether a character outside ASCII stands between words: Latin-1 signs, general punctuation, CJK punctuation,
    full-width signs."""
    lead = data[place]
    if size < 2:
        return False
    after = data[place + 1]
    if lead == 0xC2:
        return bool(after not in (0xAA, 0xB5, 0xBA))
    if lead == 0xE2:
        return bool(after in (0x80, 0x81))
    if lead == 0xE3:
        return bool(after == 0x80)
    if lead == 0xEF and after == 0xBC and size == 3:
        last = data[place + 2]
        return bool(last < 0x90 or 0x9A <= last <= 0xA0)
    return False


@compiled
def ends_sentence(data: npt.NDArray[np.uint8], place: int, size: int) -> bool:
    """Whether a character is an end mark, or a quotation mark that closes after one."""
    lead = data[place]
    if size == 1:
        return bool(lead in (0x2E, 0x21, 0x3F, 0x22))  # . ! ? "
    if size == 3:
        after, last = data[place + 1], data[place + 2]
        if lead == 0xE2 and after == 0x80:
            return bool(last in (0xA6, 0x9D))  # ellipsis, right double quotation mark
        if lead == 0xE3 and after == 0x80:
            return bool(last == 0x82)  # ideographic full stop
        if lead == 0xEF and after == 0xBC:
            return bool(last in (0x81, 0x9F))  # full-width ! and ?
    return False


@compiled
def scan(
    data: npt.NDArray[np.uint8],
    start: int,
    end: int,
    hashes: npt.NDArray[np.uint64],
    spans: npt.NDArray[np.int64],
    lines: npt.NDArray[np.int32],
    stamp: int,
    out: npt.NDArray[np.float64],
) -> int:
    """Words of data[start:end] into `hashes` and their places into `spans` (words, 2); the statistics that need no
    word table into `out`. `lines` marks the hashes of lines seen under this `stamp`. Returns the number of words.

    hashes and spans have room for end - start + 1 words.
    """
    letters = digits = marks = signs = uppers = spaces = characters = word_characters = sentences = 0
    num_words = num_lines = short = closed = bullets = repeated = 0
    line_characters = all_line_characters = 0
    value, line = FNV_OFFSET, FNV_OFFSET
    word_start = -1
    code, bulleted, last_closes = np.uint8(0), False, False
    place = start
    while place <= end:
        kind, size = NEWLINE, 1
        if place < end:
            code = data[place]
            kind = CLASS[code]
            if kind == WIDE:
                size = width(data, place, end)
        breaks, alone = kind <= SYMBOL, False
        if kind == WIDE:
            breaks = separates(data, place, size)
            alone = not breaks and size == 3 and bool(0xE3 <= code <= 0xE9)
        if (breaks or alone) and word_start >= 0:
            hashes[num_words], spans[num_words, 0], spans[num_words, 1] = value, word_start, place
            num_words += 1
            word_start = -1
        if not breaks:
            if word_start < 0:
                word_start, value = place, FNV_OFFSET
            word_characters += 1
            for at in range(place, place + size):
                byte = data[at]
                if kind == UPPER:
                    byte |= np.uint8(0x20)
                elif kind == DIGIT:
                    byte = np.uint8(0x30)
                value = (value ^ np.uint64(byte)) * FNV_PRIME
            if alone:
                hashes[num_words], spans[num_words, 0], spans[num_words, 1] = value, word_start, place + size
                num_words += 1
                word_start = -1
        if place < end:
            characters += 1
        if kind == NEWLINE:
            spaces += place < end
            if line_characters > 0:
                num_lines += 1
                all_line_characters += line_characters
                short += line_characters <= SHORT_LINE
                closed += last_closes
                bullets += bulleted
                at = bucket(line, LINE_BITS)
                repeated += lines[at] == stamp
                lines[at] = stamp
            line_characters, line, last_closes = 0, FNV_OFFSET, False
        elif kind == SPACE:
            spaces += 1
            line_characters += line_characters > 0
        else:
            if line_characters == 0:
                round_ = size == 3 and code == 0xE2 and data[place + 1] == 0x80 and data[place + 2] == 0xA2
                bulleted = bool(code in (0x2D, 0x2A) or round_)  # - * and U+2022
            line_characters += 1
            for at in range(place, place + size):
                line = (line ^ np.uint64(data[at])) * FNV_PRIME
            last_closes = ends_sentence(data, place, size)
            quotes = code == 0x22 or (code == 0xE2 and size == 3 and data[place + 2] == 0x9D)
            sentences += last_closes and not quotes
            if kind == PUNCTUATION or (kind == WIDE and breaks):
                marks += 1
            elif kind == SYMBOL:
                signs += 1
            elif kind == DIGIT:
                digits += 1
            else:
                letters += 1
                uppers += kind == UPPER
        place += size
    visible = max(characters - spaces, 1)
    out[1] = word_characters / max(num_words, 1)
    out[2] = letters / visible
    out[3] = digits / visible
    out[4] = marks / visible
    out[5] = signs / visible
    out[6] = uppers / max(letters, 1)
    out[7] = spaces / max(characters, 1)
    out[10] = np.log1p(all_line_characters / max(num_lines, 1))
    out[11] = closed / max(num_lines, 1)
    out[12] = short / max(num_lines, 1)
    out[13] = bullets / max(num_lines, 1)
    out[14] = repeated / max(num_lines, 1)
    out[15] = np.log1p(num_words / (1 + sentences))
    return num_words


@compiled
def grams(
    hashes: npt.NDArray[np.uint64],
    num_words: int,
    bits: int,
    stops: npt.NDArray[np.uint64],
    seen: npt.NDArray[np.int32],
    stamp: int,
    found: npt.NDArray[np.int32],
    out: npt.NDArray[np.float64],
) -> int:
    """The distinct buckets of a text's words and pairs of words into `found` (room for 2 x words), and the two
    statistics about words into `out`. `seen` marks buckets under this `stamp`. Returns how many there are."""
    count = unique = stop_words = 0
    for number in range(num_words):
        value = hashes[number]
        for stop in stops:
            stop_words += value == stop
        at = bucket(value, bits)
        if seen[at] != stamp:
            seen[at] = stamp
            found[count] = at
            count += 1
            unique += number < UNIQUE_WORDS
    out[8] = stop_words / max(num_words, 1)
    out[9] = unique / max(min(num_words, UNIQUE_WORDS), 1)
    for number in range(num_words - 1):
        at = bucket(hashes[number] * PAIR + hashes[number + 1], bits)
        if seen[at] != stamp:
            seen[at] = stamp
            found[count] = at
            count += 1
    return count


@compiled
def collect(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    limit: int,
    bits: int,
    stops: npt.NDArray[np.uint64],
    statistics: npt.NDArray[np.float64],
    found: npt.NDArray[np.int32],
    bounds: npt.NDArray[np.int64],
) -> None:
    """Statistics (texts, NUM_STATISTICS) and buckets of each text: those of text n are found[bounds[n]:bounds[n + 1]].

    found has room for as many buckets as there are bytes read, and one more for each text.
    """
    seen, lines = np.zeros(1 << bits, dtype=np.int32), np.zeros(1 << LINE_BITS, dtype=np.int32)
    longest = 0
    for number in range(len(starts)):
        longest = max(longest, min(ends[number] - starts[number], limit))
    hashes, spans = np.empty(longest + 1, dtype=np.uint64), np.empty((longest + 1, 2), dtype=np.int64)
    bounds[0] = 0
    for number in range(len(starts)):
        out = statistics[number]
        end = cut(data, starts[number], ends[number], limit)
        num_words = scan(data, starts[number], end, hashes, spans, lines, number + 1, out)
        out[0] = np.log1p(ends[number] - starts[number])
        at = bounds[number]
        bounds[number + 1] = at + grams(hashes, num_words, bits, stops, seen, number + 1, found[at:], out)


@compiled
def score(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    limit: int,
    bits: int,
    stops: npt.NDArray[np.uint64],
    centre: npt.NDArray[np.float64],
    spread: npt.NDArray[np.float64],
    bound: float,
    bias: float,
    of_statistics: npt.NDArray[np.float64],
    of_buckets: npt.NDArray[np.float32],
    logits: npt.NDArray[np.float64],
) -> None:
    """The linear model's value of each text, in one pass."""
    seen, lines = np.zeros(1 << bits, dtype=np.int32), np.zeros(1 << LINE_BITS, dtype=np.int32)
    longest = 0
    for number in range(len(starts)):
        longest = max(longest, min(ends[number] - starts[number], limit))
    hashes, spans = np.empty(longest + 1, dtype=np.uint64), np.empty((longest + 1, 2), dtype=np.int64)
    found, out = np.empty(2 * longest + 2, dtype=np.int32), np.empty(NUM_STATISTICS, dtype=np.float64)
    for number in range(len(starts)):
        end = cut(data, starts[number], ends[number], limit)
        num_words = scan(data, starts[number], end, hashes, spans, lines, number + 1, out)
        out[0] = np.log1p(ends[number] - starts[number])
        count = grams(hashes, num_words, bits, stops, seen, number + 1, found, out)
        total = 0.0
        for at in range(count):
            total += of_buckets[found[at]]
        value = bias + (total / np.sqrt(count) if count else 0.0)
        for at in range(NUM_STATISTICS):
            value += of_statistics[at] * min(max((out[at] - centre[at]) / spread[at], -bound), bound)
        logits[number] = value


@compiled
def loss_and_gradient(
    found: npt.NDArray[np.int32],
    bounds: npt.NDArray[np.int64],
    statistics: npt.NDArray[np.float64],
    high: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    gradient: npt.NDArray[np.float64],
) -> float:
    """Mean logistic loss of the texts, and its gradient into `gradient` (zeros to begin with). Weights and gradient:
    the bias, then one for each statistic, then one for each bucket. A text's buckets have the value
    1 / sqrt(their number), so that its bag has length 1 however long the text is."""
    num_texts, num_statistics = statistics.shape
    head = 1 + num_statistics
    loss = 0.0
    for number in range(num_texts):
        begin, end = bounds[number], bounds[number + 1]
        scale = 1.0 / np.sqrt(end - begin) if end > begin else 0.0
        total = 0.0
        for at in range(begin, end):
            total += weights[head + found[at]]
        value = weights[0] + scale * total
        for at in range(num_statistics):
            value += weights[1 + at] * statistics[number, at]
        # log(1 + exp(-v)) for a high text, log(1 + exp(v)) for a low one, without overflow.
        loss += max(value, 0.0) - value * high[number] + np.log1p(np.exp(-abs(value)))
        share = 1.0 / (1.0 + np.exp(-value)) if value >= 0 else np.exp(value) / (1.0 + np.exp(value))
        error = (share - high[number]) / num_texts
        gradient[0] += error
        for at in range(num_statistics):
            gradient[1 + at] += error * statistics[number, at]
        for at in range(begin, end):
            gradient[head + found[at]] += error * scale
    return float(loss / num_texts)


@compiled
def places(
    data: npt.NDArray[np.uint8],
    start: int,
    end: int,
    bits: int,
    wanted: npt.NDArray[np.bool_],
    hashes: npt.NDArray[np.uint64],
    spans: npt.NDArray[np.int64],
    lines: npt.NDArray[np.int32],
    found: npt.NDArray[np.int64],
) -> int:
    """Where words and pairs of words stand that fall into a `wanted` bucket: rows of bucket, first word's start and
    end, second word's start and end (-1 for a single word). Returns how many rows of `found` were filled."""
    out = np.empty(NUM_STATISTICS, dtype=np.float64)
    num_words = scan(data, start, end, hashes, spans, lines, 1, out)
    count = 0
    for number in range(num_words):
        for pair in range(2):
            if pair and number + 1 >= num_words:
                continue
            value = hashes[number] * PAIR + hashes[number + 1] if pair else hashes[number]
            at = bucket(value, bits)
            if wanted[at] and count < len(found):
                found[count, 0] = at
                found[count, 1], found[count, 2] = spans[number, 0], spans[number, 1]
                found[count, 3] = spans[number + 1, 0] if pair else -1
                found[count, 4] = spans[number + 1, 1] if pair else -1
                count += 1
    return count
