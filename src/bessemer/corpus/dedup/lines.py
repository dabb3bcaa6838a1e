"""Repeated lines over a whole corpus, known by the 128-bit hash of their folded text; the first occurrence stays.

    LineKeys       a part: hashes of its lines, by range
    RepeatedLines  a range of hashes: numbers of the lines whose hash occurs earlier, by part

Parts are in the order of the published corpus, after those of earlier ones. A line's number is its part times 2^32, plus its
place among the lines of the part. There are as many ranges as parts, so that a range takes no more memory than a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bessemer.corpus.dedup import task
from bessemer.corpus.dedup.exchange import SplitWriter, read_split, write_split
from bessemer.corpus.dedup.keys import repeated_by
from bessemer.corpus.dedup.verdicts import ParquetPart, with_texts, without
from bessemer.corpus.readers.files import earlier_files
from bessemer.recipe import Dedup
from bessemer.run_tasks.engine import check_stop
from bessemer.run_tasks.task import receipt
from bessemer.storage.filesystem import AnyPath
from bessemer.text.normalise import text_digest

KEY = np.dtype([("high", "<u8"), ("low", "<u8"), ("line", "<u8")])
TEXTS = 1024  # whose lines are hashed at one time
REPEATED = "repeated"
Spans: TypeAlias = "list[tuple[int, int]]"  # characters [start, end) of a text, ascending


class LineTask(task.DedupTask):
    """A part or range in one step of the search for repeated lines."""

    search = "lines"


@dataclass(frozen=True)
class LineKeys(LineTask):
    """Write the hashes of the lines of at least `line_words` words, by range."""

    part: task.DocumentPart

    def make(self, folder: Path) -> dict[str, Any]:
        first = self.number << int(task.PART_BITS)
        with SplitWriter(folder / "keys", self.plan.num_parts) as file:
            for table in self.part(["text"]):
                for batch in table.to_batches(max_chunksize=TEXTS):
                    digests, lines = list[bytes](), list[int]()
                    for text in batch["text"].to_pylist():
                        folded = text.casefold().split("\n")
                        for number, line in enumerate(folded, first):
                            words = line.split()
                            if len(words) >= self.plan.settings.line_words:
                                digests.append(text_digest(" ".join(words)))
                                lines.append(number)
                        first += len(folded)
                    halves = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)
                    keys = task.records(KEY, len(lines), high=halves[:, 0], low=halves[:, 1], line=lines)
                    file.write(task.range_of(keys["high"], self.plan.num_parts), keys)
                    check_stop()
        return {}


@dataclass(frozen=True)
class RepeatedLines(LineTask):
    """Find the lines of a range that go; those of earlier corpora stay."""

    num_earlier: int  # parts of earlier corpora

    is_durable = True  # the result stays when the search has ended

    def make(self, folder: Path) -> dict[str, Any]:
        keys = repeated_by(self.gather(LineKeys.__name__, range(self.plan.num_parts), "keys", KEY), "high")
        keys = keys[np.lexsort((keys["line"], keys["low"], keys["high"]))]
        lines = keys["line"][~task.is_new(keys["high"], keys["low"])]
        lines = lines[task.part_of(lines) >= self.num_earlier]
        write_split(folder / REPEATED, self.plan.num_parts, task.part_of(lines), task.row_of(lines).astype(np.uint32))
        return {}


@dataclass(frozen=True)
class LineVerdicts:
    """The repeated lines of each part of this corpus, by the receipt of a finished search."""

    folder: AnyPath
    num_parts: int
    num_earlier: int

    def __call__(self, part: int, table: pa.Table) -> tuple[pa.Table, dict[int, Spans]]:
        """Return the documents of a part (column text) without the repeated lines, and what was cut, by row."""
        folders = (self.folder / RepeatedLines.__name__ / f"{number:06d}" for number in range(self.num_parts))
        repeated = read_split((folder / REPEATED for folder in folders), part + self.num_earlier, np.uint32)
        return cut_lines(table, np.sort(repeated))


def find_lines(
    own: Sequence[task.DocumentPart],
    settings: Dedup,
    folder: AnyPath,
    made_of: str,
    perform: task.Perform = task.perform_here,
) -> dict[str, Any]:
    """Find the repeated lines; returns the receipt of the search, with the arguments of `LineVerdicts`.

    Finished tasks with the same digest `made_of` are not done again. `perform` does tasks and gives their receipts.
    """
    recorded = receipt(folder / task.RESULT, made_of)
    if recorded is not None:
        return recorded
    earlier = [ParquetPart(path, corpus) for corpus in settings.against for path in earlier_files(corpus)]
    parts = [*earlier, *own]
    sizes = [part.size for part in parts]
    search = task.TaskSearch(
        task.DedupPlan(settings, (), len(parts), sum(sizes), made_of), folder, parts, sizes, perform
    )
    search.on_parts(LineKeys, reads=True)
    search.on_ranges(RepeatedLines, len(parts), num_earlier=len(earlier))
    return search.end({"parts": len(parts), "earlier": len(earlier)}, RepeatedLines)


def cut_lines(table: pa.Table, repeated: np.ndarray) -> tuple[pa.Table, dict[int, Spans]]:
    """Return a part (column text) without the lines of these sorted numbers and their line breaks, and what was cut, by row."""
    if not len(repeated):
        return table, {}
    ends = np.cumsum(pc.count_substring(table["text"], "\n").to_numpy().astype(np.int64) + 1)
    texts, edits = table["text"].to_pylist(), dict[int, Spans]()
    rows = np.searchsorted(ends, repeated, side="right")
    edited, firsts = np.unique(rows, return_index=True)
    for row, some in zip(edited.tolist(), np.split(repeated.astype(np.int64), firsts[1:]), strict=True):
        lines = texts[row].split("\n")
        marks = np.zeros(len(lines), dtype=bool)
        marks[some - (int(ends[row]) - len(lines))] = True
        edits[row] = list(_spans(lines, marks.tolist()))
        texts[row] = without(texts[row], edits[row])
    return with_texts(table, texts), edits


def _spans(lines: list[str], marks: list[bool]) -> Iterator[tuple[int, int]]:
    """Characters of the marked lines, joined where they follow each other, with the break after each; the last line of
    the text takes the break before it."""
    place, whole = 0, sum(map(len, lines)) + len(lines) - 1
    for marked, run in groupby(zip(marks, lines, strict=True), key=itemgetter(0)):
        after = place + sum(len(line) + 1 for _, line in run)
        if marked:
            yield (place if after <= whole else max(place - 1, 0)), min(after, whole)
        place = after
