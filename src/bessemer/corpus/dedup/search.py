"""The search for duplicates: exact copies, then near ones by MinHash and LSH, as tasks over parts and ranges of keys.

Exact: equal text after folding case and white space. Near: MinHash with locality-sensitive hashing (Broder 1997, with
FineWeb's parameters). Documents that agree in a whole band share a bucket, where each is compared with its neighbours
(`keys.REACH`) by their signatures and, with `verify`, by the Jaccard similarity of their shingles. A document goes when
it is similar to one that stays, by the rule `keep`.
Independent of the order of documents and of how the work is cut. Memory and disk: docs/how-to/deduplicate.md.

The tasks of keys.py and compare.py find edges between like documents. From these to what stays, and its name for the
documents that go:

    LinkNeighbours  a range of documents: one round of large-star small-star (Kiveris et al. 2014), from edges to a
                    star around the smallest number of each connected component
    GroupEdges      a range of documents: edges by their component
    ChooseKeepers   a group of components: which documents go, and what stays in their place
    NameKeepers     a part: identity and path of its documents that stay in place of others; counts
    JudgeDuplicates a part: the verdicts on its documents

The first two only where the edges of the corpus do not fit into one task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bessemer.corpus.dedup import keys, task
from bessemer.corpus.dedup.compare import CompareShingles, CompareSignatures, SendShingles, SendSignatures
from bessemer.corpus.dedup.signatures import first_neighbours, utf8
from bessemer.corpus.dedup.task import (
    EXACT,
    NEAR,
    DedupPlan,
    SignedStep,
    earlier_parts,
    identity_of,
    packed,
    take_ragged,
    write_split,
)
from bessemer.corpus.global_steps import AnyPart, CorpusDocuments, Receipts, VerdictTask
from bessemer.corpus.verdicts import make_verdicts
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import read_receipt

SET_COST = 4  # what a shingle set costs, in documents whose columns are read
EDGES = CompareShingles.__name__  # the step that wrote the edges
VERDICTS, PATHS = "verdicts", "paths"  # files of NameKeepers, cut by part: VERDICT and UTF-8
VERDICT = [("row", "<u4"), ("kind", "u1"), ("similarity", "<f4"), ("keeper", "S16"), ("path_bytes", "<i8")]
HISTOGRAM_BINS = 40  # of the Jaccard: 0.025 each, so that the usual thresholds lie between two
GROUP_BYTES = 6 * task.EDGE.itemsize  # memory for an edge while its group is decided


def half_round(number: int) -> str:
    """Name of a step of `LinkNeighbours`."""
    return f"LinkNeighbours-{number:03d}"


@dataclass(frozen=True)
class LinkNeighbours(task.DedupTask):
    """Half a round over links between documents. Odd ones (small-star): links to smaller numbers come by the larger;
    all of them, and the document, go to the smallest; written for both ends. Even ones (large-star): links come by both
    ends; the larger numbers go to the smallest of all; written for the larger. `changed` is 0 in both halves when each
    component is a star."""

    half: int
    num_groups: int

    @property
    def folder(self) -> AnyPath:
        return self.work / half_round(self.half) / f"{self.number:06d}"

    def make(self, folder: Path) -> dict[str, int]:
        if self.half == 1:
            links = self.gather(EDGES, range(self.plan.num_parts), "edges", task.EDGE)
            ends = np.maximum(links["first"], links["second"]), np.minimum(links["first"], links["second"])
        else:
            links = self.gather(half_round(self.half - 1), range(self.num_groups), "links", task.PAIR)
            ends = links["first"], links["second"]
        links = keys.unique_pairs(*ends)
        starts, sizes = task.runs(links["first"])
        smallest = np.repeat(links["second"][starts], sizes)
        if is_small := self.half % 2 == 1:
            changed = int((sizes > 1).sum())
            child, root = np.append(links["second"], links["first"][starts]), np.append(smallest, smallest[starts])
        else:
            smallest = np.minimum(smallest, links["first"])
            is_larger = links["second"] > links["first"]
            child, root = links["second"][is_larger], smallest[is_larger]
            changed = int((root != links["first"][is_larger]).sum())
        is_link = child != root
        links = keys.unique_pairs(child[is_link], root[is_link])
        if is_small:
            links = np.concatenate([links, keys.unique_pairs(links["second"], links["first"])])
        write_split(folder / "links", self.num_groups, task.spread(links["first"], self.num_groups), links)
        return {"changed": changed}


@dataclass(frozen=True)
class GroupEdges(task.DedupTask):
    """Edges of a range of documents by the root of their component, which so many half rounds found."""

    halves: int
    num_groups: int

    def make(self, folder: Path) -> dict[str, int]:
        links = self.gather(half_round(self.halves), range(self.num_groups), "links", task.PAIR)
        links = links[np.argsort(links["first"])]
        edges = self.gather(EDGES, range(self.plan.num_parts), "edges", task.EDGE)
        larger = np.maximum(edges["first"], edges["second"])  # the root of a component is never the larger one
        roots = links["second"][np.searchsorted(links["first"], larger)]
        write_split(folder / "edges", self.num_groups, task.spread(roots, self.num_groups), edges)
        return {}


@dataclass(frozen=True)
class ChooseKeepers(task.DedupTask):
    """What stays in place of each document that goes: `verdicts` by the part of what stays (EDGE: first stays, second
    goes). In the order of `keep` a document stays unless it is similar to one that stays already."""

    num_groups: int

    def make(self, folder: Path) -> dict[str, Any]:
        step, count = (EDGES, self.plan.num_parts) if self.num_groups == 1 else ("GroupEdges", self.num_groups)
        edges = self.gather(step, range(count), "edges", task.EDGE)
        named = np.concatenate([edges["first"], edges["second"]])
        numbers, where, inverse = np.unique(named, return_index=True, return_inverse=True)
        at = task.records(task.ORDER, len(numbers))
        for key, _ in task.ORDER:
            at[key] = np.concatenate([edges[f"first_{key}"], edges[f"second_{key}"]])[where]
        by_order = np.lexsort((numbers, at["tie"], at["order"]))
        numbers, at = numbers[by_order], at[by_order]
        place = np.empty_like(by_order)
        place[by_order] = np.arange(len(by_order))
        ends = place[inverse.reshape(2, -1)]
        left, right = ends.min(axis=0), ends.max(axis=0)
        is_copy, can_go = edges["kind"] == EXACT, ~task.is_earlier(at["order"])
        near = np.flatnonzero(~is_copy)
        near = near[np.lexsort((left[near], right[near]))]
        edge_of = np.full(len(numbers), -1)
        first_neighbours(left[near], right[near], can_go, edge_of)
        goes = np.flatnonzero(edge_of >= 0)
        edge, keeper = near[edge_of[goes]], np.arange(len(numbers))
        keeper[goes] = left[edge]
        kept, copies = ends[:, is_copy & can_go[ends[1]]]  # by the order without the length
        keeper[copies] = keeper[kept]
        gone = np.concatenate([goes, copies])
        kind = np.repeat([NEAR, EXACT], [len(goes), len(copies)])
        similarity = np.append(edges["similarity"][edge], np.ones(len(copies)))
        first, second = keeper[gone], gone
        verdicts = keys.edges_of(numbers[first], numbers[second], kind, similarity, at[first], at[second])
        write_split(folder / "verdicts", self.plan.num_parts, task.part_of(verdicts["first"]), verdicts)
        return {}


@dataclass(frozen=True)
class NameKeepers(task.DedupTask):
    """Documents that go, with identity and path of what stays, by the part of the documents; the counts are for
    statistics.json."""

    part: AnyPart
    num_groups: int

    def make(self, folder: Path) -> dict[str, Any]:
        plan = self.plan
        found = self.gather("ChooseKeepers", range(self.num_groups), "verdicts", task.EDGE)
        found = found[np.lexsort((found["second"], found["first"]))]
        rows, which = np.unique(task.row_of(found["first"]), return_inverse=True)
        identities, paths, lengths = self._names(rows)
        verdicts = task.records(VERDICT, len(found), row=task.row_of(found["second"]), keeper=identities[which])
        verdicts["kind"], verdicts["similarity"] = found["kind"], found["similarity"]
        verdicts["path_bytes"] = lengths[which]
        to_part = task.part_of(found["second"])
        write_split(folder / VERDICTS, plan.num_parts, to_part, verdicts)
        write_split(folder / PATHS, plan.num_parts, to_part, take_ragged(paths, lengths, which), lengths[which])
        return self._counts(found)

    def _names(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Identities of rows of this part; their paths (UTF-8, one behind the other) and the lengths of these."""
        identities, paths, first = list[str](), list[str](), 0
        before = f"{self.part.corpus}: " if self.part.corpus else ""
        for table in self.part(["identity", "path"]) if len(rows) else ():
            start, end = np.searchsorted(rows, (first, first + table.num_rows)).tolist()
            chosen = table.take(rows[start:end] - first)
            first += table.num_rows
            identities += chosen["identity"].to_pylist()
            names = chosen["path"].to_pylist() if "path" in table.column_names else [""] * chosen.num_rows
            paths += [before + name for name in names]
        values, offsets = utf8(paths)
        return packed(identities), values, np.diff(offsets)

    def _counts(self, found: np.ndarray) -> dict[str, Any]:
        """Counts of the documents that go for one of this part."""
        is_near = found["kind"] == NEAR
        similarity = found["similarity"][is_near]
        bins = np.minimum((similarity * HISTOGRAM_BINS + 1e-6).astype(np.int64), HISTOGRAM_BINS - 1)
        _, sizes = task.runs(found["first"])
        return {
            "clusters": sorted(Counter((sizes + 1).tolist()).items()),
            "jaccard": np.bincount(bins, minlength=HISTOGRAM_BINS).tolist(),
        }


