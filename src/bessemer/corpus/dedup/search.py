"""The search for duplicates: exact copies, then near ones by MinHash and LSH, as tasks over parts and ranges of keys.

Exact: equal text after folding case and white space. Near: MinHash with locality-sensitive hashing (Broder 1997, with
FineWeb's parameters). Documents that agree in a whole band share a bucket, where each is compared with its neighbours
(`keys.REACH`) by their signatures and, with `verify`, by the Jaccard similarity of their shingles. A document goes when
it is similar to one that stays, by the rule `keep`.
Independent of the order of documents and of how the work is cut. Memory and disk: docs/dedup.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from bessemer.corpus.dedup import keys
from bessemer.corpus.dedup.compare import CompareShingles, CompareSignatures, SendShingles, SendSignatures
from bessemer.corpus.dedup.keepers import GROUP_BYTES, ChooseKeepers, GroupEdges, LinkNeighbours, NameKeepers
from bessemer.corpus.dedup.task import RESULT, DedupPlan, DocumentPart, Perform, Receipts, TaskSearch, perform_here
from bessemer.corpus.dedup.verdicts import HISTOGRAM_BINS, DuplicateVerdicts, ParquetPart
from bessemer.corpus.readers.files import earlier_files
from bessemer.recipe import Dedup
from bessemer.run_tasks.task import receipt
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import remove_tree

SET_COST = 4  # what a shingle set costs, in documents whose columns are read


def find_duplicates(
    own: Sequence[DocumentPart], settings: Dedup, folder: AnyPath, made_of: str, sources: Sequence[str] = (),
    perform: Perform = perform_here,
) -> dict[str, Any]:  # fmt: skip
    """Find the duplicates of a corpus; the receipt of the search: `parts`, `tables` (rows of each table of each own part), and
    `statistics` for statistics.json.

    Columns of the parts: identity; exact or text; characters; and where needed signature or text, source, quality.
    `folder` keeps the verdicts (`verdicts_of`); finished tasks with the same digest `made_of` are not done again.
    `sources`: in recipe order (keep = "first-source"). `perform` does tasks and gives their receipts. Raises InputError
    for a missing earlier corpus, a repeated identity, and keep = "quality" without scores.
    """
    recorded = receipt(folder / RESULT, made_of)
    if recorded is not None:
        names = range(recorded["parts"])
        if all(receipt(folder / NameKeepers.__name__ / f"{number:06d}", made_of) for number in names):
            return recorded
    remove_tree(folder / RESULT)
    earlier = [ParquetPart(path, corpus) for corpus in settings.against for path in earlier_files(corpus)]
    parts = [*own, *earlier]
    sizes = [part.size for part in parts]
    plan = DedupPlan(settings, tuple(sources), len(parts), sum(sizes), made_of)
    search = _DuplicateSearch(plan, folder, parts, sizes, perform)
    return search.end(search.run(), NameKeepers)


def verdicts_of(folder: AnyPath, recorded: dict[str, Any], settings: Dedup) -> DuplicateVerdicts:
    """The verdicts of a finished search on each table of this corpus, by its receipt."""
    ends = [[0, *accumulate(rows)] for rows in recorded["tables"]]
    spans = [(part, *span) for part, cuts in enumerate(ends) for span in pairwise(cuts)]
    return DuplicateVerdicts(folder / NameKeepers.__name__, recorded["parts"], settings, spans)


class _DuplicateSearch(TaskSearch):
    def run(self) -> dict[str, Any]:
        """Do all steps; returns the facts for the receipt."""
        plan, settings = self.plan, self.plan.settings
        read = self.on_parts(keys.DocumentKeys, reads=True)
        tables = [done["tables"] for done, part in zip(read, self.parts, strict=True) if not part.corpus]
        num_edges = sum(done["edges"] for done in self.on_ranges(keys.EqualTexts, keys.num_hash_ranges(plan)))
        if settings.minhash:
            self.on_parts(keys.BandKeys)
            self.on_ranges(keys.CandidatePairs, keys.num_key_ranges(plan))
            self.on_parts(SendSignatures)
            compared = [done["edges"] for done in self.on_parts(CompareSignatures)]
            num_edges += sum(compared)
            if settings.verify:  # the shingle sets of those that agree are exchanged
                self.on_parts(SendShingles, [SET_COST * edges for edges in compared], reads=True)
        num_groups = max(-(-num_edges * GROUP_BYTES // (settings.memory_mib << 20)), 1)
        self.on_parts(CompareShingles, num_groups=num_groups)
        if num_groups > 1:  # the edges of each connected component are brought together
            unchanged = half = 0
            while half % 2 or unchanged < 2:  # until both halves of a round changed nothing
                half += 1
                done = self.on_ranges(LinkNeighbours, num_groups, half=half, num_groups=num_groups)
                unchanged = 0 if any(one["changed"] for one in done) else unchanged + 1
            self.on_ranges(GroupEdges, num_groups, halves=half, num_groups=num_groups)
        self.on_ranges(ChooseKeepers, num_groups, num_groups=num_groups)
        counts = self.on_parts(NameKeepers, reads=True, num_groups=num_groups)
        statistics = {"documents": sum(map(sum, tables))} | _statistics(counts, settings)
        return {"parts": plan.num_parts, "tables": tables, "statistics": statistics}


def _statistics(counts: Receipts, settings: Dedup) -> dict[str, Any]:
    """The counts of all parts, for statistics.json.

    clusters: histogram of cluster sizes, the kept document included. jaccard: near duplicates by their similarity to the
    kept one, `estimated` from signatures or `iterate_verified` by shingles. min_jaccard: from which documents are near
    duplicates.
    """
    clusters: Counter[int] = Counter()
    for one in counts:
        clusters.update(dict(one["clusters"]))
    jaccard = [sum(one["jaccard"][number] for one in counts) for number in range(HISTOGRAM_BINS)]
    return {
        "removed": {kind: sum(one["removed"][kind] for one in counts) for kind in ("exact", "near")},
        "clusters": [{"documents": size, "clusters": clusters[size]} for size in sorted(clusters)],
        "jaccard": [
            {"from": round(number / HISTOGRAM_BINS, 3), "documents": found} for number, found in enumerate(jaccard)
        ],
        "jaccard_is": "verified" if settings.verify else "estimated",
        "min_jaccard": settings.min_jaccard,
    }
