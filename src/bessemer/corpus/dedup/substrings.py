"""Exact substring deduplication: removal of repeated spans of at least N tokens.

Lee et al. 2022 (section 4.1) find repeated substrings of 50 tokens or more with a suffix array. A span of at least N
tokens is repeated exactly when each of its windows of N tokens is, so the union of repeated windows is the same set.

    SpanSamples      a part: of each window the sub-window of half its length with the least hash, by range of that
    RepeatedSamples  a range: the places of sub-windows that occur twice, by part
    SpanWindows      a part: the windows around them, by range of their hash
    RepeatedWindows  a range: the windows that an earlier one is equal to, by part
    CollectSpans     a part: the spans that they cover

Equal windows have equal sub-windows at the same place in them, so no repeated window is missed, and few others are exchanged.

The first occurrence in the order of the published corpus stays. A window counts as repeated when an equal window ends before it
begins: of a long run of one word, the first N stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bessemer.corpus.dedup.exchange import SplitWriter
from bessemer.corpus.dedup.paragraphs import slices
from bessemer.corpus.dedup.signatures import longest, utf8
from bessemer.corpus.dedup.task import DocumentPart, RepeatsTask, memory_bytes, range_of, records
from bessemer.corpus.dedup.verdicts import Edit, with_texts, without
from bessemer.corpus.engine import check_stop
from bessemer.corpus.extract import fold
from bessemer.recipe import Substrings

PLACE_BITS = 40  # a place is its part times 2^40, plus the number of the token in the part
SLOT_BYTES, LOAD = 24, 0.7  # of the table of first places
FIRST_SLOTS = 1 << 12  # of a table, which grows with what it holds
SPANS = "spans.npy"
SAMPLE = np.dtype([("key", "<u8"), ("place", "<u8")])
WINDOW = np.dtype([("key", "<u8"), ("other", "<u8"), ("place", "<u8")])
SPAN = np.dtype([("row", "<i8"), ("first", "<i8"), ("last", "<i8")])  # tokens of a document: first, and behind the last


def num_sample_ranges(num_words: int, num_characters: int, settings: Substrings) -> int:
    """Tasks among which the sub-windows of so much text are divided, so that the table of each takes about `max_memory_mib`."""
    tokens = num_words if settings.unit == "words" else 2 * num_characters
    return _num_ranges(2 * tokens / (settings.min_tokens - half(settings) + 2), settings)


def num_window_ranges(num_samples: int, settings: Substrings) -> int:
    """The same for the windows around so many repeated sub-windows."""
    return _num_ranges(num_samples * (settings.min_tokens - half(settings) + 2) / 2, settings)


def _num_ranges(num_keys: float, settings: Substrings) -> int:
    return max(-(-int(num_keys * SLOT_BYTES / LOAD) // memory_bytes(settings.max_memory_mib)), 1)


def half(settings: Substrings) -> int:
    """Tokens of a sub-window."""
    return max(settings.min_tokens // 2, 1)


@dataclass(frozen=True)
class SpanTask(RepeatsTask):
    """A task that reads the tokens of a part."""

    part: DocumentPart
    num_ranges: int

    def tokens(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Tokens of some documents, and where each document begins among them."""
        from bessemer.corpus.text.hashing import hash_words

        by_words = self.plan.settings.substrings.unit == "words"
        for table in self.part(["text"]):
            for some in slices(table):
                texts = some["text"].to_pylist()
                data, offsets = utf8([fold(text) for text in texts] if by_words else texts)
                if by_words:
                    buffer, counts = np.empty(int(offsets[-1] - offsets[0]) // 2 + len(offsets), np.uint64), [0]
                    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                        counts.append(counts[-1] + hash_words(data[start:end], buffer[counts[-1] :]))
                    yield buffer[: counts[-1]], np.array(counts)
                else:
                    yield data[offsets[0] : offsets[-1]], offsets - offsets[0]
                check_stop()


class SpanSamples(SpanTask):
    """Sub-windows by range (SAMPLE), and `counts`: the tokens of each document (int64)."""

    exchanged = ("samples",)

    def make(self, folder: Path) -> dict[str, Any]:
        from bessemer.corpus.dedup.repeat_kernels import sample_keys

        settings, start = self.plan.settings.substrings, 0
        with SplitWriter(folder / "samples", self.num_ranges) as file, (folder / "counts").open("wb") as counted:
            for tokens, offsets in self.tokens():
                hashes, best = np.empty(longest(offsets), np.uint64), np.empty(longest(offsets), np.int64)
                keys, places = np.empty(len(tokens), np.uint64), np.empty(len(tokens), np.uint64)
                number = sample_keys(
                    tokens, offsets, settings.min_tokens, half(settings), start, hashes, best, keys, places
                )
                values = records(SAMPLE, number, key=keys[:number], place=places[:number])
                file.write(range_of(keys[:number], self.num_ranges), values)
                counted.write(np.diff(offsets).astype("<i8").tobytes())
                start += len(tokens)
        return {"tokens": start}


@dataclass(frozen=True)
class SpanWindows(SpanTask):
    """The windows around repeated sub-windows, by range (WINDOW). num_ranges: of windows."""

    num_sample_ranges: int

    exchanged = ("windows",)

    def make(self, folder: Path) -> dict[str, Any]:
        from bessemer.corpus.dedup.repeat_kernels import window_keys

        settings, start = self.plan.settings.substrings, 0
        chosen = self.gather(RepeatedSamples.__name__, range(self.num_sample_ranges), "repeated", np.uint64)
        chosen = np.sort(chosen & np.uint64((1 << PLACE_BITS) - 1))
        with SplitWriter(folder / "windows", self.num_ranges) as file:
            if not len(chosen):
                return {}
            for tokens, offsets in self.tokens():
                one, other, hashes = (np.empty(longest(offsets), np.uint64) for _ in range(3))
                best = np.empty(longest(offsets), np.int64)
                keys, others, places = (np.empty(len(tokens), np.uint64) for _ in range(3))
                number = window_keys(
                    tokens, offsets, settings.min_tokens, half(settings), start, chosen, hashes, best, one, other,
                    keys, others, places,
                )  # fmt: skip
                values = records(WINDOW, number, key=keys[:number], other=others[:number], place=places[:number])
                file.write(range_of(keys[:number], self.num_ranges), values)
                start += len(tokens)
        return {}


class FirstPlaces:
    """An open hash table from keys to their first places, which grows."""

    def __init__(self) -> None:
        self.table, self.firsts, self.used = np.zeros((FIRST_SLOTS, 2), np.uint64), np.zeros(FIRST_SLOTS, np.int64), 0

    def repeated(
        self, keys: np.ndarray, others: np.ndarray, places: np.ndarray, base: int, length: int, with_first: bool
    ) -> np.ndarray:
        """The places whose key has one `length` or more before; with `with_first` that one too, once. base: added to each."""
        from bessemer.corpus.dedup.repeat_kernels import find_repeated, grow_table

        out, done, found = np.empty(len(keys) * (1 + with_first), dtype=np.int64), 0, 0
        while True:
            self.used, done, found = find_repeated(
                keys, others, places, base, length, with_first, self.table, self.firsts, self.used, done, out, found
            )
            if done == len(keys):
                return out[:found]
            table, firsts = np.zeros((2 * len(self.table), 2), np.uint64), np.zeros(2 * len(self.table), np.int64)
            grow_table(self.table, self.firsts, table, firsts)
            self.table, self.firsts = table, firsts


@dataclass(frozen=True)
class RepeatedTask(RepeatsTask):
    """Which keys of a range are repeated, part after part: their places, by part. first_part: behind earlier corpora."""

    first_part: int

    exchanged = ("repeated",)

    def find(self, step: str, file: str, kind: np.dtype[Any], length: int, with_first: bool, folder: Path) -> int:
        """Returns how many places are repeated."""
        seen, total = FirstPlaces(), 0
        with SplitWriter(folder / "repeated", self.plan.num_parts) as out:
            for part, values in self.by_task(step, range(self.first_part, self.plan.num_parts), file, kind):
                keys, places = (np.ascontiguousarray(values[name]) for name in ("key", "place"))
                others = np.ascontiguousarray(values["other"]) if kind is WINDOW else np.zeros_like(keys)
                found = seen.repeated(keys, others, places, part << PLACE_BITS, length, with_first)
                out.write(found >> PLACE_BITS, found.astype(np.uint64))
                total += len(found)
                check_stop()
        return total


class RepeatedSamples(RepeatedTask):
    """Sub-windows that occur at two places."""

    def make(self, folder: Path) -> dict[str, Any]:
        return {"repeated": self.find(SpanSamples.__name__, "samples", SAMPLE, 1, True, folder)}


class RepeatedWindows(RepeatedTask):
    """Windows that an equal one ends before."""

    def make(self, folder: Path) -> dict[str, Any]:
        length = self.plan.settings.substrings.min_tokens
        return {"repeated": self.find(SpanWindows.__name__, "windows", WINDOW, length, False, folder)}


@dataclass(frozen=True)
class CollectSpans(RepeatsTask):
    """The repeated spans of a part's documents, sorted, in SPANS. num_ranges: of windows."""

    num_ranges: int

    def make(self, folder: Path) -> dict[str, Any]:
        ends = np.cumsum(
            np.frombuffer(self.result(SpanSamples.__name__, self.number, "counts").read_bytes(), dtype="<i8")
        )
        places = self.gather(RepeatedWindows.__name__, range(self.num_ranges), "repeated", np.uint64)
        places = np.sort((places & np.uint64((1 << PLACE_BITS) - 1)).astype(np.int64))
        np.save(folder / SPANS, spans_of(places, ends, self.plan.settings.substrings.min_tokens))
        return {}


def spans_of(places: np.ndarray, ends: np.ndarray, length: int) -> np.ndarray:
    """The union of windows (SPAN), by their sorted places. ends: number of the token behind each document."""
    rows = np.searchsorted(ends, places, side="right")
    begins = np.ones(len(places), dtype=bool)
    begins[1:] = (rows[1:] != rows[:-1]) | (places[1:] > places[:-1] + length)
    firsts = np.flatnonzero(begins)
    lasts = np.append(firsts[1:], len(places))[: len(firsts)] - 1
    before = np.append(0, ends)[rows[firsts]]
    first, last = places[firsts] - before, places[lasts] + length - before
    return records(SPAN, len(firsts), row=rows[firsts], first=first, last=last)


def cut_spans(table: pa.Table, spans: np.ndarray, unit: str) -> tuple[pa.Table, list[Edit]]:
    """A part (column text) without the repeated spans (SPAN), and the edits."""
    texts, edits = table["text"].to_pylist() if len(spans) else [], []
    rows, firsts = np.unique(spans["row"], return_index=True)
    for row, some in zip(rows.tolist(), np.split(spans, firsts[1:]), strict=False):
        ends = list(zip(some["first"].tolist(), some["last"].tolist(), strict=True))
        removed = _words(texts[row], ends) if unit == "words" else _characters(texts[row], ends)
        if removed:
            texts[row] = without(texts[row], removed)
            edits.append(Edit(row, removed))
    return (with_texts(table, texts) if edits else table), edits


def _words(text: str, spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Characters of word spans [first, last): from the first word up to the word behind the last."""
    begins = [match.start() for match in re.finditer(r"\S+", text)]
    begins.append(len(text))
    return tuple((begins[first], begins[last]) for first, last in spans)


def _characters(text: str, spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Whole characters within spans of UTF-8 bytes; a span of less than one character is left out."""
    if text.isascii():
        return tuple(spans)
    raw = np.frombuffer(text.encode(), dtype=np.uint8)
    begins = np.append(np.flatnonzero((raw & 0xC0) != 0x80), len(raw))
    starts, ends = np.array(spans).T
    found = zip(
        np.searchsorted(begins, starts).tolist(), (np.searchsorted(begins, ends, "right") - 1).tolist(), strict=True
    )
    return tuple((start, end) for start, end in found if end > start)
