"""Long curves made short, noisy ones smooth, without losing what one looks for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from bessemer.report.data import Column

POINTS = 2000  # a curve keeps at most so many points


def thin(x: Column, y: Column, limit: int = POINTS) -> tuple[Column, Column]:
    """At most `limit` points of a curve: the ends, and the lowest and highest point of each stretch.

    A run of a million steps would make a page of a hundred megabytes, and a screen is some 2,000 points wide.
    Averages or every n-th point would hide the one spike one looks for; the extremes of each stretch draw the
    same picture as all points would. Half of the stretches are of equal length and half grow with the step,
    so that the beginning is there on a logarithmic axis as well. Points that are not finite are left out.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= limit:
        return x, y
    stretches, last = max((limit - 2) // 4, 1), len(x) - 1
    edges = np.unique(
        np.concatenate([np.linspace(1, last, stretches + 1), np.geomspace(1, last, stretches)]).astype(int)
    )
    keep = {0, last}
    for low, high in pairwise(edges):
        keep.add(int(low + np.argmin(y[low:high])))
        keep.add(int(low + np.argmax(y[low:high])))
    index = np.array(sorted(keep))
    return x[index], y[index]


def smooth(y: Column, window: int) -> Column:
    """Weighted mean over `window` points around each point; at the beginning over as many before as after it.

    Centred, because an average of the past alone lags behind a falling loss and seems to lie above the
    held-out one. The mean of a mean, so that weights fall off toward the ends and a spike does not become a
    step. Taken over all points before any are left out: thinned points are extremes and would bias it.
    """
    half = window // 4
    return _mean(_mean(y, half), half)


def _mean(y: Column, half: int) -> Column:
    finite = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(y))
    reach = np.minimum(half, index)
    low, high = index - reach, np.minimum(index + reach + 1, len(y))
    with np.errstate(invalid="ignore"):
        mean: Column = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return mean
