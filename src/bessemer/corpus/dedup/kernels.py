"""Compiled passes of deduplication: MinHash, comparison of pairs, Bloom filter, token windows. Imported inside
functions only, since Numba takes half a second to load.

A token is the 64-bit hash of a word or character; a shingle is n tokens. The Bloom filter is blocked (Putze, Sanders and
Singler 2007): all bits of an item are in one block of 512 bits. Two 64-bit polynomial hashes identify a window: among
10^10 windows the probability of a collision is below 10^-18.
"""

from __future__ import annotations

import numpy as np

from bessemer.corpus.text.hashing import BASE, NEWLINE, Array, compiled, hash_characters, hash_ngrams, hash_words, mix

NOTHING = np.uint32(0xFFFFFFFF)  # each value of the signature of a text without a shingle
SALT = np.uint64(0xD6E8FEB86659FD93)
OTHER_BASE = np.uint64(0xC2B2AE3D27D4EB4F)
OFFSET = np.uint64(0x9FB21C651E98DF25)  # added to each token of a window, so that zeros count


@compiled
def shingles_of(text: Array, by_words: bool, length: int, buffer: Array) -> int:
    """Write the hashes of a folded text's shingles into `buffer` (one place per byte is enough); returns their number."""
    number = hash_words(text, buffer) if by_words else hash_characters(text, buffer)
    return hash_ngrams(buffer, number, length, buffer)


@compiled
def sign(
    data: Array, offsets: Array, by_words: bool, length: int, factors: Array, addends: Array, buffer: Array,
    signatures: Array,
) -> None:  # fmt: skip
    """The MinHash signature of each text data[offsets[i]:offsets[i + 1]], into the rows of `signatures`."""
    num_hashes = len(factors)
    for document in range(len(offsets) - 1):
        text = data[offsets[document] : offsets[document + 1]]
        number = shingles_of(text, by_words, length, buffer)
        smallest = signatures[document]
        smallest[:] = NOTHING
        # Four shingles a round: the loop over the hashes is vectorised, and loads and stores once for four.
        whole = number - number % 4
        for i in range(0, whole, 4):
            one = np.uint32(buffer[i] >> np.uint64(32))
            two = np.uint32(buffer[i + 1] >> np.uint64(32))
            three = np.uint32(buffer[i + 2] >> np.uint64(32))
            four = np.uint32(buffer[i + 3] >> np.uint64(32))
            for k in range(num_hashes):
                a, b = factors[k], addends[k]
                left = min(np.uint32(np.uint32(a * one) + b), np.uint32(np.uint32(a * two) + b))
                right = min(np.uint32(np.uint32(a * three) + b), np.uint32(np.uint32(a * four) + b))
                smallest[k] = min(smallest[k], min(left, right))
        for i in range(whole, number):
            one = np.uint32(buffer[i] >> np.uint64(32))
            for k in range(num_hashes):
                smallest[k] = min(smallest[k], np.uint32(np.uint32(factors[k] * one) + addends[k]))


@compiled
def band_keys(signatures: Array, rows: int, salts: Array, keys: Array) -> None:
    """A key of 64 bits for each band of each signature, into keys[band, document]; `salts` go in with the band."""
    num_bands = keys.shape[0]
    for document in range(len(signatures)):
        for band in range(num_bands):
            value = mix(np.uint64(band) + salts[document])
            for k in range(band * rows, (band + 1) * rows):
                value = mix(value ^ np.uint64(signatures[document, k]))
            keys[band, document] = value


@compiled
def equal_places(left: Array, left_rows: Array, right: Array, right_rows: Array, out: Array) -> None:
    """Places in which pairs of signatures (left[left_rows[i]], right[right_rows[i]]) agree."""
    for i in range(len(out)):
        one, other = left[left_rows[i]], right[right_rows[i]]
        count = np.int32(0)
        for k in range(len(one)):
            count += np.int32(one[k] == other[k])
        out[i] = count


