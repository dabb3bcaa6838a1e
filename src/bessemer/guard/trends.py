"""Trends of a run that do not make a step wrong: growing activations, slow steps, unused experts. They are only recorded.

| kind | rule |
|---|---|
| attention | largest attention logit above 4 x the median of the last 16 measurements and above 50 |
| activation | largest RMS of a block's output above 4 x the median of the last 16 measurements |
| slow | median seconds of the last 64 steps above 2 x the lowest such median, twice in a row |
| data_wait | the last 64 steps waited for data for more than a fifth of their time, twice in a row |
| collapse | a block uses half of its experts or fewer, or one has 8 x the mean load, in 10 logged steps in a row |

Attention logits that grow without bound precede a divergence (Wortsman et al. 2023, section 3.1). The windows are not part of a
checkpoint: times belong to this process, and earlier measurements are in metrics.jsonl.

The number of experts that a block uses is the exponential of the entropy of their load: n if n experts share it evenly.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bessemer.common.console import warn
from bessemer.guard.incidents import ACTIVATION, ATTENTION, COLLAPSE, DATA_WAIT, SLOW, IncidentKind, record
from bessemer.run.files import read_steps

MEASURED, MIN_MEASURED, GROWTH, MIN_LOGIT = 16, 4, 4.0, 50.0
STEPS, SLOWER, WAIT_SHARE = 64, 2.0, 0.2
CHECKS, USED_SHARE, LARGEST_LOAD = 10, 0.5, 8.0
LIMITS = {"attention_logit_max": (ATTENTION, MIN_LOGIT), "activation_rms": (ACTIVATION, 0.0)}


class Trends:
    """The detector of slow trends: steps that became slow or wait for data, statistics that grow, and collapsed routers."""

    def __init__(self, path: Path | None, rows: Iterable[dict[str, Any]] = ()) -> None:
        """Create the windows of measurements and fill them from the metrics of earlier steps.

        Args:
            path: The path of incidents.jsonl; None on ranks other than 0.
            rows: The rows of metrics.jsonl, which fill the windows of layer statistics.
        """
        self._path = path
        self._measured: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MEASURED))
        self._seconds, self._waits = deque[float](maxlen=STEPS), deque[float](maxlen=STEPS)
        self._fastest: float | None = None
        self._last: IncidentKind | None = None  # the trend of the last STEPS steps
        self._collapsed = Counter[str]()  # the logged steps in a row for which the router of a block has been collapsed
        incidents = () if path is None else read_steps(path)
        self._recorded_at = {(str(row.get("what")), row.get("block")): row["step"] for row in incidents}
        self.rewind(rows)

    def rewind(self, rows: Iterable[dict[str, Any]]) -> None:
        """Refill the windows of layer statistics from these rows of metrics.jsonl, as after a rollback."""
        self._measured.clear()
        self._collapsed.clear()
        for row in rows:
            self._collapses(row)
            for name in LIMITS if row.get("kind") == "inside" else ():
                if by_block := _finite(row.get(name)):
                    self._measured[name].append(max(by_block.values()))

    def add_statistics(self, step: int, statistics: dict[str, dict[str, float]]) -> None:
        """Add layer statistics, {name: {block: value}}, and record an incident for each that grew far above its median."""
        for name, (kind, minimum) in LIMITS.items():
            if not (by_block := _finite(statistics.get(name))):
                continue
            block, value = max(by_block.items(), key=lambda item: item[1])
            before = self._measured[name]
            if len(before) >= MIN_MEASURED and value > max(GROWTH * median(before), minimum):
                grown = f"is {value:.4g} in block {block}; the median of the {len(before)} before it is {median(before):.4g}"
                self._record(step, kind, f"the largest {name.replace('_', ' ')} {grown}")
            before.append(value)

    def add_load(self, step: int, row: Mapping[str, Any], *, is_balanced: bool = True) -> None:
        """Add the load of experts in the line of a logged step, and record an incident for each router that has collapsed.

        `row` may have none. A router that stays collapsed is recorded once.
        `is_balanced` is False if the recipe does not balance the load.
        """
        for block, cause in self._collapses(row).items():
            self._record(step, COLLAPSE, cause + "; balancing is off" * (not is_balanced), block=block)

    def _collapses(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Count the logged steps in a row of each collapsed router, and return why, for those that reach CHECKS, by block."""
        causes = {}
        for block, load in (row.get("expert_load") or {}).items():
            experts, largest = len(bytes.fromhex(load)), 1 + row["max_violation"][block]
            used = experts ** row["load_entropy"][block]
            is_collapsed = used <= USED_SHARE * experts or largest > LARGEST_LOAD
            self._collapsed[block] = is_collapsed * (self._collapsed[block] + 1)
            if self._collapsed[block] == CHECKS:
                causes[block] = f"block {block} uses {used:.2g} of {experts} experts, one with {largest:.2g} x the mean"
        return causes

    def add_step(self, step: int, seconds: float, data_wait: float) -> None:
        """Add the duration of a step in seconds and the part of it spent waiting for data.

        After each full window, record an alarm if two windows in a row were slow or waited for data.
        """
        self._seconds.append(seconds)
        self._waits.append(data_wait)
        if len(self._seconds) < STEPS or step % STEPS:
            return
        now, share = median(self._seconds), sum(self._waits) / sum(self._seconds)
        self._fastest = min(now, self._fastest or now)
        before = self._last
        self._last = DATA_WAIT if share > WAIT_SHARE else SLOW if now > SLOWER * self._fastest else None
        if self._last is None or self._last != before:  # a single slow window may be due to another program
            return
        slow = f"a step takes {now:.3g} s in the median of the last {STEPS}; it was {self._fastest:.3g} s"
        waits = f"the last {STEPS} steps waited for data for {share:.0%} of their time"
        self._record(step, self._last, slow if self._last is SLOW else waits)

    def _record(self, step: int, kind: IncidentKind, cause: str, **more: Any) -> None:
        key = kind.name, more.get("block")
        if self._path is None or step < self._recorded_at.get(key, -kind.quiet_steps) + kind.quiet_steps:
            return
        self._recorded_at[key] = step
        record(self._path, kind, step=step, cause=cause, **more)
        warn(f"step {step}: {kind.name}: {cause} (see {self._path.name})")


def _finite(by_block: Mapping[str, float | None] | None) -> dict[str, float]:
    """Return the statistics that are finite; JSON has null for the others."""
    return {block: value for block, value in (by_block or {}).items() if value is not None and math.isfinite(value)}
