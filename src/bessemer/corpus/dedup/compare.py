"""Comparison of candidate pairs whose documents are in two parts.

    SendSets     one task per part: sends the shingle sets of its documents in pairs to the part of the pair's first document
    CompareSets  one task per part: writes the pairs with a Jaccard similarity of at least `min_jaccard` as edges

A task holds the sets of one part and reads those of the other parts in turn. Without `verify` it compares signatures
instead of shingle sets. The share of equal values is then the similarity, and no text is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from bessemer.corpus.dedup import task
from bessemer.corpus.dedup.keys import num_hash_ranges, num_key_ranges, unique_pairs
from bessemer.corpus.dedup.signatures import num_hashes, shingle_sets, similarities
from bessemer.corpus.dedup.task import NEAR, SplitWriter, load_array, read_array, take_ragged
from bessemer.corpus.global_steps import AnyPart
from bessemer.run_tasks.task import check_stop

CHUNK = 1 << 12  # signatures or texts read at a time
MAX_PAIRS = 1 << 22  # pairs held in memory before repeated ones are dropped
SET = np.dtype([("document", task.DOCUMENT), ("length", "<i8")])
# (documents, start of each document's set and end of the last, concatenated sets)
Sets: TypeAlias = "tuple[np.ndarray, np.ndarray, np.ndarray]"


@dataclass(frozen=True)
class PairTask(task.DedupTask):
    """Base class for the tasks that compare candidate pairs of documents, one task per part of the corpus."""

    def pairs(self, end: str) -> np.ndarray:
        """Return the candidate pairs whose "first" or "second" document, as `end` says, is in this part.

        The pairs are sorted, distinct records of PAIR, which hold two document numbers.
        """
        waiting, num_waiting = [np.empty(0, task.PAIR)], 0
        for number in range(num_key_ranges(self.plan)):
            part = self.gather("CandidatePairs", range(number, number + 1), end, task.PAIR)
            waiting.append(part)
            num_waiting += len(part)
            if num_waiting > max(MAX_PAIRS, len(waiting[0])):
                pairs = np.concatenate(waiting)
                waiting, num_waiting = [unique_pairs(pairs["first"], pairs["second"])], 0
        pairs = np.concatenate(waiting)
        return unique_pairs(pairs["first"], pairs["second"])


@dataclass(frozen=True)
class SendSets(PairTask):
    """A task that writes the shingle sets of those documents of one part of the corpus that are in candidate pairs.

    `CompareSets` compares a pair in the part that has the pair's first document. Both sets of a pair are therefore
    written for that part. Without `corpus.dedup.verify`, MinHash signatures are written instead of sets.
    """

    part: AnyPart

    def make(self, folder: Path) -> dict[str, int]:
        here, there = self.pairs("first"), self.pairs("second")
        rows = task.row_of(np.concatenate([here["first"], there["second"]]))
        to_part = task.part_of(np.concatenate([here["first"], there["first"]]))
        by_row = np.lexsort((to_part, rows))
        by_row = by_row[task.is_new(rows[by_row], to_part[by_row])]
        rows, to_part = rows[by_row], to_part[by_row]
        every = load_array(self.result("DocumentKeys", self.number) / "documents.npy")
        with (
            SplitWriter(folder / "documents", self.plan.num_parts) as documents,
            SplitWriter(folder / "sets", self.plan.num_parts) as sets,
        ):
            for chosen, values, lengths in self._sets(np.unique(rows)):
                some = slice(*np.searchsorted(rows, (chosen[0], chosen[-1] + 1)))
                which = np.searchsorted(chosen, rows[some])
                sent = task.records(SET, len(which), document=every[rows[some]], length=lengths[which])
                documents.write(to_part[some], sent)
                sets.write(to_part[some], take_ragged(values, lengths, which), sent["length"])
                check_stop()
        return {}

    def _sets(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (rows, hashes, lengths) for consecutive chunks of `rows`, ascending row numbers of documents in this part.

        `hashes` has the shingle hashes of the chunk's documents, concatenated, and `lengths` the number of hashes of
        each document. Without `verify`, the values of MinHash signatures take the place of shingle hashes.
        """
        if not self.plan.settings.verify:
            yield from self._signatures(rows)
            return
        first = 0
        for table in self.part(["text"]) if len(rows) else ():
            in_table = rows[slice(*np.searchsorted(rows, (first, first + table.num_rows)))]
            for start in range(0, len(in_table), CHUNK):
                chosen = in_table[start : start + CHUNK]
                yield chosen, *shingle_sets(table["text"].take(chosen - first).to_pylist(), self.plan.settings)
            first += table.num_rows

    def _signatures(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (rows, values, lengths) like `_sets`, with the stored MinHash signatures of the documents."""
        width = num_hashes(self.plan.settings)
        with (self.result("DocumentKeys", self.number) / "signatures").open("rb") as file:
            for start in range(0, len(rows), CHUNK):
                chosen = rows[start : start + CHUNK]
                file.seek(int(chosen[0]) * width * 4)
                block = read_array(file, np.uint32, int(chosen[-1] - chosen[0] + 1) * width).reshape(-1, width)
                yield chosen, block[chosen - chosen[0]].reshape(-1), np.full(len(chosen), width)


@dataclass(frozen=True)
class CompareSets(PairTask):
    """A task that compares the candidate pairs of one part of the corpus and writes an EDGE record per near duplicate.

    It also copies the edges between equal texts. The output distributes edges over as many ranges as there are parts,
    by a hash of the edge's larger document number.
    """

    def make(self, folder: Path) -> dict[str, int]:
        num_edges = 0
        with SplitWriter(folder / "edges", self.plan.num_parts) as file:
            for edges in self._edges():
                file.write(task.spread(task.larger(edges), self.plan.num_parts), edges)
                num_edges += len(edges)
                check_stop()
        return {"edges": num_edges}

    def _edges(self) -> Iterator[np.ndarray]:
        yield self.gather("EqualTexts", range(num_hash_ranges(self.plan)), "edges", task.EDGE)
        if not len(pairs := self.pairs("first")):
            return
        to_part, own = task.part_of(pairs["second"]), self._sets(self.number)
        pairs = pairs[np.argsort(to_part, kind="stable")]
        starts, _ = task.runs(np.sort(to_part))
        for some in np.split(pairs, starts[1:]):
            yield self._compared(some, own, self._sets(int(task.part_of(some["second"][0]))))

    def _sets(self, number: int) -> Sets:
        """Return (documents, starts, hashes) that the `SendSets` task of part `number` wrote for this part.

        The set of documents[i] is hashes[starts[i]:starts[i + 1]]. `documents` are records of SET.
        """
        sender, kind = range(number, number + 1), "<u8" if self.plan.settings.verify else "<u4"
        sets = self.gather(SendSets.__name__, sender, "documents", SET)
        starts = np.append(0, np.cumsum(sets["length"]))
        return sets["document"], starts, self.gather(SendSets.__name__, sender, "sets", kind)

    def _compared(self, pairs: np.ndarray, own: Sets, other: Sets) -> np.ndarray:
        """Return an EDGE record for each pair with a similarity of at least `min_jaccard`.

        `own` has the shingle sets of the pairs' first documents, and `other` those of the second ones, both in the form
        that `_sets` returns.
        """
        settings, similarity = self.plan.settings, np.empty(len(pairs))
        (mine, starts, values), (theirs, their_starts, their_values) = own, other
        left = np.searchsorted(mine["number"], pairs["first"])
        right = np.searchsorted(theirs["number"], pairs["second"])
        similarities(settings.verify, values, starts, left, their_values, their_starts, right, similarity)
        edges = task.records(
            task.EDGE, len(pairs), first=mine[left], second=theirs[right], kind=NEAR, similarity=similarity
        )
        return edges[similarity >= settings.min_jaccard]
