"""Removal of repeated paragraphs (lines) with a Bloom filter, in one pass over the documents in canonical order.

Mode "paragraph" removes a paragraph that is repeated as a whole (dolma, Soldaini et al. 2024); "ngram" one of whose
word n-grams at least the share `threshold` is repeated (DCLM, Li et al. 2024: n-grams of 13, 0.8, false positives of
0.01). Only paragraphs that stay are inserted into the filter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from math import ceil, exp, lgamma, log
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bessemer.corpus.dedup.signatures import longest, utf8
from bessemer.corpus.dedup.verdicts import Edit, with_texts, without
from bessemer.corpus.engine import check_stop
from bessemer.errors import InputError
from bessemer.recipe import Paragraphs

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BITS = 512
MAX_BITS = 21  # of an item; beyond, blocks of 512 bits gain nothing


class BloomFilter(NamedTuple):
    """A blocked Bloom filter of 64-bit hashes."""

    words: np.ndarray  # uint64, 8 a block
    num_bits: int  # set for an item


def false_positive_rate(items_per_block: float, num_bits: int) -> float:
    """Of a blocked filter: a block is a small Bloom filter with a Poisson number of items (Putze 2007, equation 3)."""
    rate = 0.0
    most = int(items_per_block + 12 * items_per_block**0.5 + 20)
    for number in range(most + 1):
        chance = exp(number * log(items_per_block) - items_per_block - lgamma(number + 1)) if items_per_block else 0.0
        rate += chance * float((1.0 - (1.0 - 1.0 / BLOCK_BITS) ** (num_bits * number)) ** num_bits)
    return rate


def filter_size(expected_items: int, false_positive: float) -> tuple[int, int]:
    """Blocks of 64 bytes, and bits an item, of the smallest blocked filter with that rate when it is full."""
    best = (0.0, 1)
    for num_bits in range(1, MAX_BITS + 1):
        low, high = 1e-3, 512.0
        for _ in range(40):  # the rate grows with the load
            middle = (low + high) / 2
            low, high = (middle, high) if false_positive_rate(middle, num_bits) <= false_positive else (low, middle)
        best = max(best, (low, num_bits))
    return max(ceil(expected_items / best[0]), 1), best[1]


def paragraph_filter(num_words: int, settings: Paragraphs) -> BloomFilter:
    """An empty filter for `num_words` words, earlier corpora included. Raises InputError above the recipe's memory."""
    max_items = num_words if settings.mode == "ngram" else num_words // settings.min_words
    num_blocks, num_bits = filter_size(max_items, settings.false_positive)
    needed = num_blocks * (BLOCK_BITS // 8)
    if needed > settings.max_memory_mib << 20:
        raise InputError(
            f"corpus.dedup.paragraphs: {num_words} words need a Bloom filter of {needed >> 20} MiB, more than "
            f"max_memory_mib = {settings.max_memory_mib}; allow more, raise false_positive, or choose mode = 'paragraph'"
        )
    return BloomFilter(np.zeros(num_blocks * 8, dtype=np.uint64), num_bits)


def insert_paragraphs(tables: Iterable[pa.Table], bloom: BloomFilter, settings: Paragraphs) -> None:
    """Insert all paragraphs of an earlier corpus (column text) into the filter."""
    for table in tables:
        _judge(_folded_lines(table["text"].to_pylist()), bloom, settings, only_insert=True)
        check_stop()


def remove_paragraphs(
    tables: Iterable[pa.Table], bloom: BloomFilter, settings: Paragraphs
) -> Iterator[tuple[pa.Table, list[Edit]]]:
    """Each table (column text; in canonical order) without repeated paragraphs and their line breaks, and the edits."""
    for table in tables:
        texts = table["text"].to_pylist()
        folded = _folded_lines(texts)
        repeated = _judge(folded, bloom, settings, only_insert=False)
        edits, first = [], 0
        for row, text in enumerate(texts):
            lines = text.split("\n")
            marks = repeated[first : first + len(lines)]
            first += len(lines)
            if marks.any():
                removed = tuple(_spans(lines, marks.tolist()))
                texts[row] = without(text, removed)
                edits.append(Edit(row, removed))
        yield (with_texts(table, texts) if edits else table), edits
        check_stop()


def _folded_lines(texts: list[str]) -> list[str]:
    """Texts with case and the white space within lines folded; the lines stay."""
    return ["\n".join([" ".join(line.split()) for line in text.casefold().split("\n")]) for text in texts]


def _judge(folded: list[str], bloom: BloomFilter, settings: Paragraphs, only_insert: bool) -> np.ndarray:
    from bessemer.corpus.dedup.kernels import judge_paragraphs

    data, offsets = utf8(folded)
    repeated = np.zeros(sum(text.count("\n") + 1 for text in folded), dtype=bool)
    buffer = np.empty(longest(offsets), dtype=np.uint64)
    ngram, threshold = (settings.ngram, settings.threshold) if settings.mode == "ngram" else (0, 1.0)
    judge_paragraphs(data, offsets, *bloom, ngram, threshold, settings.min_words, buffer, only_insert, repeated)
    return repeated


def _spans(lines: list[str], marks: list[bool]) -> Iterator[tuple[int, int]]:
    """Characters of the marked lines, joined where they follow each other, with the break after each; the last line of
    the text takes the break before it."""
    place, whole = 0, sum(map(len, lines)) + len(lines) - 1
    for marked, run in groupby(zip(marks, lines, strict=True), key=itemgetter(0)):
        after = place + sum(len(line) + 1 for _, line in run)
        if marked:
            yield (place if after <= whole else max(place - 1, 0)), min(after, whole)
        place = after
