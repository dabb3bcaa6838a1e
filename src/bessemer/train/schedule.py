"""The learning rate at each step, as a pure function of the step."""

from __future__ import annotations

import math

from bessemer.recipe import Schedule


def learning_rate_share(schedule: Schedule, step: int, steps: int) -> float:
    """Share of the peak learning rate for the update number `step` (0-based) of `steps`.

    Warmup rises linearly and reaches 1 at update `warmup_steps`; the last update has `final_share`. cosine: half a
    cosine from warmup to the end (Loshchilov and Hutter 2017). wsd: constant, then linear over the last `decay_share`
    of the steps (Hu et al. 2024; linear decay after Hägele et al. 2024).
    """
    warmup = min(schedule.warmup_steps or 0, steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    start = warmup if schedule.kind == "cosine" else max(warmup, steps - max(round(steps * schedule.decay_share), 1))
    if step < start:
        return 1.0
    progress = min((step - start + 1) / max(steps - start, 1), 1.0)
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1.0 - progress
    return schedule.final_share + (1.0 - schedule.final_share) * shape