@compiled
def jaccard(left: Array, right: Array) -> float:
    """Jaccard similarity of two sorted sets."""
    i = j = shared = 0
    while i < len(left) and j < len(right):
        one, other = left[i], right[j]
        shared += one == other
        i += one <= other
        j += other <= one
    return shared / max(len(left) + len(right) - shared, 1)


@compiled
def jaccards(
    sets: Array, starts: Array, chosen: Array, other_sets: Array, other_starts: Array, other_chosen: Array, out: Array
) -> None:  # fmt: skip
    """Jaccard similarity of pairs of sets; set number i is sets[starts[i] : starts[i + 1]]."""
    for i in range(len(out)):
        one, other = chosen[i], other_chosen[i]
        out[i] = jaccard(sets[starts[one] : starts[one + 1]], other_sets[other_starts[other] : other_starts[other + 1]])


@compiled
def first_neighbours(left: Array, right: Array, can_go: Array, keeper: Array) -> None:
    """Taken in order, each document stays unless it is like one that stays already: the first of these is its keeper, at
    first each its own. Edges join left[i] < right[i], places in the order, and are sorted by (right, left)."""
    for i in range(len(left)):
        one, other = left[i], right[i]
        if can_go[other] and keeper[other] == other and keeper[one] == one:
            keeper[other] = one


@compiled
def connect(left: Array, right: Array, parents: Array) -> None:
    """The smallest place of each connected component, into `parents` (at first each its own): union-find with path
    halving."""
    for i in range(len(left)):
        one, other = left[i], right[i]
        while parents[one] != one:
            parents[one] = parents[parents[one]]
            one = parents[one]
        while parents[other] != other:
            parents[other] = parents[parents[other]]
            other = parents[other]
        parents[max(one, other)] = min(one, other)
    for place in range(len(parents)):
        parents[place] = parents[parents[place]]


