"""Compare pairs of documents that lie in two parts: what one has is sent to the part of the other.

    SendSignatures     the part of the first document: its signature to the part of the second
    CompareSignatures  the part of the second: pairs whose signatures agree well enough
    SendShingles       shingle sets of the documents in such pairs: of the second to the part of the first
    CompareShingles    the part of the first: edges, the pairs with the Jaccard similarity `min_jaccard`

A task holds what it compares of its own part, and reads that of the others part by part. Without `verify` the share of
equal signature values is the similarity, and no text is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path
from typing import TypeAlias

import numpy as np

from bessemer.corpus.dedup import task
from bessemer.corpus.dedup.keys import edges_of, num_hash_ranges, num_key_ranges, unique_pairs
from bessemer.corpus.dedup.signatures import equal_places, jaccards, longest, num_hashes, shingle_set, utf8
from bessemer.corpus.dedup.task import NEAR, SplitWriter, load_array, read_array, read_split, take_ragged, write_split
from bessemer.corpus.global_steps import AnyPart
from bessemer.run_tasks.task import check_stop
from bessemer.text.normalise import fold

CHUNK = 1 << 12  # signatures and texts that are read at one time
MAX_PAIRS = 1 << 22  # held before those that occur several times are dropped

# with verification, pairs whose estimate lies so many standard deviations below the threshold are not computed: a pair
# at the threshold is lost with 3 in 100,000 (normal law)
ESTIMATE_DEVIATIONS = 4.0
SET = np.dtype([("document", "<u8"), ("length", "<i8")])
# documents, where the shingle set of each begins (one more than documents), and the sets
Sets: TypeAlias = "tuple[np.ndarray, np.ndarray, np.ndarray]"


def min_equal_places(min_jaccard: float, num_hashes: int, to_verify: bool) -> int:
    """Places in which signatures have to agree: for the estimate itself, or so few that a pair may pass verification."""
    if to_verify:
        min_jaccard -= ESTIMATE_DEVIATIONS * sqrt(min_jaccard * (1 - min_jaccard) / num_hashes)
    return max(ceil(min_jaccard * num_hashes - 1e-9), 1)


@dataclass(frozen=True)
class CompareTask(task.DedupTask):
    """A step that compares pairs."""

    @property
    def signed(self) -> np.dtype:
        """A document with its signature, of which the low bytes are enough where the true similarity is computed too."""
        kind = np.uint8 if self.plan.settings.verify else np.uint32
        return np.dtype([("document", "<u8"), ("signature", kind, (num_hashes(self.plan.settings),))])

    def signatures_of(self, rows: np.ndarray) -> np.ndarray:
        """Signatures of rows of this part, which ascend."""
        kind, (width,) = self.signed["signature"].subdtype or (np.uint8, (0,))
        signed = np.empty((len(rows), width), dtype=kind)
        with (self.result("DocumentKeys", self.number) / "signatures").open("rb") as file:
            for start in range(0, len(rows), CHUNK):
                chosen = rows[start : start + CHUNK]
                file.seek(int(chosen[0]) * width * 4)
                block = read_array(file, np.uint32, int(chosen[-1] - chosen[0] + 1) * width)
                signed[start : start + CHUNK] = block.reshape(-1, width)[chosen - chosen[0]].astype(kind)
        return signed


@dataclass(frozen=True)
class SendSignatures(CompareTask):
    """Drop pairs that were found several times, and send them with the signatures of the first documents."""

    def make(self, folder: Path) -> dict[str, int]:
        plan = self.plan
        candidates = self.by_task("CandidatePairs", range(num_key_ranges(plan)), "pairs", task.PAIR)
        pairs = _once(some for _, some in candidates)
        to_part = task.part_of(pairs["second"])
        rows = task.row_of(pairs["first"])
        at = load_array(self.result("DocumentKeys", self.number) / "order.npy")
        sent = task.is_new(pairs["first"], to_part)  # of a document once to each part
        edges = edges_of(pairs["first"], pairs["second"], NEAR, 0.0, at[rows], np.zeros(len(rows), task.ORDER))
        write_split(folder / "pairs", plan.num_parts, to_part, edges)
        rows, to_part = rows[sent], to_part[sent]
        with SplitWriter(folder / "signatures", plan.num_parts) as file:
            for start in range(0, len(rows), CHUNK):
                chosen = rows[start : start + CHUNK]
                document = chosen.astype(np.uint64) + (np.uint64(self.number) << task.PART_BITS)
                signed = task.records(self.signed, len(chosen), document=document, signature=self.signatures_of(chosen))
                file.write(to_part[start : start + CHUNK], signed)
                check_stop()
        return {}


def _once(parts: Iterator[np.ndarray]) -> np.ndarray:
    """Pairs without those that occur again, sorted."""
    waiting, num_waiting = [np.empty(0, task.PAIR)], 0
    for part in parts:
        waiting.append(part)
        num_waiting += len(part)
        if num_waiting > max(MAX_PAIRS, len(waiting[0])):
            pairs = np.concatenate(waiting)
            waiting, num_waiting = [unique_pairs(pairs["first"], pairs["second"])], 0
    pairs = np.concatenate(waiting)
    return unique_pairs(pairs["first"], pairs["second"])


@dataclass(frozen=True)
class CompareSignatures(CompareTask):
    """Pairs whose signatures agree in `min_equal_places`, with the share of equal values, by the part of the first."""

    def make(self, folder: Path) -> dict[str, int]:
        settings = self.plan.settings
        width = num_hashes(settings)
        least = min_equal_places(settings.min_jaccard, width, settings.verify)
        at, num_edges = load_array(self.result("DocumentKeys", self.number) / "order.npy"), 0
        before, numbers = SendSignatures.__name__, range(self.plan.num_parts)
        rows = np.unique(task.row_of(self.gather(before, numbers, "pairs", task.EDGE)["second"]))
        own = self.signatures_of(rows)
        with SplitWriter(folder / "edges", self.plan.num_parts) as file:
            pairs = self.by_task(before, numbers, "pairs", task.EDGE)
            sent = self.by_task(before, numbers, "signatures", self.signed)
            for (number, edges), (_, other) in zip(pairs, sent, strict=True):
                mine, theirs = task.row_of(edges["second"]), np.searchsorted(other["document"], edges["first"])
                places = np.empty(len(edges), dtype=np.int32)
                equal_places(other["signature"], theirs, own, np.searchsorted(rows, mine), places)
                for key, _ in task.ORDER:
                    edges[f"second_{key}"] = at[key][mine]
                edges["similarity"] = places / np.float32(width)
                edges = edges[places >= least]
                file.write(np.full(len(edges), number), edges)
                num_edges += len(edges)
                check_stop()
        return {"edges": num_edges}


@dataclass(frozen=True)
class SendShingles(CompareTask):
    """Shingle sets of the documents of a part that are in a pair: of the first of it for this part, of the second for
    the part of the first."""

    part: AnyPart

    def make(self, folder: Path) -> dict[str, int]:
        here = np.unique(
            self.gather(CompareSignatures.__name__, range(self.plan.num_parts), "edges", task.EDGE)["first"]
        )
        there = read_split([self.result(CompareSignatures.__name__, self.number) / "edges"], None, task.EDGE)
        rows = np.concatenate([task.row_of(here), task.row_of(there["second"])])
        to_part = np.concatenate([task.part_of(here), task.part_of(there["first"])]).astype(np.int64)
        by_row = np.lexsort((to_part, rows))
        by_row = by_row[task.is_new(rows[by_row], to_part[by_row])]
        rows, to_part, first = rows[by_row], to_part[by_row], 0
        with (
            SplitWriter(folder / "documents", self.plan.num_parts) as documents,
            SplitWriter(folder / "shingles", self.plan.num_parts) as shingles,
        ):
            for table in self.part(["text"]) if len(rows) else ():
                start, end = np.searchsorted(rows, (first, first + table.num_rows)).tolist()
                wanted = np.unique(rows[start:end])
                for place in range(0, len(wanted), CHUNK):
                    chosen = wanted[place : place + CHUNK]
                    values, lengths = self._sets(table["text"].take(chosen - first).to_pylist())
                    start, end = np.searchsorted(rows, (chosen[0], chosen[-1] + 1)).tolist()
                    which = np.searchsorted(chosen, rows[start:end])
                    document = rows[start:end].astype(np.uint64) + (np.uint64(self.number) << task.PART_BITS)
                    sets = task.records(SET, end - start, document=document, length=lengths[which])
                    documents.write(to_part[start:end], sets)
                    shingles.write(to_part[start:end], take_ragged(values, lengths, which), sets["length"])
                    check_stop()
                first += table.num_rows
        return {}

    def _sets(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The shingle sets of texts one behind the other, and their lengths."""
        data, offsets = utf8([fold(text) for text in texts])
        buffer = np.empty(longest(offsets), dtype=np.uint64)
        sets = [
            shingle_set(data[start:end], self.plan.settings, buffer)
            for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ]
        return np.concatenate(sets), np.array([*map(len, sets)])


