"""Repeated paragraphs and spans over a whole corpus, found by tasks over parts and ranges; removed where a part is read.

Paragraphs come first, spans of what stays after. Parts follow each other in the order of the published corpus. Tasks hold one
part's text a few megabytes at a time, or one range of the filter or of keys, which fits into `max_memory_mib`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from bessemer.corpus.dedup import paragraphs, substrings
from bessemer.corpus.dedup.exchange import load_array
from bessemer.corpus.dedup.task import (
    RESULT,
    DedupPlan,
    DedupTask,
    DocumentPart,
    Perform,
    Receipts,
    TaskSearch,
    memory_bytes,
    perform_here,
)
from bessemer.corpus.dedup.verdicts import Edit, EditStatistics, ParquetPart
from bessemer.corpus.files import earlier_files
from bessemer.corpus.work import receipt
from bessemer.recipe import Dedup

MAX_ROUNDS = 1000  # of bounds; each decides a line at least, so that what takes more is a fault
READING = 40  # to hash the text of a document costs so many times what it costs to read its columns


def cuts_repeats(settings: Dedup) -> bool:
    """Whether the recipe removes repeated paragraphs or spans."""
    return settings.paragraphs.mode != "off" or settings.substrings.unit != "off"


@dataclass(frozen=True)
class RepeatVerdicts:
    """The result of a search: what to cut out of each part. first: number of the first part that is no earlier corpus's."""

    folder: Path
    first: int
    settings: Dedup

    def without_paragraphs(self, part: int, table: pa.Table) -> tuple[pa.Table, list[Edit]]:
        """The documents of a part that came to the search (column text), without repeated paragraphs, and the edits."""
        return paragraphs.cut_paragraphs(
            table, load_array(self._result(paragraphs.CollectParagraphs, part) / paragraphs.LINES)
        )

    def without_spans(self, part: int, table: pa.Table) -> tuple[pa.Table, list[Edit]]:
        """The documents of a part without repeated paragraphs, without repeated spans too, and the edits."""
        spans = load_array(self._result(substrings.CollectSpans, part) / substrings.SPANS)
        return substrings.cut_spans(table, spans, self.settings.substrings.unit)

    def __call__(self, part: int, table: pa.Table) -> tuple[pa.Table, set[int], dict[str, EditStatistics]]:
        """The documents of a part without what is repeated, the rows that lost something, and the counts of each kind."""
        counts: dict[str, EditStatistics] = {}
        passes = {
            "paragraphs": (self.settings.paragraphs.mode, self.without_paragraphs),
            "substrings": (self.settings.substrings.unit, self.without_spans),
        }
        edited = set[int]()
        for name, (mode, cut) in passes.items():
            if mode != "off":
                table, edits = cut(part, table)
                counts[name] = EditStatistics()
                counts[name].add(table, edits)
                edited.update(edit.row for edit in edits)
        return table, edited, counts

    def _result(self, step: type[DedupTask], part: int) -> Path:
        return self.folder / step.__name__ / f"{part + self.first:06d}"


