"""Repeated paragraphs (lines), found with a Bloom filter in the order of the published corpus.

Mode "paragraph" removes a paragraph that is repeated as a whole (dolma, Soldaini et al. 2024); "ngram" one of whose
word n-grams at least the share `threshold` is repeated (DCLM, Li et al. 2024: n-grams of 13, 0.8, false positives of
0.01). Only paragraphs that stay are inserted into the filter.

    CountText        a part: its words
    ParagraphItems   a part: hashes of its paragraphs or n-grams, by range of the filter's blocks
    JudgeParagraphs  a range: its blocks of the filter, through which the hashes of all parts go in their order

The filter, and so each of its errors, is the same however many ranges there are.

Whether an n-gram is repeated depends on which paragraphs before it stay. Where the n-grams of a paragraph lie in several
ranges, each range counts for each line the n-grams that certainly are in the filter, and those that may be: from lines that stay,
and from lines that are undecided too. Where both bounds lie on one side of the threshold the line is decided, and another round
knows more: the first undecided line is decided in each.

    BoundParagraphs  a range: both counts of each undecided line, by part
    DecideLines      a part: its lines that go, and those that stay undecided
    MissingBits      a range: the items of undecided lines, with the bits that the lines which stay do not set
    SettleLines      all: the lines that are left, one after the other, when they fit into memory

    CollectParagraphs  a part: the numbers of its repeated lines, whoever decided them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import ceil, exp, lgamma, log
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bessemer.corpus.dedup.exchange import SplitWriter, load_array, read_split, split_runs, write_split
from bessemer.corpus.dedup.signatures import longest, utf8
from bessemer.corpus.dedup.task import (
    PART_BITS,
    DocumentPart,
    RepeatsTask,
    memory_bytes,
    part_of,
    records,
    row_of,
    runs,
)
from bessemer.corpus.dedup.verdicts import Edit, with_texts, without
from bessemer.corpus.engine import check_stop
from bessemer.recipe import Paragraphs

BLOCK_BITS, BLOCK_WORDS = 512, 8
MAX_BITS = 21  # of an item; beyond, blocks of 512 bits gain nothing
MAX_BLOCKS = 1 << 32  # that half of a hash can choose among
SLICE_BYTES = 4 << 20  # of text whose hashes are computed at one time
LINES = "lines.npy"
ITEM = np.dtype([("item", "<u8"), ("line", "<u4")])  # line: its number in the part
BOUNDS = np.dtype([("line", "<u4"), ("least", "<u4"), ("most", "<u4")])
STATE = np.dtype([("line", "<u4"), ("state", "u1")])  # of lines that do not certainly stay
OPEN = np.dtype([("line", "<u8"), ("item", "<u8"), ("block", "<u8"), ("missing", "<u4")])  # line: part and number
SETTLE_BYTES = 4 * OPEN.itemsize + BLOCK_WORDS * 8  # of memory for each item of a line that is left


@dataclass(frozen=True)
class RangedFilter:
    """A blocked Bloom filter of 64-bit hashes, cut into ranges of blocks."""

    num_blocks: int  # in each of num_filters, among which other bits of the hash choose
    num_filters: int
    num_bits: int  # set for an item
    num_ranges: int

    @classmethod
    def of(cls, num_words: int, settings: Paragraphs) -> RangedFilter:
        """The filter for `num_words` words, earlier corpora included, in ranges that take `max_memory_mib`."""
        max_items = num_words if settings.mode == "ngram" else num_words // settings.min_words
        num_blocks, num_bits = filter_size(max_items, settings.false_positive)
        num_filters = -(-num_blocks // MAX_BLOCKS)
        num_bytes, memory = num_blocks * BLOCK_WORDS * 8, memory_bytes(settings.max_memory_mib)
        num_copies = 2 if settings.mode == "ngram" and num_bytes > memory else 1  # for both bounds
        return cls(-(-num_blocks // num_filters), num_filters, num_bits, -(-num_copies * num_bytes // memory))

    def first_block(self, number: int) -> int:
        """Of a range."""
        return self.num_blocks * self.num_filters * number // self.num_ranges

    def num_words(self, number: int) -> int:
        """64-bit words of a range."""
        return (self.first_block(number + 1) - self.first_block(number)) * BLOCK_WORDS

    def blocks(self, items: np.ndarray) -> np.ndarray:
        """The block of each item."""
        from bessemer.corpus.dedup.repeat_kernels import blocks_of

        found = np.empty(len(items), dtype=np.uint64)
        blocks_of(items, self.num_blocks, self.num_filters, found)
        return found

    def range_of(self, items: np.ndarray) -> np.ndarray:
        """The range of each item."""
        if self.num_ranges == 1:
            return np.zeros(len(items), dtype=np.uint8)
        firsts = np.array([self.first_block(number) for number in range(1, self.num_ranges)], dtype=np.uint64)
        found: np.ndarray = np.searchsorted(firsts, self.blocks(items), side="right")
        return found


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


@dataclass(frozen=True)
class CountText(RepeatsTask):
    """Count the words and characters of a part."""

    part: DocumentPart

    def make(self, folder: Path) -> dict[str, int]:

        words = characters = 0
        for table in self.part(["text"] if self.part.corpus else ["words", "characters"]):
            if self.part.corpus:
                words += sum(text.count(" ") + 1 for text in table["text"].to_pylist())
            else:
                words += pc.sum(table["words"]).as_py() or 0
                characters += pc.sum(table["characters"]).as_py() or 0
            check_stop()
        return {"words": words, "characters": characters}


@dataclass(frozen=True)
class ParagraphItems(RepeatsTask):
    """The items of a part's lines, by range, in `items` (ITEM); how many each line has, in `counts` (uint32)."""

    part: DocumentPart
    bloom: RangedFilter

    def make(self, folder: Path) -> dict[str, int]:
        from bessemer.corpus.dedup.repeat_kernels import paragraph_items

        settings, line, total = self.plan.settings.paragraphs, 0, 0
        ngram = settings.ngram if settings.mode == "ngram" else 0
        with SplitWriter(folder / "items", self.bloom.num_ranges) as file, (folder / "counts").open("wb") as counted:
            for table in self.part(["text"]):
                for some in slices(table):
                    data, offsets = utf8(_folded_lines(some["text"].to_pylist()))
                    counts = np.zeros(int((data == ord("\n")).sum()) + len(offsets), dtype=np.uint32)
                    most = int(offsets[-1] - offsets[0]) // 2 + len(counts)
                    items, lines = np.empty(most, dtype=np.uint64), np.empty(most, dtype=np.uint32)
                    buffer = np.empty(longest(offsets), dtype=np.uint64)
                    number = paragraph_items(data, offsets, ngram, settings.min_words, buffer, items, lines, counts)
                    values = records(ITEM, number, item=items[:number], line=lines[:number] + np.uint32(line))
                    file.write(self.bloom.range_of(items[:number]), values)
                    num_lines = line_counts(some).sum()
                    counted.write(counts[:num_lines].tobytes())
                    line += int(num_lines)
                    total += number
                    check_stop()
        return {"lines": line, "items": total}


