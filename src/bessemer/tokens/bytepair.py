"""Byte-level BPE, compiled: text cut into pieces by class tables, pieces merged by pair tables.

Gives the ids of a tokenizer.json, for the split patterns of `patterns.Split`, in time linear in the text and memory
bounded by its output, whatever the text is: a piece of any length is merged in windows (see `_merge_long`). All
functions run without the interpreter's lock.

Legend of arrays: text uint8 (UTF-8); classes uint8 by code point; ids int32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

LETTER, NUMBER, SPACE, LINE_END, DIGIT = 1, 2, 4, 8, 16  # bits of a class; a sign has none of the first three
RUNS, LINES, INDENTATION, SINGLE = 0, 1, 2, 3
SHORT = 128  # bytes: pieces up to it are merged by looking at all pairs, longer ones by a heap
WINDOW = 1 << 10  # bytes of a long piece that are merged at one time: their heap stays in the nearest cache
WIDE_WINDOW = 1 << 16  # bytes, for pieces whose tokens are so long that narrow windows do not join
OVERLAP = 8  # tokens at the end of a window that the next one merges again
CACHED_BYTES = 64  # longer pieces are not remembered
CACHE_SLOTS = 1 << 18
CACHE_BYTES = 4 << 20
NO_RANK = np.int64(1) << 40


class Tables(NamedTuple):
    """What a vocabulary and a pattern come to. Pairs: open addressing, keys left << 32 | right, -1 for none."""

    classes: Any
    byte_ids: Any
    pair_keys: Any
    pair_ranks: Any
    pair_ids: Any
    choices: Any  # contractions (0, 1, 2), any_prefix, digits, digits_space, line_ends, white_space, digits_first


class Scratch(NamedTuple):
    """One thread's memory: pieces it has met, and room for merging one."""

    slots: Any  # (CACHE_SLOTS, 4): where the piece's bytes and ids begin and how many there are; length 0: free
    bytes: Any
    ids: Any
    used: Any  # slots, bytes, ids
    symbols: Any
    following: Any
    preceding: Any
    heap: Any
    window: Any


def scratch() -> Scratch:
    """New memory for one thread, about 10 MB."""
    return Scratch(
        slots=np.zeros((CACHE_SLOTS, 4), np.int32),
        bytes=np.empty(CACHE_BYTES, np.uint8),
        ids=np.empty(CACHE_BYTES, np.int32),
        used=np.zeros(3, np.int64),
        symbols=np.empty(WIDE_WINDOW, np.int32),
        following=np.empty(WIDE_WINDOW, np.int32),
        preceding=np.empty(WIDE_WINDOW, np.int32),
        heap=np.empty(3 * WIDE_WINDOW, np.int64),
        window=np.empty(WIDE_WINDOW, np.int32),
    )


@njit(nogil=True, cache=True, inline="always")
def _char(text, i):  # type: ignore[no-untyped-def]
    """Code point and length in bytes of the character at i; the text is valid UTF-8."""
    first = np.int64(text[i])
    if first < 0x80:
        return first, 1
    if first < 0xE0:
        return (first & 0x1F) << 6 | np.int64(text[i + 1]) & 0x3F, 2
    if first < 0xF0:
        return (first & 0x0F) << 12 | (np.int64(text[i + 1]) & 0x3F) << 6 | np.int64(text[i + 2]) & 0x3F, 3
    return (
        (first & 0x07) << 18
        | (np.int64(text[i + 1]) & 0x3F) << 12
        | (np.int64(text[i + 2]) & 0x3F) << 6
        | np.int64(text[i + 3]) & 0x3F
    ), 4


@njit(nogil=True, cache=True)
def _contraction(text, i, end, any_case):  # type: ignore[no-untyped-def]
    """Bytes of the contraction that begins with the apostrophe at i; 0 for none. Any case has the long s (U+017F) too."""
    if i + 1 >= end:
        return 0
    fold = 32 if any_case else 0
    first = np.int64(text[i + 1])
    if any_case and first == 0xC5 and i + 2 < end and text[i + 2] == 0xBF:
        return 3
    low = first | fold if first < 0x80 else first
    if low == 115 or low == 116 or low == 109 or low == 100:  # s t m d
        return 2
    if i + 2 < end and (low == 114 or low == 118 or low == 108):
        second = np.int64(text[i + 2])
        second = second | fold if second < 0x80 else second
        if (low == 108 and second == 108) or (low != 108 and second == 101):  # ll, re, ve
            return 3
    return 0


