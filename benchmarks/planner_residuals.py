"""Residuals of published cases, pooled with equal weight per source, and the coverage of left-out sources."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

TAILS = (0.1, 0.075, 0.05, 0.025)
WANTED = 0.8


@dataclass(frozen=True)
class Residual:
    """Logarithm of measured over planned for one case.

    Attributes:
        kind: Device and precision for a step, the program for memory.
    """

    source: str
    name: str
    value: float
    kind: str = ""


def quantile(found: Sequence[Residual], share: float) -> float:
    """Return the value that a `share` of the cases does not exceed, with equal weight per source."""
    counts: dict[str, int] = defaultdict(int)
    for one in found:
        counts[one.source] += 1
    below, total = 0.0, float(len(counts))
    for one in sorted(found, key=lambda each: each.value):
        below += 1 / counts[one.source]
        if below >= share * total - 1e-9:
            return one.value
    raise ValueError("a quantile of no residuals")


def interval(found: Sequence[Residual], tail: float) -> tuple[float, float]:
    """Return the low and high end, the quantiles of both tails."""
    return quantile(found, tail), quantile(found, 1 - tail)


def coverage(found: Sequence[Residual], tail: float) -> dict[str, float]:
    """Return for each source the share of its cases inside the interval of all other sources."""
    shares = {}
    for source in sorted({one.source for one in found}):
        low, high = interval([one for one in found if one.source != source], tail)
        shares[source] = fmean(low <= one.value <= high for one in found if one.source == source)
    return shares


def inside(found: Sequence[Residual], tail: float) -> tuple[float, float]:
    """Return the share of cases inside when their source is left out: the mean over sources, and over cases."""
    shares = coverage(found, tail)
    return fmean(shares.values()), fmean(shares[one.source] for one in found)


def pooled(found: Sequence[Residual]) -> dict[str, Any]:
    """Return interval and median of residuals, with the tails whose smaller coverage is nearest to 80%."""
    tail = min(TAILS, key=lambda each: abs(min(inside(found, each)) - WANTED))
    of_sources, of_cases = inside(found, tail)
    low, high = interval(found, tail)
    return {
        "low": low, "middle": quantile(found, 0.5), "high": high, "tail": tail,
        "cases": len(found), "sources": len({one.source for one in found}), "coverage_of_sources": of_sources,
        "coverage_of_cases": of_cases, "by_source": coverage(found, tail),
        "kinds": dict(sorted(Counter(one.kind for one in found if one.kind).items())),
    }  # fmt: skip
