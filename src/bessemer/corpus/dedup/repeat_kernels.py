"""Compiled passes over repeated paragraphs and spans: a Bloom filter, windows of tokens. Imported inside functions only, since
Numba takes half a second to load.

The Bloom filter is blocked (Putze, Sanders and Singler 2007): all bits of an item are in one block of 512 bits. Two 64-bit
polynomial hashes identify a window: among 10^10 windows the probability of a collision is below 10^-18.
"""

from __future__ import annotations

import numpy as np

from bessemer.corpus.text.hashing import BASE, NEWLINE, ONE, Array, compiled, hash_ngrams, hash_words, mix, roll

LOWER = np.uint64(0xFFFFFFFF)
STAYS, GOES, UNDECIDED = 0, 1, 2  # states of a line
SALT = np.uint64(0xD6E8FEB86659FD93)
OTHER_BASE = np.uint64(0xC2B2AE3D27D4EB4F)
OFFSET = np.uint64(0x9FB21C651E98DF25)  # added to each token of a window, so that zeros count


@compiled
def block_of(item: np.uint64, num_blocks: int, num_filters: int) -> np.uint64:
    """The block of 8 words that holds an item (64 bits, mixed): of `num_blocks` in each of `num_filters` filters. Its upper half
    chooses the block, its lower half the filter, of which there are several only above 2^32 blocks."""
    part = (item & LOWER) * np.uint64(num_filters) >> np.uint64(32)
    return part * np.uint64(num_blocks) + ((item >> np.uint64(32)) * np.uint64(num_blocks) >> np.uint64(32))


@compiled
def blocks_of(items: Array, num_blocks: int, num_filters: int, blocks: Array) -> None:
    """The block of each item."""
    for i in range(len(items)):
        blocks[i] = block_of(items[i], num_blocks, num_filters)


@compiled
def visit(words: Array, start: np.uint64, num_bits: int, item: np.uint64, inserts: bool) -> bool:
    """Set the bits of an item, whose block begins at word `start`, or return whether all of them are set."""
    state = item
    for number in range(num_bits):
        if number % 7 == 0:  # 7 places of 9 bits from each 64
            state = mix(state ^ SALT)
            places = state
        word, bit = start + (places >> np.uint64(6) & np.uint64(7)), np.uint64(1) << (places & np.uint64(63))
        if inserts:
            words[word] |= bit
        elif not words[word] & bit:
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
def paragraph_items(
    data: Array, offsets: Array, ngram: int, min_words: int, buffer: Array, items: Array, lines: Array, counts: Array
) -> int:  # fmt: skip
    """The items of the lines of folded texts, with the number of its line for each; `counts`: items of each line. Returns how
    many items there are."""
    line = total = 0
    for document in range(len(offsets) - 1):
        end = offsets[document + 1]
        start = offsets[document]
        while start <= end:
            stop = start
            while stop < end and data[stop] != NEWLINE:
                stop += 1
            number = hash_words(data[start:stop], buffer)
            if number >= min_words:
                number = _items(buffer, number, ngram)
                items[total : total + number] = buffer[:number]
                lines[total : total + number] = line
                total += number
                counts[line] = number
            line += 1
            start = stop + 1
    return total


@compiled
def judge_lines(
    items: Array, lines: Array, starts: Array, words: Array, num_bits: int, threshold: float, only_insert: bool,
    repeated: Array,
) -> int:  # fmt: skip
    """Lines of which a share of `threshold` of the items is in the filter, into `repeated`; the items of the others are inserted.
    With `only_insert` all are. `starts`: of the items' blocks. Returns the number of repeated lines."""
    number = first = 0
    while first < len(items):
        last, seen = first, 0
        while last < len(items) and lines[last] == lines[first]:
            if not only_insert:
                seen += visit(words, starts[last], num_bits, items[last], False)
            last += 1
        if seen > 0 and seen >= threshold * (last - first):
            repeated[number] = lines[first]
            number += 1
        else:
            for i in range(first, last):
                visit(words, starts[i], num_bits, items[i], True)
        first = last
    return number