def find_repeats(
    own: Sequence[DocumentPart], settings: Dedup, folder: Path, made_of: str, perform: Perform = perform_here,
    changed: Callable[[RepeatVerdicts], Sequence[DocumentPart]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Find what is repeated; the receipt of the search, with `first` (`RepeatVerdicts`).

    Parts: text, and of this corpus words and characters. `changed` gives them without repeated paragraphs. `folder` keeps the
    verdicts; finished tasks with the same digest `made_of` are not done again. `perform` does tasks and gives their receipts.
    """
    recorded = receipt(folder / RESULT, made_of)
    if recorded is not None:
        return recorded
    earlier = [ParquetPart(path, corpus) for corpus in settings.against for path in earlier_files(corpus)]
    parts = [*earlier, *own]
    sizes = [part.size for part in parts]
    search = _RepeatSearch(DedupPlan(settings, (), len(parts), sum(sizes), made_of), folder, parts, sizes, perform)
    search.first = len(earlier)
    words, characters = search.count()
    if settings.paragraphs.mode != "off":
        search.find_paragraphs(words)
    if settings.substrings.unit != "off":
        if changed is not None and settings.paragraphs.mode != "off":
            search.parts = [*earlier, *changed(RepeatVerdicts(folder, len(earlier), settings))]
        search.find_spans(words, characters)
    return search.end(
        {"first": len(earlier), "parts": len(parts)}, paragraphs.CollectParagraphs, substrings.CollectSpans
    )


class _RepeatSearch(TaskSearch):
    """first: number of the first part that is no earlier corpus's."""

    first = 0

    def count(self) -> tuple[int, int]:
        """Words of all parts, and characters of those of this corpus."""
        done = self.on_parts(paragraphs.CountText, reads=True)
        return sum(one["words"] for one in done), sum(one["characters"] for one in done)

    def find_paragraphs(self, num_words: int) -> None:
        """Find the repeated paragraphs."""
        settings = self.plan.settings.paragraphs
        if all(receipt(path, self.plan.made_of) for path in self._results(paragraphs.CollectParagraphs)):
            return
        bloom = paragraphs.RangedFilter.of(num_words, settings)
        self.on_parts(paragraphs.ParagraphItems, [READING * size for size in self.sizes], reads=True, bloom=bloom)
        round_, is_settled = None, False
        if bloom.num_ranges == 1 or settings.mode == "paragraph":
            self.on_ranges(paragraphs.JudgeParagraphs, bloom.num_ranges, bloom=bloom, num_earlier=self.first)
        else:
            round_, is_settled = self._bounds(bloom, memory_bytes(settings.max_memory_mib))
        num_ranges = bloom.num_ranges if round_ is None else 0
        self._own(paragraphs.CollectParagraphs, num_ranges=num_ranges, round=round_, is_settled=is_settled)
        self.keep(paragraphs.CountText, paragraphs.CollectParagraphs)

    def _bounds(self, bloom: paragraphs.RangedFilter, memory: int) -> tuple[int, bool]:
        """Decide by bounds until what is left fits into memory; the last round, and whether anything was left."""
        named: dict[str, Any] = {"bloom": bloom, "num_earlier": self.first}
        for round_ in range(MAX_ROUNDS):
            self.on_ranges(paragraphs.BoundParagraphs, bloom.num_ranges, round=round_, **named)
            done = self._own(paragraphs.DecideLines, num_ranges=bloom.num_ranges, round=round_)
            items = sum(one["items"] for one in done)
            if not items:
                return round_, False
            if items * paragraphs.SETTLE_BYTES <= memory:
                break
        self.on_ranges(paragraphs.MissingBits, bloom.num_ranges, round=round_ + 1, **named)
        self.on_ranges(paragraphs.SettleLines, 1, bloom=bloom, round=round_ + 1)
        return round_, True

    def find_spans(self, num_words: int, num_characters: int) -> None:
        """Find the repeated spans."""
        settings = self.plan.settings.substrings
        num_samples = substrings.num_sample_ranges(num_words, num_characters, settings)
        self._own(substrings.SpanSamples, cost=READING, reads=True, num_ranges=num_samples)
        done = self.on_ranges(substrings.RepeatedSamples, num_samples, first_part=self.first)
        num_windows = substrings.num_window_ranges(sum(one["repeated"] for one in done), settings)
        named = {"num_ranges": num_windows, "num_sample_ranges": num_samples}
        self._own(substrings.SpanWindows, cost=READING, reads=True, **named)
        self.on_ranges(substrings.RepeatedWindows, num_windows, first_part=self.first)
        self._own(substrings.CollectSpans, num_ranges=num_windows)

    def _results(self, step: type[DedupTask]) -> list[Path]:
        return [self.folder / step.__name__ / f"{number:06d}" for number in range(self.first, len(self.parts))]

    def _own(self, step: type[DedupTask], cost: int = 1, **more: Any) -> Receipts:
        """A task for each part of this corpus; cost: of a document."""
        return self.on_parts(step, [cost * size for size in self.sizes], first=self.first, **more)