@compiled
def visit(filter_words: Array, num_bits: int, item: np.uint64, inserts: bool) -> bool:
    """Set the bits of an item (64 bits, mixed), or return whether all of them are set.

    The upper 32 bits choose the block of 8 words.
    """
    start = ((item >> np.uint64(32)) * np.uint64(len(filter_words) // 8) >> np.uint64(32)) * np.uint64(8)
    state = item
    for number in range(num_bits):
        if number % 7 == 0:  # 7 places of 9 bits from each 64
            state = mix(state ^ SALT)
            places = state
        word, bit = start + (places >> np.uint64(6) & np.uint64(7)), np.uint64(1) << (places & np.uint64(63))
        if inserts:
            filter_words[word] |= bit
        elif not filter_words[word] & bit:
            return False
        places >>= np.uint64(9)
    return True


@compiled
def _items(tokens: Array, number: int, ngram: int) -> int:
    """Hashes of a paragraph's items into `tokens`: its n-grams, or the whole where it is shorter or ngram is 0."""
    if ngram and number >= ngram:
        return hash_ngrams(tokens, number, ngram, tokens)
    value = np.uint64(number)
    for i in range(number):
        value = value * BASE + tokens[i]
    tokens[0] = mix(value)
    return 1


@compiled
def judge_paragraphs(
    data: Array, offsets: Array, filter_words: Array, num_bits: int, ngram: int, threshold: float, min_words: int,
    buffer: Array, only_insert: bool, repeated: Array,
) -> None:  # fmt: skip
    """Mark repeated lines of folded texts in `repeated` and insert the others; with `only_insert` all of them."""
    line = 0
    for document in range(len(offsets) - 1):
        end = offsets[document + 1]
        start = offsets[document]
        while start <= end:
            stop = start
            while stop < end and data[stop] != NEWLINE:
                stop += 1
            number = hash_words(data[start:stop], buffer)
            if number >= min_words:
                items = buffer[: _items(buffer, number, ngram)]
                seen = 0
                if not only_insert:
                    for item in items:
                        seen += visit(filter_words, num_bits, item, False)
                if seen > 0 and seen >= threshold * len(items):
                    repeated[line] = True
                    items = items[:0]
                for item in items:
                    visit(filter_words, num_bits, item, True)
            line += 1
            start = stop + 1


@compiled
def _windows(tokens: Array, length: int, one: Array, other: Array) -> int:
    """Both hashes of every window of a document, into `one` and `other`; gives how many windows there are."""
    number = len(tokens) - length + 1
    if number <= 0:
        return 0
    drop = other_drop = np.uint64(1)
    value = other_value = np.uint64(0)
    for i in range(length - 1):
        drop *= BASE
        other_drop *= OTHER_BASE
        token = mix(np.uint64(tokens[i]) + OFFSET)
        value = value * BASE + token
        other_value = other_value * OTHER_BASE + token
    for i in range(number):
        token = mix(np.uint64(tokens[i + length - 1]) + OFFSET)
        value = value * BASE + token
        other_value = other_value * OTHER_BASE + token
        one[i], other[i] = mix(value), mix(other_value)
        token = mix(np.uint64(tokens[i]) + OFFSET)
        value -= token * drop
        other_value -= token * other_drop
    return number


@compiled
def _counter(sketch: Array, key: np.uint64) -> tuple[int, np.uint8]:
    """Byte and bit of a window's counter in the sketch of 2-bit counters, four a byte."""
    cell = ((key >> np.uint64(32)) * np.uint64(len(sketch) * 4)) >> np.uint64(32)
    return int(cell >> np.uint64(2)), np.uint8((cell & np.uint64(3)) << np.uint64(1))


@compiled
def count_windows(tokens: Array, offsets: Array, length: int, sketch: Array, one: Array, other: Array) -> int:
    """Count each window up to 2; returns how many more of all windows so far are not alone in their counter."""
    candidates = 0
    for document in range(len(offsets) - 1):
        number = _windows(tokens[offsets[document] : offsets[document + 1]], length, one, other)
        for i in range(number):
            byte, shift = _counter(sketch, one[i])
            count = (sketch[byte] >> shift) & np.uint8(3)
            if count < 2:
                sketch[byte] += np.uint8(1) << shift
            candidates += 2 if count == 1 else count >> 1
    return candidates


@compiled
def mark_repeated(
    tokens: Array, offsets: Array, start: int, length: int, sketch: Array, part: int, num_parts: int, keys: Array,
    others: Array, places: Array, used: int, one: Array, other: Array, marks: Array,
) -> int:  # fmt: skip
    """Mark repeated windows that do not overlap their first occurrence; returns the table's entries, -1 when full.

    `start`: number of the first token here; `keys`, `others`, `places`: open hash table from windows to their first
    occurrence (-1: free) with `used` entries.
    """
    capacity = np.uint64(len(keys))
    for document in range(len(offsets) - 1):
        begin = offsets[document]
        number = _windows(tokens[begin : offsets[document + 1]], length, one, other)
        for i in range(number):
            key = one[i]
            byte, shift = _counter(sketch, key)
            is_alone = (sketch[byte] >> shift) & np.uint8(3) < 2
            if is_alone or (num_parts > 1 and key % np.uint64(num_parts) != np.uint64(part)):
                continue
            here = start + begin + i
            slot = np.int64(((key >> np.uint64(32)) * capacity) >> np.uint64(32))
            while places[slot] >= 0 and (keys[slot] != key or others[slot] != other[i]):
                slot = (slot + 1) % len(keys)
            if places[slot] < 0:
                if used * 10 >= len(keys) * 9:
                    return -1
                keys[slot], others[slot], places[slot] = key, other[i], here
                used += 1
            elif here >= places[slot] + length:
                marks[begin + i] = 1
    return used


@compiled
def spans_of(marks: Array, offsets: Array, length: int, documents: Array, starts: Array, ends: Array) -> int:
    """The union of the marked windows of each document, as token spans within it; gives how many."""
    number = 0
    for document in range(len(offsets) - 1):
        first = offsets[document]
        end = -1
        for i in range(first, offsets[document + 1]):
            if marks[i]:
                if i - first > end:
                    documents[number], starts[number] = document, i - first
                    number += 1
                end = i - first + length
                ends[number - 1] = end
    return number