@dataclass(frozen=True)
class CompareShingles(CompareTask):
    """Edges of a part, spread over `num_groups`: pairs with the Jaccard `min_jaccard`, and those of equal texts."""

    num_groups: int

    def make(self, folder: Path) -> dict[str, int]:
        plan, near = self.plan, self.plan.settings.minhash
        numbers = range(plan.num_parts if near else 0)
        is_verified = near and plan.settings.verify
        own = self._sets(self.number) if is_verified else None
        with SplitWriter(folder / "edges", self.num_groups) as file:
            for number, edges in self.by_task(CompareSignatures.__name__, numbers, "edges", task.EDGE):
                if own is not None:
                    edges = self._verified(edges, own, self._sets(number))
                self._write(file, edges)
                check_stop()
            self._write(file, self.gather("EqualTexts", range(num_hash_ranges(plan)), "edges", task.EDGE))
        return {}

    def _write(self, file: SplitWriter, edges: np.ndarray) -> None:
        file.write(task.spread(np.maximum(edges["first"], edges["second"]), file.num_targets), edges)

    def _sets(self, number: int) -> Sets:
        """The shingle sets that a part sent to this one."""
        step, sender = SendShingles.__name__, range(number, number + 1)
        sets = self.gather(step, sender, "documents", SET)
        starts = np.append(0, np.cumsum(sets["length"]))
        return sets["document"], starts, self.gather(step, sender, "shingles", "<u8")

    def _verified(self, edges: np.ndarray, own: Sets, other: Sets) -> np.ndarray:
        """The edges with their true similarity, those from `min_jaccard` on."""
        similarity = np.empty(len(edges))
        (mine, starts, values), (theirs, their_starts, their_values) = own, other
        left, right = np.searchsorted(mine, edges["first"]), np.searchsorted(theirs, edges["second"])
        jaccards(values, starts, left, their_values, their_starts, right, similarity)
        edges["similarity"] = similarity
        return edges[similarity >= self.plan.settings.min_jaccard]