@njit(nogil=True, cache=True)
def _run(text, i, end, classes, mask, wanted):  # type: ignore[no-untyped-def]
    """Where the run of characters with class & mask == wanted (or any bit of it, where wanted is not 0) ends."""
    while i < end:
        code, size = _char(text, i)
        found = classes[code] & mask
        if (found == 0) != (wanted == 0):
            break
        i += size
    return i


@njit(nogil=True, cache=True)
def _piece_end(text, i, end, classes, choices):  # type: ignore[no-untyped-def]
    """Where the piece that begins at i ends: the alternatives of a `Split` in their order."""
    code, size = _char(text, i)
    kind = classes[code]
    if code == 39 and choices[0]:
        taken = _contraction(text, i, end, choices[0] == 2)
        if taken:
            return i + taken
    if kind & LETTER:
        return _run(text, i + size, end, classes, LETTER, LETTER)
    following = np.uint8(SPACE)
    if i + size < end:
        following = classes[_char(text, i + size)[0]]
        if following & LETTER and (code == 32 or (choices[1] and not kind & (NUMBER | LINE_END))):
            return _run(text, i + size, end, classes, LETTER, LETTER)
    if kind & NUMBER or (code == 32 and choices[3] and following & NUMBER):
        at = i if kind & NUMBER else i + size
        if choices[2] == 0:
            return _run(text, at, end, classes, NUMBER, NUMBER)
        for _ in range(choices[2]):
            if at >= end:
                break
            digit, width = _char(text, at)
            if not classes[digit] & NUMBER:
                break
            at += width
        return at
    sign = LETTER | NUMBER | SPACE
    if not kind & sign or (code == 32 and not following & sign):
        at = _run(text, i + size, end, classes, sign, 0)
        return _run(text, at, end, classes, LINE_END, LINE_END) if choices[4] else at
    if choices[5] == SINGLE:
        return i + size
    at, last, after_line = i, i, 0
    while at < end:
        code, size = _char(text, at)
        kind = classes[code]
        if not kind & SPACE:
            break
        last = at
        at += size
        if kind & LINE_END:
            after_line = at
    if after_line and choices[5] != RUNS:
        if choices[5] == INDENTATION:
            while after_line < end and (text[after_line] == 32 or text[after_line] == 9):
                after_line += 1
        return after_line
    return at if at == end or last == i else last


@njit(nogil=True, cache=True)
def _pair(left, right, tables):  # type: ignore[no-untyped-def]
    """Slot of a pair of ids; -1 where they do not merge."""
    key = np.int64(left) << 32 | np.int64(right)
    mask = len(tables.pair_keys) - 1
    slot = np.int64((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)) & mask
    while tables.pair_keys[slot] != key:
        if tables.pair_keys[slot] < 0:
            return -1
        slot = (slot + 1) & mask
    return slot


@njit(nogil=True, cache=True)
def _merge_short(text, start, end, tables, symbols, ranks, out):  # type: ignore[no-untyped-def]
    """Merge a piece of at most SHORT bytes: the pair of lowest rank, the first of equals, until none is left."""
    count = end - start
    for place in range(count):
        symbols[place] = tables.byte_ids[text[start + place]]
    for place in range(count - 1):
        slot = _pair(symbols[place], symbols[place + 1], tables)
        ranks[place] = tables.pair_ranks[slot] if slot >= 0 else NO_RANK
    while count > 1:
        best, where = NO_RANK, 0
        for place in range(count - 1):
            if ranks[place] < best:
                best, where = ranks[place], place
        if best == NO_RANK:
            break
        symbols[where] = tables.pair_ids[_pair(symbols[where], symbols[where + 1], tables)]
        count -= 1
        for place in range(where + 1, count):
            symbols[place] = symbols[place + 1]
            ranks[place] = ranks[place + 1]
        for place in range(max(where - 1, 0), min(where + 1, count - 1)):
            slot = _pair(symbols[place], symbols[place + 1], tables)
            ranks[place] = tables.pair_ranks[slot] if slot >= 0 else NO_RANK
    for place in range(count):
        out[place] = symbols[place]
    return count