def slices(table: pa.Table) -> Iterator[pa.Table]:
    """The rows of a table with some SLICE_BYTES of text at one time."""
    ends = np.cumsum(pc.binary_length(table["text"]).to_numpy().astype(np.int64))
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        end = max(int(np.searchsorted(ends, before + SLICE_BYTES, side="right")), start + 1)
        yield table.slice(start, end - start)
        start = end


def line_counts(table: pa.Table) -> np.ndarray:
    """Lines of each text."""
    counts: np.ndarray = pc.count_substring(table["text"], "\n").to_numpy().astype(np.int64) + 1
    return counts


class RangeItems(RepeatsTask):
    """A task that reads the items of a range, part after part."""

    bloom: RangedFilter

    def items(self, part: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Items, their lines, and the first words of their blocks in this range's slice of the filter: a run at one time."""
        first = np.uint64(self.bloom.first_block(self.number))
        for values in split_runs(self.result(ParagraphItems.__name__, part, "items"), self.number, ITEM):
            items = np.ascontiguousarray(values["item"])
            starts = (self.bloom.blocks(items) - first) * np.uint64(BLOCK_WORDS)
            yield items, np.ascontiguousarray(values["line"]), starts
            check_stop()


@dataclass(frozen=True)
class JudgeParagraphs(RangeItems):
    """The repeated lines of all parts, by part, where each has all its items in this range."""

    bloom: RangedFilter
    num_earlier: int  # parts of earlier corpora, which only go into the filter

    exchanged = ("repeated",)

    def make(self, folder: Path) -> dict[str, int]:
        from bessemer.corpus.dedup.repeat_kernels import judge_lines

        settings, found = self.plan.settings.paragraphs, 0
        threshold = settings.threshold if settings.mode == "ngram" else 1.0
        words = np.zeros(self.bloom.num_words(self.number), dtype=np.uint64)
        with SplitWriter(folder / "repeated", self.plan.num_parts) as file:
            for part in range(self.plan.num_parts):
                for items, lines, starts in self.items(part):
                    repeated = np.empty(len(lines), dtype=np.uint32)
                    only_insert, num_bits = part < self.num_earlier, self.bloom.num_bits
                    number = judge_lines(items, lines, starts, words, num_bits, threshold, only_insert, repeated)
                    file.write(np.full(number, part, dtype=np.uint32), repeated[:number])
                    found += number
        return {"repeated": found}


# --- Bounds


@dataclass(frozen=True)
class BoundTask(RangeItems):
    """A pass over a range with both bounds of the filter. round: 0 the first, in which all own lines are undecided."""

    bloom: RangedFilter
    num_earlier: int
    round: int

    @property
    def folder(self) -> Path:
        return self.work / self.step / f"{self.round:03d}-{self.number:06d}"

    def bounds(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Of each run of a part: its bounds (BOUNDS), and the items of undecided lines (OPEN)."""
        from bessemer.corpus.dedup.repeat_kernels import STAYS, UNDECIDED, bound_seen

        lower, upper = (np.zeros(self.bloom.num_words(self.number), dtype=np.uint64) for _ in range(2))
        for part in range(self.plan.num_parts):
            known = np.empty(0, dtype=STATE)
            default = STAYS if self.round or part < self.num_earlier else UNDECIDED
            if self.round and part >= self.num_earlier:
                known = load_array(decided(self, part, self.round - 1) / "states.npy")
            listed, states = (np.ascontiguousarray(known[name]) for name in ("line", "state"))
            for items, lines, starts in self.items(part):
                out = np.empty((len(items), 3), dtype=np.uint32)
                found, missing = np.zeros(len(items), dtype=bool), np.zeros(len(items), dtype=np.uint32)
                number = bound_seen(
                    items,
                    lines,
                    starts,
                    listed,
                    states,
                    default,
                    lower,
                    upper,
                    self.bloom.num_bits,
                    out,
                    found,
                    missing,
                )
                line, item = lines[found].astype(np.uint64) + (np.uint64(part) << PART_BITS), items[found]
                block = self.bloom.blocks(item)
                left = records(OPEN, len(item), line=line, item=item, block=block, missing=missing[found])
                yield part, out[:number].reshape(-1).view(BOUNDS), left


def decided(task: RepeatsTask, part: int, round_: int) -> Path:
    """The result of `DecideLines`."""
    return task.work / DecideLines.__name__ / f"{round_:03d}-{part:06d}"


class BoundParagraphs(BoundTask):
    """Both counts of the undecided lines, by part."""

    exchanged = ("bounds",)

    def make(self, folder: Path) -> dict[str, Any]:
        with SplitWriter(folder / "bounds", self.plan.num_parts) as file:
            for part, found, _ in self.bounds():
                file.write(np.full(len(found), part, dtype=np.uint32), found)
        return {}


class MissingBits(BoundTask):
    """The items of undecided lines."""

    def make(self, folder: Path) -> dict[str, Any]:
        with SplitWriter(folder / "open", 1) as file:
            for _, _, left in self.bounds():
                file.write(np.zeros(len(left), dtype=np.uint8), left)
        return {}


@dataclass(frozen=True)
class DecideLines(RepeatsTask):
    """What the bounds of a round decide of a part: `states.npy` (STATE), and all lines that go, in `repeated` for the part."""

    num_ranges: int
    round: int

    @property
    def folder(self) -> Path:
        return decided(self, self.number, self.round)

    def make(self, folder: Path) -> dict[str, Any]:
        from bessemer.corpus.dedup.repeat_kernels import GOES, UNDECIDED

        threshold = self.plan.settings.paragraphs.threshold
        step, prefix = BoundParagraphs.__name__, f"{self.round:03d}-"
        found = self.gather(step, range(self.num_ranges), "bounds", BOUNDS, prefix)
        found = found[np.argsort(found["line"], kind="stable")]
        starts, _ = runs(found["line"])
        lines = found["line"][starts]
        least, most = (
            np.add.reduceat(found[name], starts) if len(starts) else found[name] for name in ("least", "most")
        )
        counts = np.frombuffer(
            self.result(ParagraphItems.__name__, self.number, "counts").read_bytes(), dtype=np.uint32
        )
        limits = threshold * counts[lines]
        goes, undecided = (least > 0) & (least >= limits), most >= limits
        states = records(STATE, len(lines), line=lines, state=np.where(goes, GOES, UNDECIDED))
        states = states[goes | undecided]
        if self.round:
            before = load_array(decided(self, self.number, self.round - 1) / "states.npy")
            states = np.concatenate([before[before["state"] == GOES], states])
            states = states[np.argsort(states["line"])]
        np.save(folder / "states.npy", states)
        left = states["line"][states["state"] == UNDECIDED]
        with SplitWriter(folder / "repeated", self.plan.num_parts) as file:
            gone = np.ascontiguousarray(states["line"][states["state"] == GOES])
            file.write(np.full(len(gone), self.number, dtype=np.uint32), gone)
        return {"lines": len(left), "items": int(counts[left].sum())}


@dataclass(frozen=True)
class SettleLines(RepeatsTask):
    """Decide the lines that are left, in their order: those that go, by part. round: of the last `MissingBits`."""

    bloom: RangedFilter
    round: int

    def make(self, folder: Path) -> dict[str, Any]:
        from bessemer.corpus.dedup.repeat_kernels import settle_lines

        names = [f"{self.round:03d}-{number:06d}" for number in range(self.bloom.num_ranges)]
        left = read_split([self.work / MissingBits.__name__ / name / "open" for name in names], None, OPEN)
        left = left[np.argsort(left["line"], kind="stable")]
        blocks, places = np.unique(left["block"], return_inverse=True)
        words, repeated = np.zeros(len(blocks) * BLOCK_WORDS, np.uint64), np.empty(len(left), np.uint64)
        items, lines, missing = (np.ascontiguousarray(left[name]) for name in ("item", "line", "missing"))
        starts = places.astype(np.uint64) * np.uint64(BLOCK_WORDS)
        threshold = self.plan.settings.paragraphs.threshold
        number = settle_lines(items, lines, starts, missing, words, self.bloom.num_bits, threshold, repeated)
        gone = repeated[:number]
        write_split(folder / "repeated", self.plan.num_parts, part_of(gone), row_of(gone).astype(np.uint32))
        return {"repeated": number}


@dataclass(frozen=True)
class CollectParagraphs(RepeatsTask):
    """The numbers of a part's repeated lines, sorted, in LINES. round: the last of `DecideLines`; None where `JudgeParagraphs`
    decided in num_ranges ranges."""

    num_ranges: int
    round: int | None
    is_settled: bool  # `SettleLines` decided the rest

    def make(self, folder: Path) -> dict[str, Any]:
        repeated = self.gather(JudgeParagraphs.__name__, range(self.num_ranges), "repeated", np.uint32)
        if self.round is not None:
            paths = [decided(self, self.number, self.round) / "repeated"]
            paths += [self.result(SettleLines.__name__, 0, "repeated")] if self.is_settled else []
            repeated = read_split(paths, self.number, np.uint32)
        repeated.sort()
        np.save(folder / LINES, repeated)
        return {"lines": len(repeated)}


# --- The text


def cut_paragraphs(table: pa.Table, repeated: np.ndarray) -> tuple[pa.Table, list[Edit]]:
    """A part (column text) without the repeated lines and their line breaks, and the edits."""
    if not len(repeated):
        return table, []
    ends = np.cumsum(line_counts(table))
    texts, edits = table["text"].to_pylist(), []
    rows = np.searchsorted(ends, repeated, side="right")
    edited, firsts = np.unique(rows, return_index=True)
    for row, some in zip(edited.tolist(), np.split(repeated.astype(np.int64), firsts[1:]), strict=True):
        lines = texts[row].split("\n")
        marks = np.zeros(len(lines), dtype=bool)
        marks[some - (int(ends[row]) - len(lines))] = True
        removed = tuple(_spans(lines, marks.tolist()))
        texts[row] = without(texts[row], removed)
        edits.append(Edit(row, removed))
    return with_texts(table, texts), edits


def _folded_lines(texts: list[str]) -> list[str]:
    """Texts with case and the white space within lines folded; the lines stay."""
    return ["\n".join([" ".join(line.split()) for line in text.casefold().split("\n")]) for text in texts]


def _spans(lines: list[str], marks: list[bool]) -> Iterator[tuple[int, int]]:
    """Characters of the marked lines, joined where they follow each other, with the break after each; the last line of
    the text takes the break before it."""
    place, whole = 0, sum(map(len, lines)) + len(lines) - 1
    for marked, run in groupby(zip(marks, lines, strict=True), key=itemgetter(0)):
        after = place + sum(len(line) + 1 for _, line in run)
        if marked:
            yield (place if after <= whole else max(place - 1, 0)), min(after, whole)
        place = after
