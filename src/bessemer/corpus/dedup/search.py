"""The search for duplicates: exact copies, then near ones by MinHash and LSH, as tasks over parts and ranges of keys.

Exact: equal text after folding case and white space. Near: MinHash with locality-sensitive hashing (Broder 1997, with
FineWeb's parameters). Documents that agree in a whole band share a bucket, where each is compared with its neighbours
(`keys.REACH`) by their signatures and, with `verify`, by the Jaccard similarity of their shingles. A document goes when
it is similar to one that stays, by the rule `keep`.
Independent of the order of documents and of how the work is cut. Memory and disk: docs/dedup.md.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from bessemer.corpus.dedup import keepers, keys
from bessemer.corpus.dedup.compare import CompareShingles, CompareSignatures, SendShingles, SendSignatures
from bessemer.corpus.dedup.task import DedupPlan, SignedStep, earlier_parts
from bessemer.corpus.global_steps import CorpusDocuments, Receipts

SET_COST = 4  # what a shingle set costs, in documents whose columns are read


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
        judged = documents.on_parts(keepers.JudgeDuplicates, plan=plan)
        clusters = sum((Counter(dict(one["clusters"])) for one in counts), Counter[int]())
        jaccard = [sum(column) for column in zip(*(one["jaccard"] for one in counts), strict=True)]
        kinds = ("exact", "near")
        return {
            "documents": sum(one["documents"] for one in judged),
            "removed": {kind: sum(one["rejected"].get(f"{kind}_duplicate", 0) for one in judged) for kind in kinds},
            # clusters: by their size, the kept document included; jaccard: near duplicates by their similarity to the kept one
            "clusters": [{"documents": size, "clusters": clusters[size]} for size in sorted(clusters)],
            "jaccard": [
                {"from": round(number / keepers.HISTOGRAM_BINS, 3), "documents": found}
                for number, found in enumerate(jaccard)
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
        num_groups = max(-(-num_edges * keepers.GROUP_BYTES // (self.memory_mib << 20)), 1)
        grouped = {"plan": plan, "num_groups": num_groups}
        documents.on_parts(CompareShingles, **grouped)
        if num_groups > 1:  # the edges of each connected component are brought together
            unchanged = half = 0
            while half % 2 or unchanged < 2:  # until both halves of a round changed nothing
                half += 1
                done = documents.on_ranges(keepers.LinkNeighbours, num_groups, half=half, **grouped)
                unchanged = 0 if any(one["changed"] for one in done) else unchanged + 1
            documents.on_ranges(keepers.GroupEdges, num_groups, halves=half, **grouped)
        documents.on_ranges(keepers.ChooseKeepers, num_groups, **grouped)
        return documents.on_parts(keepers.NameKeepers, reads=True, **grouped)
