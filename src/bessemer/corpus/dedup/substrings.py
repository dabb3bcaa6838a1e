"""Exact substring deduplication: removal of repeated spans of at least N tokens.

Lee et al. 2022 (section 4.1) find repeated substrings of 50 tokens or more with a suffix array. A span of at least N
tokens is repeated exactly when each of its windows of N tokens is, so the union of repeated windows is the same set;
rolling hashes find them in a few sequential passes over tokens on disk, in memory independent of the corpus size.

The first occurrence in canonical order stays. A window counts as repeated when an equal window ends before it begins:
of a long run of one word, the first N stay.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from bessemer.corpus.dedup.signatures import longest, utf8
from bessemer.corpus.dedup.verdicts import Edit, Tables, with_texts, without
from bessemer.corpus.document import COLUMNS
from bessemer.corpus.engine import check_stop
from bessemer.corpus.extract import fold
from bessemer.recipe import Substrings

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_TOKENS = 1 << 20  # read at one time; a longer document is read as a whole
SLOT_BYTES = 24  # of a place in the table of first occurrences: two hashes and a position
LOAD = 0.6  # share of the table that is filled at the most


class Records:
    """Arrays of one type in a file, appended one after the other, read again by their number. `close` leaves the file."""

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._file = path.open("wb+")
        self.num_values = 0
        self.close = self._file.close

    def append(self, values: np.ndarray) -> None:
        """Write values at the end."""
        self.write(self.num_values, values)
        self.num_values += values.size

    def write(self, start: int, values: np.ndarray) -> None:
        """Write values from number `start` on."""
        self._file.seek(start * self.dtype.itemsize)
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).reshape(-1).view(np.uint8).data)

    def range(self, start: int, count: int) -> np.ndarray:
        """`count` values from number `start` on."""
        values = np.empty(count, dtype=self.dtype)
        self._file.seek(start * self.dtype.itemsize)
        if self._file.readinto(values.view(np.uint8).data) < values.nbytes:
            raise OSError(f"{self._file.name}: ends before value {start + count}; was it cut?")
        return values


class _Tokens(NamedTuple):
    """All documents as tokens, on disk."""

    values: Records
    marks: Records  # one byte a token: whether the window that begins there is repeated
    ends: np.ndarray  # number of tokens up to the end of each document

    def chunks(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Stretches of documents: the first and last token, and the documents' offsets within."""
        first = 0
        while first < len(self.ends):
            start = int(self.ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(self.ends, start + CHUNK_TOKENS, side="right")), first + 1)
            offsets = np.concatenate([[0], self.ends[first:last] - start])
            yield start, int(self.ends[last - 1]), offsets
            first = last


def remove_substrings(
    tables: Tables, settings: Substrings, scratch: Path, columns: Sequence[str] = COLUMNS
) -> Iterator[tuple[pa.Table, list[Edit]]]:
    """Each table (column text; canonical order) without repeated spans, and the edits.

    `tables` is called twice, the second time with `columns`. `scratch`: temporary folder, 9 bytes a word or 2 a byte.
    Memory: `max_memory_mib`, 8 bytes a document, and 30 bytes a token of the longest document or of 2^20 tokens.
    """
    scratch.mkdir(parents=True)
    try:
        with (
            closing(Records(scratch / "tokens", np.uint64 if settings.unit == "words" else np.uint8)) as values,
            closing(Records(scratch / "marks", np.uint8)) as marks,
        ):
            tokens = _write(tables, settings, values, marks)
            _mark(tokens, settings)
            yield from _edit(tables(columns), settings, tokens)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(tables: Tables, settings: Substrings, values: Records, marks: Records) -> _Tokens:
    from bessemer.corpus.text.hashing import hash_words

    counts = []
    for table in tables(["text"]):
        texts = table["text"].to_pylist()
        data, offsets = utf8([fold(text) for text in texts] if settings.unit == "words" else texts)
        if settings.unit == "words":
            buffer = np.empty(longest(offsets), dtype=np.uint64)
            for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                counts.append(hash_words(data[start:end], buffer))
                values.append(buffer[: counts[-1]])
        else:
            counts += np.diff(offsets).tolist()
            values.append(data[offsets[0] : offsets[-1]])
        check_stop()
    for start in range(0, values.num_values, CHUNK_TOKENS):
        marks.append(np.zeros(min(CHUNK_TOKENS, values.num_values - start), dtype=np.uint8))
    return _Tokens(values, marks, np.cumsum(np.array(counts, dtype=np.int64)))


