"""Removal of repeated lines across the whole corpus. The first occurrence stays.

Lines are equal if the 128-bit hashes of their folded texts are.

    LineKeys       one task per part: hashes of its lines, by range
    RepeatedLines  one task per range of hashes: numbers of the lines whose hash occurs earlier, by part
    JudgeLines     one task per part: cuts out the repeated lines

Parts are in the order of the published corpus, followed by those of earlier corpora, whose lines count as occurring first.
The number of a line is its part times 2^32 plus its index among the lines of the part. There are as many ranges as parts, so
that a range takes no more memory than a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bessemer.common.hashing import digest
from bessemer.corpus.dedup import task
from bessemer.corpus.dedup.keys import repeated_by
from bessemer.corpus.global_steps import CUT, AnyPart, CorpusDocuments, GlobalStep, VerdictTask
from bessemer.corpus.readers.base import File, format_of
from bessemer.corpus.verdicts import Spans, make_verdicts, without
from bessemer.recipe import Corpus, Dedup
from bessemer.run.files import stage_facts
from bessemer.run_tasks.task import check_stop
from bessemer.text.normalise import text_digest

KEY = np.dtype([("high", "<u8"), ("low", "<u8"), ("line", "<u8")])
TEXTS = 1024  # texts whose lines are hashed at a time
REPEATED = "repeated"


@dataclass(frozen=True)
class LineKeys(task.DedupTask):
    """A task that writes the hash and number of each line with at least `line_words` words in one part of the corpus.

    The output is records of KEY, divided by range of hashes.
    """

    part: AnyPart

    def make(self, folder: Path) -> dict[str, Any]:
        first, tables = self.number << 32, list[int]()
        with task.SplitWriter(folder / "keys", self.plan.num_parts) as file:
            for table in self.part(["text"]):
                tables.append(table.num_rows)
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
        return {"tables": tables}


@dataclass(frozen=True)
class RepeatedLines(task.DedupTask):
    """A task that writes the numbers of the lines of this corpus whose hash, in one range of hashes, occurs earlier.

    Lines of earlier corpora count as occurring before all others. `num_own` is the number of parts of this corpus,
    which come before the parts of earlier corpora.
    """

    num_own: int  # number of parts of this corpus

    def make(self, folder: Path) -> dict[str, Any]:
        keys = repeated_by(self.gather(LineKeys.__name__, range(self.plan.num_parts), "keys", KEY), "high")
        is_own = task.part_of(keys["line"]) < self.num_own
        order = np.lexsort((keys["line"], is_own, keys["low"], keys["high"]))
        keys, is_own = keys[order], is_own[order]
        lines = keys["line"][~task.is_new(keys["high"], keys["low"]) & is_own]
        task.write_split(
            folder / REPEATED, self.plan.num_parts, task.part_of(lines), task.row_of(lines).astype(np.uint32)
        )
        return {}


@dataclass(frozen=True)
class JudgeLines(VerdictTask, task.DedupTask):
    """A task that cuts the repeated lines out of the documents in one part of the corpus.

    It rejects documents that are then shorter than the rules of `corpus` allow.
    """

    part: AnyPart
    corpus: Corpus

    def judge(self) -> Iterator[tuple[int, pa.Table]]:
        repeated = np.sort(self.gather(RepeatedLines.__name__, range(self.plan.num_parts), REPEATED, np.uint32))
        if not len(repeated):
            for num_rows in stage_facts(self.result(LineKeys.__name__, self.number))["tables"]:
                yield num_rows, make_verdicts([])
            return
        first = 0
        for table in self.part(["text", "source", "path"]):
            ends = first + np.cumsum(pc.count_substring(table["text"], "\n").to_numpy().astype(np.int64) + 1)
            end = int(ends[-1]) if len(ends) else first
            here = repeated[slice(*np.searchsorted(repeated, (first, end)))].astype(np.int64)
            yield table.num_rows, self._verdicts(table, ends, here)
            first = end
            check_stop()

    def _verdicts(self, table: pa.Table, ends: np.ndarray, repeated: np.ndarray) -> pa.Table:
        """Return a table of verdicts.SCHEMA that cuts the repeated lines out of the documents of `table`.

        Documents that become too short are rejected. `ends` has, for each document, the number of the line after its
        last one, and `repeated` the ascending numbers of the lines to cut.
        """
        rows, firsts = np.unique(np.searchsorted(ends, repeated, side="right"), return_index=True)
        sources = {source.name: source for source in self.corpus.sources}
        cut, reasons, details = list[Spans](), list[str | None](), list[str | None]()
        documents = table.take(rows).to_pylist()
        for document, end, some in zip(documents, ends[rows].tolist(), np.split(repeated, firsts[1:]), strict=False):
            lines = document["text"].split("\n")
            cut.append(_spans(lines, some - (end - len(lines))))
            left, source = len(without(document["text"], cut[-1]).strip()), sources.get(document.get("source", ""))
            path = document.get("path", "")
            format_ = format_of(source, File(path, path, 0, 0)) or ""
            is_short = left < (self.corpus.rules_of(source, format_).min_characters or 1)
            reasons.append("only_repeats" if is_short else None)
            details.append(f"{left} characters are left" if is_short else None)
        return make_verdicts(rows, spans=cut, reason=reasons, detail=details)


class LineStep(GlobalStep, Dedup):
    """Cut out lines that occur earlier in this corpus, or anywhere in a corpus of `corpus.dedup.against`."""

    name = "lines"
    action = "finding repeated lines"
    document_bytes = 200

    @property
    def is_on(self) -> bool:
        return self.lines

    def run(self, documents: CorpusDocuments, report: Path) -> dict[str, int]:
        """Cut repeated lines out of all documents, and return the counts of CUT for statistics.json.

        They are the numbers of edited documents, cut character ranges and removed characters. `report` is not used.
        """
        parts = [*documents.parts, *task.earlier_parts(self)]
        every = replace(documents, parts=parts, made_of=digest("lines 2", documents.made_of))
        plan = task.DedupPlan(self, (), len(every.parts), sum(every.sizes))
        every.on_parts(LineKeys, reads=True, plan=plan)
        every.on_ranges(RepeatedLines, len(every.parts), plan=plan, num_own=len(documents.parts))
        judged = documents.on_parts(JudgeLines, reads=True, plan=plan, corpus=documents.corpus)
        return {name: sum(one["cut"][name] for one in judged) for name in CUT}


def _spans(lines: list[str], numbers: np.ndarray) -> Spans:
    """Return the character ranges [start, end) whose removal deletes the lines with indices `numbers` from a text.

    `lines` are all lines of the text. Adjacent lines form one range. It includes the line break after its lines, or the
    one before them at the end of the text.
    """
    starts = np.append(0, np.cumsum([len(line) + 1 for line in lines])).tolist()
    whole, runs = starts[-1] - 1, np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    spans = ((starts[run[0]], starts[run[-1] + 1]) for run in runs)
    return [(max(start - (end > whole), 0), min(end, whole)) for start, end in spans]
