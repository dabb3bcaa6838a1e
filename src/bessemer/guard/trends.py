"""What grows or slows down while a run still learns: told and recorded, never acted on, since none of it makes a step wrong.

| kind | rule |
|---|---|
| attention | largest attention logit above 4 x the median of the last 16 looks and above 50 |
| activation | largest RMS of a block's output above 4 x the median of the last 16 looks |
| slow | median of the last 64 steps' seconds above 2 x the lowest such median, twice in a row |
| data_wait | the last 64 steps waited for data for more than a fifth of their time, twice in a row |

Attention logits that grow without bound precede a divergence (Wortsman et al. 2023, section 3.1). What is seen is not part of a
checkpoint: times are of this process, and the looks of one before it stand in metrics.jsonl.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from bessemer.guard.incidents import ADVICE, record
from bessemer.terminal import warn

LOOKS, MIN_LOOKS, GROWTH, MIN_LOGIT = 16, 4, 4.0, 50.0
STEPS, SLOWER, WAIT_SHARE = 64, 2.0, 0.2
QUIET_STEPS = 1000  # between two notes of one kind
LIMITS = {"attention_logit_max": ("attention", MIN_LOGIT), "activation_rms": ("activation", 0.0)}


class Trends:
    """What rank 0 has seen. path: of incidents.jsonl; None on other ranks, which see nothing; rows: of metrics.jsonl, whose last
    looks are seen again."""

    def __init__(self, path: Path | None, rows: Iterable[dict[str, Any]] = ()) -> None:
        self._path = path
        self._looks: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LOOKS))
        self._seconds, self._waits = deque[float](maxlen=STEPS), deque[float](maxlen=STEPS)
        self._fastest: float | None = None
        self._last: str | None = None  # what was wrong with the last STEPS
        self._noted: dict[str, int] = {}
        for row in rows:
            for name in LIMITS if row.get("kind") == "inside" else ():
                if by_block := row.get(name):
                    self._looks[name].append(
                        max((value for value in by_block.values() if value is not None), default=0.0)
                    )

    def looked(self, step: int, statistics: dict[str, dict[str, float]]) -> None:
        """See what a look inside the model found: by statistic and block."""
        for name, (kind, least) in LIMITS.items():
            if not (by_block := statistics.get(name)):
                continue
            block, value = max(by_block.items(), key=lambda item: item[1])
            before = self._looks[name]
            if len(before) >= MIN_LOOKS and value > max(GROWTH * median(before), least):
                grown = f"is {value:.4g} in block {block}; the median of the last {len(before)} looks is {median(before):.4g}"
                self._note(step, kind, f"the largest {name.replace('_', ' ')} {grown}")
            before.append(value)

    def stepped(self, step: int, seconds: float, data_wait: float) -> None:
        """See the seconds that a step took, and those of them that it waited for data."""
        self._seconds.append(seconds)
        self._waits.append(data_wait)
        if len(self._seconds) < STEPS or step % STEPS:
            return
        now, share = median(self._seconds), sum(self._waits) / sum(self._seconds)
        self._fastest = min(now, self._fastest or now)
        before, self._last = (
            self._last,
            "data_wait" if share > WAIT_SHARE else "slow" if now > SLOWER * self._fastest else None,
        )
        if self._last is None or self._last != before:  # another program may run for a minute
            return
        slow = f"a step takes {now:.3g} s in the median of the last {STEPS}; it was {self._fastest:.3g} s"
        waits = f"the last {STEPS} steps waited for data for {share:.0%} of their time"
        self._note(step, self._last, slow if self._last == "slow" else waits)

    def _note(self, step: int, kind: str, cause: str) -> None:
        if self._path is None or step < self._noted.get(kind, -QUIET_STEPS) + QUIET_STEPS:
            return
        self._noted[kind] = step
        record(self._path, step=step, what=kind, cause=cause, action="recorded", advice=ADVICE[kind])
        warn(f"step {step}: {kind}: {cause} (see {self._path.name})")
