"""Word splitting of spaCy's blank English tokenizer, whose words datatrove's filters count.

Words are runs without white space, minus leading and trailing punctuation, split at hyphens, slashes and full stops
between letters; contractions are two words (do n't); URLs and e-mail addresses are not split. The order of attempts is
spaCy's ("How spaCy's tokenizer works"); each examines a bounded number of characters, so time is linear. Differences:
five emoticons outside ASCII, symbols of newer Unicode versions, URLs with more than eight @, and URLs of private IPv4
addresses.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from bessemer.text import characters as kinds
from bessemer.text.characters import spacy, table
from bessemer.text.hashing import Array, compiled, find_slot, hash_span, hash_table
from bessemer.text.normalise import code_points

LONGEST = 12  # characters of a special string
LONGEST_UNIT = 5
MAX_MERGED = 9  # pieces that are merged into a special string
MAX_AT_SIGNS = 8  # number of @ in a word after which a host is searched
# Parts of a special string's value: LENGTHS, the lengths of its words, 4 bits each; MERGED, it is merged again after it was
# split (mostly emoticons); UNIT, it is a unit of measurement
LENGTHS, MERGED, UNIT = 0xFFF, 1 << 29, 1 << 30


def split(codes: Array) -> tuple[Array, Array]:
    """Split a text, given as code points, into words.

    Returns the index of the first character of each word, and of the one after its last.
    """
    return _split(codes, *special_table())


def _split(codes: Array, keys: Array, values: Array) -> tuple[Array, Array]:
    starts, ends = np.empty(len(codes), np.int32), np.empty(len(codes), np.int32)  # only written pages take memory
    count = _write_words(codes, table(), keys, values, starts, ends)
    return starts[:count].copy(), ends[:count].copy()


@cache
def special_table() -> tuple[Array, Array]:
    """Build a hash table of spaCy's special strings: exceptions to word splitting, such as don't, and units.

    Returns the hash in each slot, and an array of values. The first values are those of the slots: the lengths of the
    string's words, 4 bits each, and the flags MERGED and UNIT. Then follows a bit mask of the lengths of all special strings
    for each pair of first and last character (low 7 bits), which excludes most words without hashing.
    """
    exceptions = spacy()["words"]["exceptions"].split()  # with · between the words of each; most are one word
    entries = [(text.replace("·", ""), text.split("·"), 0) for text in exceptions]
    entries += [(unit, [], UNIT) for unit in spacy()["words"]["units"].split()]
    keys = hash_table(2 * len(entries))  # sparse: most look-ups find nothing
    values = np.zeros(len(keys) + 128 * 128, np.uint32)
    empty = keys.copy(), values.copy()
    for text, pieces, value in entries:
        codes = code_points(text)
        for index, piece in enumerate(pieces):
            value |= len(piece) << 4 * index
        if len(pieces) == 1:
            num_split = len(_split(codes, *empty)[0])
            value |= MERGED | num_split << 16 if num_split > 1 else 0
        values[len(keys) + (ord(text[0]) & 127) * 128 + (ord(text[-1]) & 127)] |= np.uint32(1 << len(text))
        key = np.uint64(hash_span(codes, 0, len(codes)))
        slot = int(find_slot(keys, key))
        keys[slot] = key
        values[slot] |= np.uint32(value)
    return keys, values


@compiled
def _look_up(codes: Array, first: int, last: int, keys: Array, values: Array) -> int:
    """Return the value of the special string codes[first:last] in the table of `special_table`; 0 for any other text."""
    if last - first > LONGEST or last <= first:
        return 0
    lengths = values[len(keys) + (np.int64(codes[first]) & 127) * 128 + (np.int64(codes[last - 1]) & 127)]
    if not lengths >> (last - first) & 1:
        return 0
    return int(values[find_slot(keys, hash_span(codes, first, last))])


@compiled
def _is_digit(code: int) -> bool:
    return 48 <= code <= 57


@compiled
def _count_dots(codes: Array, at: int, last: int) -> int:
    """Return the number of consecutive full stops from index `at`, up to index `last`."""
    end = at
    while end < last and codes[end] == 46:
        end += 1
    return end - at


@compiled
def _prefix(codes: Array, first: int, last: int, bits: Array) -> int:
    """Return the number of characters to split off at the start of the word codes[first:last]."""
    code = codes[first]
    if bits[code] & kinds.PREFIX:
        return 1
    if code == 43:  # + unless a digit follows
        return 0 if first + 1 < last and _is_digit(codes[first + 1]) else 1
    if code == 46:
        dots = _count_dots(codes, first, last)
        return dots if dots > 1 else 0
    if last - first > 1 and codes[first + 1] == 36 and (code == 67 or code == 65):  # C$ A$
        return 2
    if last - first > 2 and code == 85 and codes[first + 1] == 83 and codes[first + 2] == 36:  # US$
        return 3
    return 0


@compiled
def _suffix(codes: Array, first: int, last: int, bits: Array, keys: Array, values: Array) -> int:
    """Return the number of characters to split off at the end of the word codes[first:last].

    It is the longest match of any of spaCy's suffix patterns. `keys` and `values` are the arrays of `special_table`, here
    and below.
    """
    if first >= last:
        return 0
    code = codes[last - 1]
    kind = bits[code]
    longest = 1 if kind & kinds.SUFFIX else 0
    before = codes[last - 2] if last - 2 >= first else codes[last - 1] * 0
    third = codes[last - 3] if last - 3 >= first else before * 0
    if code == 46:
        start = last
        while start > first and codes[start - 1] == 46:
            start -= 1
        if last - start > 1:
            return last - start
        if (before and bits[before] & kinds.BEFORE_DOT) or (third and bits[before] & bits[third] & kinds.UPPER_LETTER):
            return 1
        return 1 if third == 0xB0 and (before == 70 or before == 67 or before == 75) else 0  # °F. °C. °K.
    if (code == 115 or code == 83) and (before == 39 or before == 0x2019):  # 's
        longest = 2
    if _is_digit(before) and (code == 43 or kind & kinds.CURRENCY):
        longest = max(longest, 1)
    if code == 36:  # 5US$ 5C$
        if last - 4 >= first and third == 85 and before == 83 and _is_digit(codes[last - 4]):
            longest = 3
        if (before == 67 or before == 65) and _is_digit(third):
            longest = max(longest, 2)
    for length in range(1, LONGEST_UNIT + 1):
        if last - length - 1 < first or _is_digit(codes[last - length]):
            break
        if _is_digit(codes[last - length - 1]):
            if _look_up(codes, last - length, last, keys, values) & UNIT:
                longest = max(longest, length)
            break
    return longest


@compiled
def _infix(codes: Array, at: int, first: int, last: int, bits: Array) -> int:
    """Return the number of characters at position `at` that form an infix of the word codes[first:last], 0 for none.

    An infix is a separate word between two parts, such as a hyphen.
    """
    code = codes[at]
    if code == 46 and at + 1 < last and codes[at + 1] == 46:
        return _count_dots(codes, at, last)
    if code == 0x2026 or bits[code] & kinds.ICON:
        return 1
    if at == first or at + 1 >= last:
        return 0
    before, after = codes[at - 1], codes[at + 1]
    left, right = bits[before], bits[after]
    if code in (43, 45, 42, 94) and _is_digit(before) and (_is_digit(after) or after == 45):
        return 1  # + - * ^ between digits
    if code == 46:
        return 1 if left & (kinds.LOWER_LETTER | kinds.QUOTE) and right & (kinds.UPPER_LETTER | kinds.QUOTE) else 0
    if code == 44:
        return 1 if left & kinds.LETTER and right & kinds.LETTER else 0
    if not left & kinds.LETTER and not _is_digit(before):
        return 0
    if code == 58 or code == 60 or code == 61 or code == 62 or code == 47:  # : < = > /
        return 1 if right & kinds.LETTER else 0
    if code == 45 or code == 0x2013 or code == 0x2014 or code == 126:  # - – — ~
        if right & kinds.LETTER:
            return 1
        for length in range(2, (4 if code == 45 else 3 if code == 0x2014 else 2)):
            if at + length >= last or codes[at + length - 1] != code:
                return 0
            if bits[codes[at + length]] & kinds.LETTER:
                return length
    return 0


@compiled
def _is_host(codes: Array, first: int, last: int, bits: Array) -> bool:
    """Return True if codes[first:last] is a host name with a lower-case top-level domain, or an IPv4 address.

    A port and a path may follow. The pattern is spaCy's (lang/tokenizer_exceptions.py, after Diego Perini's).
    """
    end = first
    while end < last and not (codes[end] == 58 or codes[end] == 47 or codes[end] == 63 or codes[end] == 35):  # : / ? #
        code = codes[end]
        if code < 0xA1 and not (_is_digit(code) or 97 <= code | 32 <= 122 or code == 45 or code == 46 or code == 95):
            return False
        end += 1
    if end < last and codes[end] == 58:
        after = end + 1
        while after < last and _is_digit(codes[after]):
            after += 1
        if not 3 <= after - end <= 6:
            return False
        if after < last and not (codes[after] == 47 or codes[after] == 63 or codes[after] == 35):
            return False
    start, num_labels, num_numbers = first, 0, 0
    for at in range(first, end):
        if codes[at] != 46:
            continue
        if at == start or at - start > 64 or codes[start] == 45 or codes[start] == 95:
            return False
        if codes[at - 1] == 45 or codes[at - 1] == 95:
            return False
        num_labels += 1
        num_numbers += at - start <= 3 and _is_digit(codes[start]) and _is_digit(codes[at - 1])
        start = at + 1
    if num_labels == 0 or start == end:
        return False
    if num_labels == num_numbers == 3 and end - start <= 3 and _is_digit(codes[start]) and _is_digit(codes[end - 1]):
        return True
    for at in range(start, end):
        if not bits[codes[at]] & kinds.LOWER_LETTER:
            return False
    return 2 <= end - start <= 63


@compiled
def _is_url(codes: Array, first: int, last: int, bits: Array) -> bool:
    """Return True if codes[first:last] is a URL, with or without its scheme, or an e-mail address."""
    start = first
    for at in range(first, min(last - 2, first + 64)):
        if codes[at] == 58 and codes[at + 1] == 47 and codes[at + 2] == 47:  # ://
            start = at + 3 if at - first >= 2 else first
            break
        if not (_is_digit(codes[at]) or bits[codes[at]] & kinds.LETTER or 43 <= codes[at] <= 46 or codes[at] == 95):
            break
    if _is_host(codes, start, last, bits):
        return True
    num_signs = 0
    for at in range(start + 1, last):
        if codes[at] == 64:
            num_signs += 1
            if num_signs > MAX_AT_SIGNS:
                break
            if _is_host(codes, at + 1, last, bits):
                return True
    return False


@compiled
def _write_words(codes: Array, bits: Array, keys: Array, values: Array, starts: Array, ends: Array) -> int:
    """Write the spans of all words into `starts` and `ends`, which have room for every character. Returns their number."""
    count, at = 0, 0
    while at < len(codes):
        while at < len(codes) and bits[codes[at]] & kinds.SPACE:
            at += 1
        first, plain = at, True
        while at < len(codes):
            kind = bits[codes[at]]
            if kind & kinds.SPACE:
                break
            plain = plain and kind & kinds.PLAIN != 0
            at += 1
        if first == at:
            break
        if plain and not _look_up(codes, first, at, keys, values) & LENGTHS:
            starts[count], ends[count] = first, at
            count += 1
        else:
            count = _split_run(codes, first, at, bits, keys, values, starts, ends, count)
    return count


@compiled
def _split_run(
    codes: Array, first: int, last: int, bits: Array, keys: Array, values: Array, starts: Array, ends: Array, count: int
) -> int:
    """Split codes[first:last], which has no white space, into words.

    Appends their spans to the `count` spans in `starts` and `ends`, and returns the new count.
    """
    begin, low, high, size = count, first, last, -1
    tail = count + last - first  # suffixes are stacked down from here; there are never more words than characters
    lengths = _look_up(codes, first, last, keys, values) & LENGTHS
    while low < high and high - low != size and not lengths:
        size = high - low
        front = _prefix(codes, low, high, bits)
        if front:
            starts[count], ends[count] = low, low + front
            count += 1
            lengths = _look_up(codes, low + front, high, keys, values) & LENGTHS
            if lengths:
                low += front
                break
        back = _suffix(codes, low + front, high, bits, keys, values)
        if back:
            tail -= 1
            starts[tail], ends[tail] = high - back, high
            lengths = _look_up(codes, low, high - back, keys, values) & LENGTHS
            if lengths:
                count -= front > 0  # the prefix belongs to the special string
                high -= back
                break
        low, high = low + front, high - back
        if front or back:
            lengths = _look_up(codes, low, high, keys, values) & LENGTHS
    while lengths:
        starts[count], ends[count] = low, low + (lengths & 15)
        low, lengths, count = ends[count], lengths >> 4, count + 1
        high = low
    if low < high:
        count = _split_inside(codes, low, high, bits, starts, ends, count)
    for suffix in range(tail, begin + last - first):
        starts[count], ends[count] = starts[suffix], ends[suffix]
        count += 1
    return _merge(codes, begin, count, keys, values, starts, ends) if count - begin > 1 else count


@compiled
def _split_inside(codes: Array, low: int, high: int, bits: Array, starts: Array, ends: Array, count: int) -> int:
    """Split the word codes[low:high] at its infixes, unless it is a URL.

    Appends the spans to the `count` spans in `starts` and `ends`, and returns the new count.
    """
    at, start, checked = low + 1, low, False
    while at < high:
        length = _infix(codes, at, low, high, bits) if bits[codes[at]] & kinds.INFIX else 0
        if not length:
            at += 1
            continue
        if not checked and _is_url(codes, low, high, bits):
            break
        checked = True
        if at > start:
            starts[count], ends[count] = start, at
            count += 1
        starts[count], ends[count] = at, at + length
        count += 1
        start = at = at + length
    if start < high:
        starts[count], ends[count] = start, high
        count += 1
    return count


@compiled
def _merge(codes: Array, begin: int, count: int, keys: Array, values: Array, starts: Array, ends: Array) -> int:
    """Merge neighbouring words from number `begin` on that form a special string (MERGED), longest first.

    Overwrites the spans in `starts` and `ends`, and returns the new number of words.
    """
    word, num_merged = begin, begin
    while word < count:
        taken = 1
        most = 1
        while most < MAX_MERGED and word + most < count and ends[word + most] - starts[word] <= LONGEST:
            most += 1
        for number in range(most, 1, -1):
            value = _look_up(codes, starts[word], ends[word + number - 1], keys, values)
            if value & MERGED and (value >> 16) & 15 == number:
                taken = number
                break
        starts[num_merged], ends[num_merged] = starts[word], ends[word + taken - 1]
        num_merged += 1
        word += taken
    return num_merged