@compiled
def bound_seen(
    items: Array, lines: Array, starts: Array, listed: Array, states: Array, default: int, lower: Array, upper: Array,
    num_bits: int, out: Array, found: Array, missing: Array,
) -> int:  # fmt: skip
    """Bounds of how many items of undecided lines come earlier in a line that stays, into rows (line, least, most) of `out`:
    those with a most above 0. Returns their number.

    `lower`, `upper`: filters of the lines before that certainly stay, and that may. `listed`: sorted numbers of lines with their
    `states`; `default`: the state of the others. `found`, `missing`: whether the line of an item is undecided, and which of
    its bits `lower` lacks.
    """
    number = first = place = 0
    while first < len(items):
        line, state, last = lines[first], default, first
        while place < len(listed) and listed[place] < line:
            place += 1
        if place < len(listed) and listed[place] == line:
            state = states[place]
        least = most = 0
        while last < len(items) and lines[last] == line:
            if state == UNDECIDED:
                found[last], missing[last] = True, _missing(lower, starts[last], num_bits, items[last])
                least += missing[last] == 0
                most += visit(upper, starts[last], num_bits, items[last], False)
            last += 1
        for i in range(first, last):
            if state != GOES:
                visit(upper, starts[i], num_bits, items[i], True)
            if state == STAYS:
                visit(lower, starts[i], num_bits, items[i], True)
        if most > 0:
            out[number, 0], out[number, 1], out[number, 2] = line, least, most
            number += 1
        first = last
    return number


@compiled
def _missing(words: Array, start: np.uint64, num_bits: int, item: np.uint64) -> np.uint32:
    """A bit for each place of an item that is not set."""
    state, mask = item, np.uint32(0)
    for number in range(num_bits):
        if number % 7 == 0:
            state = mix(state ^ SALT)
            places = state
        word, bit = start + (places >> np.uint64(6) & np.uint64(7)), np.uint64(1) << (places & np.uint64(63))
        if not words[word] & bit:
            mask |= np.uint32(1) << np.uint32(number)
        places >>= np.uint64(9)
    return mask


@compiled
def settle_lines(
    items: Array, lines: Array, starts: Array, missing: Array, words: Array, num_bits: int, threshold: float,
    repeated: Array,
) -> int:  # fmt: skip
    """As `judge_lines`, of the lines that bounds left undecided; an item is in the filter when `words` has its `missing` bits."""
    number = first = 0
    while first < len(items):
        last, seen = first, 0
        while last < len(items) and lines[last] == lines[first]:
            seen += not (missing[last] & _missing(words, starts[last], num_bits, items[last]))
            last += 1
        if seen > 0 and seen >= threshold * (last - first):
            repeated[number] = lines[first]
            number += 1
        else:
            for i in range(first, last):
                visit(words, starts[i], num_bits, items[i], True)
        first = last
    return number


# --- Windows of tokens


@compiled
def sampled(tokens: Array, length: int, short: int, hashes: Array, places: Array) -> int:
    """For each window of `length` tokens the place of the sub-window of `short` tokens with the least hash, the last of equals
    (Schleimer, Wilkerson and Aiken 2003), into `places`; `hashes`: of all sub-windows. So equal windows have equal ones. Returns
    how many windows there are."""
    number = len(tokens) - length + 1
    if number <= 0:
        return 0
    roll(tokens, len(tokens), short, BASE, ONE, hashes)
    width, best = length - short + 1, -1
    for i in range(number):
        if best < i:
            best = i
            for j in range(i + 1, i + width):
                if hashes[j] <= hashes[best]:
                    best = j
        elif hashes[i + width - 1] <= hashes[best]:
            best = i + width - 1
        places[i] = best
    return number


