"""Search for duplicate documents: exact copies, then near duplicates by MinHash and LSH.

Exact copies have equal texts after folding case and white space. Near duplicates are found by MinHash with locality-sensitive
hashing (Broder 1997, with FineWeb's parameters). Documents with an equal band share a bucket, in which each is compared with
its neighbours (`keys.REACH`): by the Jaccard similarity of the shingles with `verify`, else by signature. A document is
rejected if it is similar to one that stays, in the order of `keep`. The result depends neither on the order of documents nor
on the partitioning. Memory and disk use: docs/background/deduplication.md.

The tasks of keys.py and compare.py find edges between similar documents. These tasks turn edges into verdicts:

    FindComponents  one task: the connected component of each document in an edge
    GroupEdges      one task per group of documents: sends edges to the group of their component
    ChooseKeepers   one task per group of components: selects the documents to reject and to keep; counts them
    JudgeDuplicates one task per part: verdicts on its documents

The first two run only if the edges of the corpus do not fit in one task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from bessemer.corpus.dedup import keys, task
from bessemer.corpus.dedup.compare import CompareSets, SendSets
from bessemer.corpus.dedup.signatures import first_neighbours
from bessemer.corpus.dedup.task import EXACT, NEAR, DedupPlan, SignedStep, earlier_parts, identity_of, write_split
from bessemer.corpus.global_steps import CorpusDocuments, Receipts, VerdictTask
from bessemer.corpus.verdicts import make_verdicts
from bessemer.run.files import stage_facts

EDGES = CompareSets.__name__  # task class that writes the edges
HISTOGRAM_BINS = 40  # of the Jaccard similarity, 0.025 wide, so that the usual thresholds are bin edges
GROUP_BYTES = 6 * task.EDGE.itemsize  # memory per edge in ChooseKeepers


@dataclass(frozen=True)
class GroupTask(task.DedupTask):
    """Base class for a task on one of `num_groups` groups of documents or of connected components of similar documents.

    The number of groups is known only after its input files are written. They are therefore divided into as many ranges
    as there are parts of the corpus, and a task reads several adjacent ranges.
    """

    num_groups: int

    @property
    def targets(self) -> range:
        start, end = (number * self.plan.num_parts // self.num_groups for number in (self.number, self.number + 1))
        return range(start, end)

    def write_groups(self, path: Path, numbers: np.ndarray, values: np.ndarray) -> None:
        """Write values[i] to a file for the `GroupTask` that handles document numbers[i]."""
        write_split(path, self.plan.num_parts, task.spread(numbers, self.plan.num_parts), values)


@dataclass(frozen=True)
class FindComponents(GroupTask):
    """A task that finds the connected components of the graph whose edges join similar documents.

    It writes, for each document with an edge, its number and the smallest document number in its component.
    """

    def make(self, folder: Path) -> dict[str, int]:
        pairs = [np.empty(0, task.PAIR)]
        for number in range(self.plan.num_parts):
            edges = self.gather(EDGES, range(number, number + 1), "edges", task.EDGE)
            pairs.append(keys.unique_pairs(edges["first"]["number"], edges["second"]["number"]))
        ends = np.concatenate(pairs)
        numbers, index = np.unique(np.stack([ends["first"], ends["second"]]), return_inverse=True)
        shape = len(numbers), len(numbers)
        graph = coo_array((np.ones(len(ends), np.int8), tuple(index.reshape(2, -1))), shape=shape)
        _, component = connected_components(graph, directed=False)
        _, first = np.unique(component, return_index=True)
        roots = task.records(task.PAIR, len(numbers), first=numbers, second=numbers[first][component])
        self.write_groups(folder / "roots", numbers, roots)
        return {}


@dataclass(frozen=True)
class GroupEdges(GroupTask):
    """A task that regroups edges by connected component, so that each `ChooseKeepers` task gets whole components."""

    def make(self, folder: Path) -> dict[str, int]:
        roots = self.gather(FindComponents.__name__, range(1), "roots", task.PAIR)
        roots = roots[np.argsort(roots["first"])]
        edges = self.gather(EDGES, range(self.plan.num_parts), "edges", task.EDGE)
        root = roots["second"][np.searchsorted(roots["first"], task.larger(edges))]
        self.write_groups(folder / "edges", root, edges)
        return {}


@dataclass(frozen=True)
class ChooseKeepers(GroupTask):
    """A task that decides, in some connected components of similar documents, which documents are rejected in favour of which.

    It visits the documents in the order that `corpus.dedup.keep` sets, and rejects each one that is similar to a
    document already kept. It writes one EDGE record (first: kept, second: rejected) per rejected document to the file
    of that document's part, and returns cluster sizes and a histogram of similarities for statistics.json.
    """

    def make(self, folder: Path) -> dict[str, Any]:
        step, count = (EDGES, self.plan.num_parts) if self.num_groups == 1 else ("GroupEdges", self.num_groups)
        edges = self.gather(step, range(count), "edges", task.EDGE)
        named = np.concatenate([edges["first"], edges["second"]])
        _, where, inverse = np.unique(named["number"], return_index=True, return_inverse=True)
        documents = named[where]
        by_order = np.lexsort((documents["number"], documents["name"], documents["order"]))
        documents, rank = documents[by_order], np.argsort(by_order)
        ends = rank[inverse.reshape(2, -1)]
        left, right = ends.min(axis=0), ends.max(axis=0)
        is_copy, can_go = edges["kind"] == EXACT, ~task.is_earlier(documents["order"])
        near = np.flatnonzero(~is_copy)
        near = near[np.lexsort((left[near], right[near]))]
        edge_of = np.full(len(documents), -1)
        first_neighbours(left[near], right[near], can_go, edge_of)
        goes = np.flatnonzero(edge_of >= 0)
        edge, keeper = near[edge_of[goes]], np.arange(len(documents))
        keeper[goes] = left[edge]
        kept, copies = ends[:, is_copy & can_go[ends[1]]]  # EqualTexts chose the kept one, without regard to length
        keeper[copies] = keeper[kept]
        losers = np.concatenate([goes, copies])
        verdicts = task.records(task.EDGE, len(losers), first=documents[keeper[losers]], second=documents[losers])
        verdicts["kind"] = np.repeat([NEAR, EXACT], [len(goes), len(copies)])
        verdicts["similarity"] = np.append(edges["similarity"][edge], np.ones(len(copies)))
        write_split(folder / "verdicts", self.plan.num_parts, task.part_of(verdicts["second"]["number"]), verdicts)
        _, sizes = np.unique(keeper[losers], return_counts=True)
        bins = (verdicts["similarity"][: len(goes)] * HISTOGRAM_BINS + 1e-6).astype(np.int64)
        return {
            "clusters": sorted(Counter((sizes + 1).tolist()).items()),
            "jaccard": np.bincount(np.minimum(bins, HISTOGRAM_BINS - 1), minlength=HISTOGRAM_BINS).tolist(),
        }


@dataclass(frozen=True)
class JudgeDuplicates(VerdictTask, task.DedupTask):
    """A task that writes the rejections that `ChooseKeepers` decided for the documents in one part of the corpus.

    `num_groups` is the number of `ChooseKeepers` tasks.
    """

    num_groups: int

    def judge(self) -> Iterator[tuple[int, pa.Table]]:
        settings, first = self.plan.settings, 0
        edges = self.gather("ChooseKeepers", range(self.num_groups), "verdicts", task.EDGE)
        kept, rows = edges["first"], task.row_of(edges["second"]["number"])
        corpora = ["", *(f" of {corpus}" for corpus in settings.against)]
        which = np.searchsorted(self.plan.earlier, task.part_of(kept["number"]), side="right").tolist()
        method, details = "verified" if settings.verify else "estimated", list[str]()
        for name, corpus, kind, similarity in zip(
            kept["name"].tolist(), which, edges["kind"].tolist(), edges["similarity"].tolist(), strict=True
        ):
            detail = f"kept instead: {identity_of(name)}{corpora[corpus]}"
            details.append(detail + (f" ({method} Jaccard {similarity:.2f})" if kind == NEAR else ""))
        reasons = np.where(edges["kind"] == NEAR, "near_duplicate", "exact_duplicate")
        every = make_verdicts(rows, reason=reasons, detail=details, score=edges["similarity"])
        for num_rows in stage_facts(self.result("DocumentKeys", self.number))["tables"]:
            is_here = (rows >= first) & (rows < first + num_rows)
            yield num_rows, every.set_column(0, "row", pa.array(rows - first)).filter(is_here)
            first += num_rows


class DuplicateStep(SignedStep):
    """Reject documents that this corpus or an earlier one already contains.

    It reads the hashes and signatures that cleaning stored, or the texts of corpora that have none. Raises InputError
    for a missing earlier corpus, a repeated identity, and keep = "quality" without scores.
    """

    name = "duplicates"
    action = "finding duplicates"
    document_bytes = 25

    def run(self, documents: CorpusDocuments, report: Path) -> dict[str, Any]:
        """Reject the duplicates, and return a dict for statistics.json.

        It has the numbers of documents, of removed documents by kind and of clusters by size, and a histogram of the
        Jaccard similarity. `report` is not used.
        """
        every = replace(documents, parts=[*documents.parts, *earlier_parts(self)])
        sources = tuple(source.name for source in documents.corpus.sources)
        corpora = [part.corpus for part in every.parts]
        earlier = tuple(map(corpora.index, self.against))
        plan = DedupPlan(self, sources, len(every.parts), sum(every.sizes), earlier)
        counts = self._search(every, plan)
        judged = documents.on_parts(JudgeDuplicates, plan=plan, num_groups=len(counts))
        clusters = sum((Counter(dict(one["clusters"])) for one in counts), Counter[int]())
        jaccard = [sum(column) for column in zip(*(one["jaccard"] for one in counts), strict=True)]
        kinds = ("exact", "near")
        return {
            "documents": sum(one["documents"] for one in judged),
            "removed": {kind: sum(one["rejected"].get(f"{kind}_duplicate", 0) for one in judged) for kind in kinds},
            # The size of a cluster includes the kept document. `jaccard` is the similarity to the kept document.
            "clusters": [{"documents": size, "clusters": clusters[size]} for size in sorted(clusters)],
            "jaccard": [
                {"from": round(number / HISTOGRAM_BINS, 3), "documents": count} for number, count in enumerate(jaccard)
            ],
            "jaccard_is": "verified" if self.verify else "estimated",
            "min_jaccard": self.min_jaccard,
        }

    def _search(self, documents: CorpusDocuments, plan: DedupPlan) -> Receipts:
        """Run the tasks that choose a kept document for each duplicate. Returns the result dicts of `ChooseKeepers`."""
        documents.on_parts(keys.DocumentKeys, reads=True, plan=plan, step=self)
        documents.on_ranges(keys.EqualTexts, keys.num_hash_ranges(plan), plan=plan)
        if self.minhash:
            documents.on_parts(keys.BandKeys, plan=plan)
            documents.on_ranges(keys.CandidatePairs, keys.num_key_ranges(plan), plan=plan)
            documents.on_parts(SendSets, reads=True, plan=plan)
        num_edges = sum(done["edges"] for done in documents.on_parts(CompareSets, plan=plan))
        num_groups = min(-(-num_edges * GROUP_BYTES // (self.memory_mib << 20)), plan.num_parts) or 1
        grouped = {"plan": plan, "num_groups": num_groups}
        if num_groups > 1:  # ChooseKeepers needs all edges of a connected component in one task
            documents.on_ranges(FindComponents, 1, plan=plan, num_groups=1)
            documents.on_ranges(GroupEdges, num_groups, **grouped)
        return documents.on_ranges(ChooseKeepers, num_groups, **grouped)
