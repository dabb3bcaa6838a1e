"""Exact similar pairs, and recall and precision of a deduplication. dedup.py defines the terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

Pair = tuple[int, int]

ALIKE = 0.8
"""Jaccard similarity from which two documents are near duplicates."""

LEAST = 0.7
"""Jaccard similarity from which pairs are computed, for settings that remove from there on."""


@dataclass(frozen=True)
class Outcome:
    """The decisions of one side, per document in input order."""

    component: Sequence[int]
    """Number of the group per document: of each group, all but one document are removed."""
    stays: Sequence[bool]


def alike_pairs(sets: Sequence[np.ndarray], least: float) -> dict[Pair, float]:
    """Return all pairs of sets whose Jaccard is `least` or more, exactly.

    Two similar sets share one of their rarest elements (prefix filter, Chaudhuri et al. 2006).
    """
    values, counts = np.unique(np.concatenate(sets), return_counts=True)
    by_prefix: dict[int, list[int]] = {}
    pairs: dict[Pair, float] = {}
    for number, mine in enumerate(sets):
        if not len(mine):
            continue
        rare = mine[np.lexsort((mine, counts[np.searchsorted(values, mine)]))]
        candidates: set[int] = set()
        for element in rare[: len(mine) - ceil(least * len(mine)) + 1].tolist():
            others = by_prefix.setdefault(element, [])
            candidates.update(others)
            others.append(number)
        for other in candidates:
            theirs = sets[other]
            if least * len(mine) <= len(theirs) <= len(mine) / least:
                share = jaccard(mine, theirs)
                if share >= least:
                    pairs[other, number] = share
    return pairs


def jaccard(left: np.ndarray, right: np.ndarray) -> float:
    """Return the Jaccard similarity of two sorted arrays without repeated values."""
    shared = len(np.intersect1d(left, right, assume_unique=True))
    return shared / max(len(left) + len(right) - shared, 1)


def recall(outcome: Outcome, pairs: Mapping[Pair, float]) -> dict[str, float]:
    """Return the share of pairs of which at most one document is kept."""
    found = {(one, other): not (outcome.stays[one] and outcome.stays[other]) for one, other in pairs}
    hard = [found[pair] for pair, share in pairs.items() if share < ALIKE + 0.05]
    return {
        "pairs": len(pairs),
        "recall": sum(found.values()) / max(len(pairs), 1),
        "pairs_below_0.85": len(hard),
        "recall_below_0.85": sum(hard) / max(len(hard), 1),
    }


def precision(outcome: Outcome, texts: Sequence[str], alike: Mapping[Pair, float]) -> dict[str, float]:
    """Return how many documents were removed as near duplicates, and the shares of them that have a partner.

    Among documents with equal text in one component one counts: the kept one, or else the first. The others are exact copies. A
    partner is a document with another text in the same component; `precision_to_kept` counts only a kept partner.

    Args:
        outcome: The decisions to judge.
        texts: Text per document, case and white space folded.
        alike: All pairs with a Jaccard of `LEAST` or more.
    """
    counted: dict[tuple[int, str], int] = {}
    for number, (component, stays) in enumerate(zip(outcome.component, outcome.stays, strict=True)):
        if stays or (component, texts[number]) not in counted:
            counted[component, texts[number]] = number
    near = [number for number in counted.values() if not outcome.stays[number]]
    best = dict.fromkeys(range(len(texts)), 0.0)
    to_kept = dict(best)
    for pair, share in alike.items():
        if outcome.component[pair[0]] != outcome.component[pair[1]] or texts[pair[0]] == texts[pair[1]]:
            continue
        for one, other in (pair, pair[::-1]):
            best[one] = max(best[one], share)
            if outcome.stays[other]:
                to_kept[one] = max(to_kept[one], share)
    return {
        "removed": sum(not stays for stays in outcome.stays),
        "removed_near": len(near),
        "precision": sum(best[number] >= ALIKE for number in near) / max(len(near), 1),
        "precision_at_0.7": sum(best[number] >= LEAST for number in near) / max(len(near), 1),
        "precision_to_kept": sum(to_kept[number] >= ALIKE for number in near) / max(len(near), 1),
    }
