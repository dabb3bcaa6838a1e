"""What is true of planted documents, and how a side that removed some of them is judged; dedup.py says the terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

Pair = tuple[int, int]

ALIKE = 0.8
"""Jaccard from which two documents are near duplicates (issue: recall for J >= 0.8)."""

LEAST = 0.7
"""Jaccard from which pairs are known at all, for settings that remove from there on."""


@dataclass(frozen=True)
class Outcome:
    """What a side did, by document in the order of the input."""

    component: Sequence[int]
    """Documents of one number went in favour of one document; any numbers."""
    stays: Sequence[bool]


def alike_pairs(sets: Sequence[np.ndarray], least: float) -> dict[Pair, float]:
    """All pairs of sets with a Jaccard of `least` or more, exactly: such a pair shares one of the rarest elements
    (prefix filter, Chaudhuri et al. 2006)."""
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
    """Of two sorted arrays without repetition."""
    shared = len(np.intersect1d(left, right, assume_unique=True))
    return shared / max(len(left) + len(right) - shared, 1)


def recall(outcome: Outcome, pairs: Mapping[Pair, float]) -> dict[str, float]:
    """Share of the pairs of which one document stays at most."""
    found = {(one, other): not (outcome.stays[one] and outcome.stays[other]) for one, other in pairs}
    hard = [found[pair] for pair, share in pairs.items() if share < ALIKE + 0.05]
    return {
        "pairs": len(pairs),
        "recall": sum(found.values()) / max(len(pairs), 1),
        "pairs_below_0.85": len(hard),
        "recall_below_0.85": sum(hard) / max(len(hard), 1),
    }


def precision(outcome: Outcome, texts: Sequence[str], alike: Mapping[Pair, float]) -> dict[str, float]:
    """What was removed as a near duplicate, and the shares of it that have a partner.

    texts: case and white space folded; alike: all pairs from LEAST on. Of documents with equal text in one component
    one counts, the one that stays or else the first: the others are exact copies. A partner is a document of another
    text in the same component; to_kept asks that it be the one that stays.
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