@dataclass(frozen=True)
class JudgeDuplicates(VerdictTask, task.DedupTask):
    """Verdicts on the documents of a part."""

    is_durable = True

    def judge(self) -> Iterator[tuple[int, pa.Table]]:
        numbers, first = range(self.plan.num_parts), 0
        found = self.gather("NameKeepers", numbers, VERDICTS, VERDICT)
        text = self.gather("NameKeepers", numbers, PATHS, np.uint8).tobytes()
        ends = np.cumsum(found["path_bytes"]).tolist()
        made, details = "verified" if self.plan.settings.verify else "estimated", list[str]()
        for (_, kind, similarity, keeper, num_bytes), end in zip(found.tolist(), ends, strict=True):
            detail = f"kept instead: {identity_of(keeper)} {text[end - num_bytes : end].decode()}"
            details.append(detail + (f" ({made} Jaccard {similarity:.2f})" if kind == NEAR else ""))
        reasons = np.where(found["kind"] == NEAR, "near_duplicate", "exact_duplicate")
        every = make_verdicts(found["row"], reason=reasons, detail=details, score=found["similarity"])
        for num_rows in read_receipt(self.result("DocumentKeys", self.number))["tables"]:
            rows = found["row"] - np.int64(first)
            is_here = (rows >= 0) & (rows < num_rows)
            yield num_rows, every.set_column(0, "row", pa.array(rows)).filter(is_here)
            first += num_rows


