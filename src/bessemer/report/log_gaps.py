"""The steps whose lines are missing in the log of a training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from bessemer.common.console import counted

USUAL = 3  # a distance between lines that occurs this often is a logging interval


def missing_lines(logged: Sequence[float], step: int, log_every: int = 1) -> str:
    """Describe the gaps in the log up to `step`; empty if there are none.

    Args:
        logged: Steps with a line.
        step: Last step to check.
        log_every: Steps between lines by the recipe. A larger interval that is usual in the log replaces it.
    """
    logged = [int(one) for one in logged if one <= step]
    distances = Counter(after - before for before, after in pairwise(logged))
    interval = max(log_every, *(distance for distance, times in distances.items() if times >= USUAL), 1)
    # A line is expected at each multiple of the interval. The last step and an earlier, smaller interval add more lines.
    gaps = [
        (before + 1, after - 1)
        for before, after in pairwise([0, *logged, step + 1])
        if (after - 1) // interval > before // interval
    ]
    if not gaps:
        return ""
    first, last = gaps[0]
    more = f", and {counted(len(gaps) - 1, 'other gap')}" if len(gaps) > 1 else ""
    return f"the lines of {f'step {first:,}' if first == last else f'steps {first:,} to {last:,}'} are missing{more}"