def _mark(tokens: _Tokens, settings: Substrings) -> None:
    """Mark every repeated window, in as many passes as the table of first occurrences needs."""
    from bessemer.corpus.dedup.kernels import count_windows, mark_repeated

    memory, length = settings.max_memory_mib << 20, settings.min_tokens
    # A byte has four counters; sixteen for a window keep collisions to 6%, and half of the memory is the limit.
    sketch = np.zeros(min(max(tokens.values.num_values * 4, 1 << 10), memory // 2, 1 << 30), dtype=np.uint8)
    longest_chunk = max((end - start for start, end, _ in tokens.chunks()), default=0)
    one, other = np.empty(longest_chunk, dtype=np.uint64), np.empty(longest_chunk, dtype=np.uint64)
    candidates = 0
    for start, end, offsets in tokens.chunks():
        candidates += count_windows(tokens.values.range(start, end - start), offsets, length, sketch, one, other)
        check_stop()
    most = max(int(memory // 2 / SLOT_BYTES * LOAD), 1)
    num_parts = -(-candidates // most)
    part = 0
    while part < num_parts:
        capacity = int(candidates / num_parts * 1.05 / LOAD) + 1024
        keys, others = np.empty(capacity, dtype=np.uint64), np.empty(capacity, dtype=np.uint64)
        places = np.full(capacity, -1, dtype=np.int64)
        used = 0
        for start, end, offsets in tokens.chunks():
            values, marks = tokens.values.range(start, end - start), tokens.marks.range(start, end - start)
            used = mark_repeated(
                values, offsets, start, length, sketch, part, num_parts, keys, others, places, used, one, other, marks
            )
            tokens.marks.write(start, marks)
            check_stop()
            if used < 0:
                break
        part += 1
        if used < 0:  # the hashes fell unevenly: more, smaller parts; marks already set are right and stay
            part, num_parts = 0, 2 * num_parts


def _edit(tables: Iterator[pa.Table], settings: Substrings, tokens: _Tokens) -> Iterator[tuple[pa.Table, list[Edit]]]:
    from bessemer.corpus.dedup.kernels import spans_of

    done = 0
    for table in tables:
        ends = tokens.ends[done : done + table.num_rows]
        start = int(tokens.ends[done - 1]) if done else 0
        done += table.num_rows
        offsets = np.concatenate([[0], ends - start])
        marks = tokens.marks.range(start, int(offsets[-1]))
        number = int(marks.sum(dtype=np.int64))
        documents, starts, stops = (np.empty(number, dtype=np.int64) for _ in range(3))
        number = spans_of(marks, offsets, settings.min_tokens, documents, starts, stops)
        edits = []
        texts = table["text"].to_pylist() if number else []
        rows, firsts = np.unique(documents[:number], return_index=True)
        lasts = np.append(firsts[1:], number)[: len(firsts)]
        for row, first, last in zip(rows.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
            spans = list(zip(starts[first:last].tolist(), stops[first:last].tolist(), strict=True))
            removed = _words(texts[row], spans) if settings.unit == "words" else _characters(texts[row], spans)
            if removed:
                texts[row] = without(texts[row], removed)
                edits.append(Edit(row, removed))
        yield (with_texts(table, texts) if edits else table), edits
        check_stop()


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