class DuplicateStep(SignedStep):
    """Reject documents that the corpus, or an earlier one, has already.

    It reads the columns identity; exact or text; characters; and where needed signature or text, source, quality. Raises
    InputError for a missing earlier corpus, a repeated identity, and keep = "quality" without scores.
    """

    name = "duplicates"
    action = "finding duplicates"
    document_bytes = 25

    def run(self, documents: CorpusDocuments, report: Path) -> dict[str, Any]:
        """Return the counts of duplicates and clusters."""
        every = replace(documents, parts=[*documents.parts, *earlier_parts(self)])
        sources = tuple(source.name for source in documents.corpus.sources)
        plan = DedupPlan(self, sources, len(every.parts), sum(every.sizes))
        counts = self._search(every, plan)
        judged = documents.on_parts(JudgeDuplicates, plan=plan)
        clusters = sum((Counter(dict(one["clusters"])) for one in counts), Counter[int]())
        jaccard = [sum(column) for column in zip(*(one["jaccard"] for one in counts), strict=True)]
        kinds = ("exact", "near")
        return {
            "documents": sum(one["documents"] for one in judged),
            "removed": {kind: sum(one["rejected"].get(f"{kind}_duplicate", 0) for one in judged) for kind in kinds},
            # clusters: by their size, the kept document included; jaccard: near duplicates by their similarity to the kept one
            "clusters": [{"documents": size, "clusters": clusters[size]} for size in sorted(clusters)],
            "jaccard": [
                {"from": round(number / HISTOGRAM_BINS, 3), "documents": found} for number, found in enumerate(jaccard)
            ],
            "jaccard_is": "verified" if self.verify else "estimated",
            "min_jaccard": self.min_jaccard,
        }

    def _search(self, documents: CorpusDocuments, plan: DedupPlan) -> Receipts:
        """Find what stays in place of each duplicate; returns the counts of each part."""
        documents.on_parts(keys.DocumentKeys, reads=True, plan=plan, step=self)
        num_edges = sum(
            done["edges"] for done in documents.on_ranges(keys.EqualTexts, keys.num_hash_ranges(plan), plan=plan)
        )
        if self.minhash:
            documents.on_parts(keys.BandKeys, plan=plan)
            documents.on_ranges(keys.CandidatePairs, keys.num_key_ranges(plan), plan=plan)
            documents.on_parts(SendSignatures, plan=plan)
            compared = [done["edges"] for done in documents.on_parts(CompareSignatures, plan=plan)]
            num_edges += sum(compared)
            if self.verify:  # the shingle sets of those that agree are exchanged
                documents.on_parts(SendShingles, [SET_COST * edges for edges in compared], reads=True, plan=plan)
        num_groups = max(-(-num_edges * GROUP_BYTES // (self.memory_mib << 20)), 1)
        grouped = {"plan": plan, "num_groups": num_groups}
        documents.on_parts(CompareShingles, **grouped)
        if num_groups > 1:  # the edges of each connected component are brought together
            unchanged = half = 0
            while half % 2 or unchanged < 2:  # until both halves of a round changed nothing
                half += 1
                done = documents.on_ranges(LinkNeighbours, num_groups, half=half, **grouped)
                unchanged = 0 if any(one["changed"] for one in done) else unchanged + 1
            documents.on_ranges(GroupEdges, num_groups, halves=half, **grouped)
        documents.on_ranges(ChooseKeepers, num_groups, **grouped)
        return documents.on_parts(NameKeepers, reads=True, **grouped)