@compiled
def sample_keys(
    tokens: Array, offsets: Array, length: int, short: int, start: int, hashes: Array, best: Array, keys: Array,
    places: Array,
) -> int:  # fmt: skip
    """Each sampled sub-window once: its key and place, where the first token is number `start`. Returns their number."""
    total = 0
    for document in range(len(offsets) - 1):
        begin = offsets[document]
        number = sampled(tokens[begin : offsets[document + 1]], length, short, hashes, best)
        for i in range(number):
            if i == 0 or best[i] != best[i - 1]:
                keys[total], places[total] = mix(hashes[best[i]] ^ SALT), start + begin + best[i]
                total += 1
    return total


@compiled
def window_keys(
    tokens: Array, offsets: Array, length: int, short: int, start: int, chosen: Array, hashes: Array, best: Array,
    one: Array, other: Array, keys: Array, others: Array, places: Array,
) -> int:  # fmt: skip
    """Both hashes and the place of each window whose sampled sub-window is among the `chosen` places (sorted). Returns their
    number."""
    total = at = 0
    for document in range(len(offsets) - 1):
        begin, end = offsets[document], offsets[document + 1]
        while at < len(chosen) and chosen[at] < start + begin:
            at += 1
        if at == len(chosen) or chosen[at] >= start + end:
            continue
        number = sampled(tokens[begin:end], length, short, hashes, best)
        for i in range(end - begin):  # both hashes of every window
            one[i] = mix(np.uint64(tokens[begin + i]) + OFFSET)
        roll(one, end - begin, length, OTHER_BASE, np.uint64(0), other)
        roll(one, end - begin, length, BASE, np.uint64(0), one)
        for i in range(number):
            here = start + begin + best[i]
            while at < len(chosen) and chosen[at] < here:
                at += 1
            if at < len(chosen) and chosen[at] == here:
                keys[total], others[total], places[total] = one[i], other[i], start + begin + i
                total += 1
    return total


@compiled
def find_repeated(
    keys: Array, others: Array, places: Array, base: int, length: int, with_first: bool, table: Array, firsts: Array,
    used: int, done: int, out: Array, found: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Places of keys that an equal key `length` or more before has, into `out` from number `found` on; with `with_first` that
    one's too. Returns the entries of the table, the keys that are done (fewer when it is full), and the places in `out`.

    `table`, `firsts`: open hash table of both parts of a key, and its first place + 1 (0: free; negative: it is in `out`).
    """
    capacity = np.uint64(len(firsts))
    for i in range(done, len(keys)):
        slot = np.int64(((keys[i] & LOWER) * capacity) >> np.uint64(32))
        while firsts[slot] != 0 and (table[slot, 0] != keys[i] or table[slot, 1] != others[i]):
            slot = (slot + 1) % len(firsts)
        here = base + np.int64(places[i])
        if firsts[slot] == 0:
            if used * 10 >= len(firsts) * 7:
                return used, i, found
            table[slot, 0], table[slot, 1], firsts[slot] = keys[i], others[i], here + 1
            used += 1
        elif here >= abs(firsts[slot]) - 1 + length:
            if with_first and firsts[slot] > 0:
                out[found] = firsts[slot] - 1
                firsts[slot] = -firsts[slot]
                found += 1
            out[found] = here
            found += 1
    return used, len(keys), found


@compiled
def grow_table(table: Array, firsts: Array, new_table: Array, new_firsts: Array) -> None:
    """Move all entries of a table of `find_repeated` into a larger one."""
    capacity = np.uint64(len(new_firsts))
    for old in range(len(firsts)):
        if firsts[old] != 0:
            slot = np.int64(((table[old, 0] & LOWER) * capacity) >> np.uint64(32))
            while new_firsts[slot] != 0:
                slot = (slot + 1) % len(new_firsts)
            new_table[slot, 0], new_table[slot, 1], new_firsts[slot] = table[old, 0], table[old, 1], firsts[old]
