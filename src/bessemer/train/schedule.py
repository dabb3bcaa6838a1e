"""The learning rate at each step, as a pure function of the step."""

from __future__ import annotations

import math

from bessemer.recipe import Optimizer, Schedule


def learning_rate_share(schedule: Schedule, step: int, steps: int) -> float:
    """Share of the peak learning rate for the update number `step` (0-based) of `steps`.

    Warmup rises linearly and reaches 1 at update `warmup_steps`; where there is an end, the last update has `final_share`.
    cosine: half a cosine between the two (Loshchilov and Hutter 2017). linear: a line. wsd: constant, then linear over the last
    `decay_share` of the steps (Hu et al. 2024; linear decay after Hägele et al. 2024). inverse_sqrt: the root of warmup / step
    (Vaswani et al. 2017, section 5.3), not below `final_share`. constant: 1.
    """
    warmup = min(schedule.warmup_steps or 0, steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "inverse_sqrt":
        return max(math.sqrt((warmup + 1) / (step + 1)), schedule.final_share)
    if schedule.kind == "wsd":
        start = schedule.decay_start(steps)
        if step < start:
            return 1.0
        progress = min((step - start + 1) / max(steps - start, 1), 1.0)
    else:  # the peak at update `warmup`, the final share at the last
        progress = 1.0 if step >= steps - 1 else (step - warmup) / (steps - 1 - warmup)
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1.0 - progress
    return schedule.final_share + (1.0 - schedule.final_share) * shape


def rewarm_share(step: int, at: int, steps: int, first: float) -> float:
    """Factor on the rate after a rollback: `first` at step `at`, a line back to 1 at step `at + steps`; 1 before `at`.

    step: number of the update (0-based); at: the step as it is logged (1-based).
    """
    if not at <= step + 1 < at + steps:
        return 1.0
    return first + (1.0 - first) * (step + 1 - at) / steps


def batch_factor(optimizer: Optimizer, batch_tokens: int) -> float:
    """What the learning rate is multiplied with at a global batch of so many tokens.

    linear: in proportion to the batch (Goyal et al. 2017, section 2.1, for SGD). sqrt: to its root, which is the rule
    for Adam-like updates (Malladi et al. 2022, definition 4.2, where the betas and epsilon follow too; here they stay).
    """
    if optimizer.batch_scaling == "none" or optimizer.reference_batch_tokens is None:
        return 1.0
    ratio = batch_tokens / optimizer.reference_batch_tokens
    return ratio if optimizer.batch_scaling == "linear" else math.sqrt(ratio)