@njit(nogil=True, cache=True)
def _push(heap, size, value):  # type: ignore[no-untyped-def]
    place = size
    while place > 0 and heap[(place - 1) >> 1] > value:
        heap[place] = heap[(place - 1) >> 1]
        place = (place - 1) >> 1
    heap[place] = value
    return size + 1


@njit(nogil=True, cache=True)
def _pop(heap, size):  # type: ignore[no-untyped-def]
    top, value = heap[0], heap[size - 1]
    size -= 1
    place = 0
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = value
    return top, size


@njit(nogil=True, cache=True)
def _merge_window(text, start, end, tables, room, out, starts):  # type: ignore[no-untyped-def]
    """Merge up to WIDE_WINDOW bytes with a heap of (rank, place). Returns how many tokens; starts: where each begins."""
    symbols, following, preceding, heap = room.symbols, room.following, room.preceding, room.heap
    count = end - start
    for place in range(count):
        symbols[place] = tables.byte_ids[text[start + place]]
        following[place], preceding[place] = place + 1, place - 1
    size = 0
    for place in range(count - 1):
        slot = _pair(symbols[place], symbols[place + 1], tables)
        if slot >= 0:
            size = _push(heap, size, np.int64(tables.pair_ranks[slot]) << 32 | place)
    while size:
        top, size = _pop(heap, size)
        place = top & 0xFFFFFFFF
        right = following[place]
        if symbols[place] < 0 or right >= count:
            continue
        slot = _pair(symbols[place], symbols[right], tables)
        if slot < 0 or tables.pair_ranks[slot] != top >> 32:
            continue  # one of the two has been merged since
        symbols[place], symbols[right] = tables.pair_ids[slot], -1
        after = following[right]
        following[place] = after
        if after < count:
            preceding[after] = place
            slot = _pair(symbols[place], symbols[after], tables)
            if slot >= 0:
                size = _push(heap, size, np.int64(tables.pair_ranks[slot]) << 32 | place)
        before = preceding[place]
        if before >= 0:
            slot = _pair(symbols[before], symbols[place], tables)
            if slot >= 0:
                size = _push(heap, size, np.int64(tables.pair_ranks[slot]) << 32 | before)
    number, place = 0, 0
    while place < count:
        out[number], starts[number] = symbols[place], start + place
        number += 1
        place = following[place]
    return number


@njit(nogil=True, cache=True)
def _merge_in(window, text, start, end, tables, room, out):  # type: ignore[no-untyped-def]
    """Merge a piece of any length in windows of so many bytes; -1 where two of them do not join.

    Merges on two sides of a token that is never merged do not know of each other: merging is by rank, then place, and a merge
    looks at two neighbours. So where a window that begins at a token of the one before gives that same token first, the whole
    piece has that token, what the first window had before it, and what the second has after it.
    """
    starts, again = np.empty(window, np.int64), np.empty(window, np.int64)
    number = _merge_window(text, start, min(start + window, end), tables, room, out, starts)
    done = 0  # tokens of `out` that are certain
    reached = min(start + window, end)
    while reached < end:
        joined, count, high = -1, 0, reached
        back = OVERLAP
        while joined < 0:
            shared = max(number - back, 0)
            low = starts[shared]
            token = out[done + shared]
            high = min(low + window, end)
            count = _merge_window(text, low, high, tables, room, room.window, again)
            if room.window[0] == token:
                joined = shared
            elif shared == 0 or back >= number:
                return -1
            else:
                back *= 2
        if high == reached or joined == 0:
            return -1
        done += joined
        number = count
        for place in range(count):
            out[done + place] = room.window[place]
            starts[place] = again[place]
        reached = high
    return done + number


@njit(nogil=True, cache=True)
def _merge_long(text, start, end, tables, room, out):  # type: ignore[no-untyped-def]
    """Merge a piece of any length; -1 where no window joins."""
    number = _merge_in(WINDOW, text, start, end, tables, room, out)
    return number if number >= 0 else _merge_in(WIDE_WINDOW, text, start, end, tables, room, out)


@njit(nogil=True, cache=True)
def _found(text, start, length, slots, kept):  # type: ignore[no-untyped-def]
    """The slot of a piece that has been met before; of one that has not, the free slot for it, as -1 - slot.

    The hash is FNV-1a, 64 bits, with its bits mixed once more: the high ones move the low.
    """
    value = np.uint64(0xCBF29CE484222325)
    for place in range(start, start + length):
        value = (value ^ np.uint64(text[place])) * np.uint64(0x100000001B3)
    mask = CACHE_SLOTS - 1
    slot = np.int64((value ^ (value >> np.uint64(29))) & np.uint64(mask))
    while slots[slot, 1]:
        if slots[slot, 1] == length:
            at, place = slots[slot, 0], 0
            while place < length and text[start + place] == kept[at + place]:
                place += 1
            if place == length:
                return slot
        slot = (slot + 1) & mask
    return -1 - slot


@njit(nogil=True, cache=True)
def _encode_new(text, start, end, slot, tables, room, ranks, out, at):  # type: ignore[no-untyped-def]
    """Append the ids of a piece that is not remembered at `at` of `out`, and remember a short one in a free slot.

    Returns the new end, or -1 when a long piece could not be joined.
    """
    length = end - start
    if length > SHORT:
        number = _merge_long(text, start, end, tables, room, out[at:])
        return at + number if number >= 0 else -1
    count = _merge_short(text, start, end, tables, room.symbols, ranks, out[at:])
    used = room.used
    if length <= CACHED_BYTES:
        if used[0] >= CACHE_SLOTS // 2 or used[1] + length > CACHE_BYTES:
            # Full: begin anew, so that a document of rare words does not slow down all that come after it.
            room.slots[:, 1] = 0
            used[:] = 0
            slot = -1 - _found(text, start, length, room.slots, room.bytes)
        room.slots[slot, 0], room.slots[slot, 1] = used[1], length
        room.slots[slot, 2], room.slots[slot, 3] = used[2], count
        for place in range(length):
            room.bytes[used[1] + place] = text[start + place]
        for place in range(count):
            room.ids[used[2] + place] = out[at + place]
        used[0] += 1
        used[1] += length
        used[2] += count
    return at + count


@njit(nogil=True, cache=True)
def encode(text, starts, end_of_text, tables, room, out, out_starts):  # type: ignore[no-untyped-def]
    """Encode documents that stand one after the other in `text`.

    starts: where each begins, and where the last ends; out: room for a token a byte and one more a document;
    out_starts: as starts, in tokens, end-of-text after each. Returns the number of tokens, -1 when a piece failed.
    """
    at = 0
    ranks = np.empty(SHORT, np.int64)
    classes, choices = tables.classes, tables.choices
    slots, kept, ids = room.slots, room.bytes, room.ids
    digits_first = choices[6]
    for document in range(len(starts) - 1):
        out_starts[document] = at
        place, end = starts[document], starts[document + 1]
        while place < end:
            limit = end
            if digits_first:
                code, size = _char(text, place)
                digit = tables.classes[code] & DIGIT
                limit = place + size if digit else _run(text, place, end, tables.classes, DIGIT, 0)
            while place < limit:
                after = _piece_end(text, place, limit, classes, choices)
                # What is remembered is most of any text: it is copied here, without a call that takes all the tables.
                slot = _found(text, place, after - place, slots, kept) if after - place <= CACHED_BYTES else -1
                if slot >= 0:
                    first = slots[slot, 2]
                    for number in range(slots[slot, 3]):
                        out[at + number] = ids[first + number]
                    at += slots[slot, 3]
                else:
                    at = _encode_new(text, place, after, -1 - slot, tables, room, ranks, out, at)
                    if at < 0:
                        return -1
                place = after
        if end_of_text >= 0:
            out[at] = end_of_text
            at += 1
    out_starts[len(starts) - 1] = at
    return at


@njit(nogil=True, cache=True)
def merge_pieces(text, starts, tables, room, out, out_starts):  # type: ignore[no-untyped-def]
    """As `encode`, where each byte string is one piece and need not be UTF-8."""
    at = 0
    ranks = np.empty(SHORT, np.int64)
    for number in range(len(starts) - 1):
        out_starts[number] = at
        low, high = starts[number], starts[number + 1]
        if high - low <= SHORT:
            count = _merge_short(text, low, high, tables, room.symbols, ranks, out[at:])
        else:
            count = _merge_long(text, low, high, tables, room, out[at:])
        if count < 0:
            return -1
        at += count
    out_starts[len(starts) - 1] = at
    return at
