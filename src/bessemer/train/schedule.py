"""The learning rate at each step, as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from bessemer.recipe import Optimizer
from bessemer.recipe.resolved import ResolvedSchedule


def learning_rate_share(schedule: ResolvedSchedule, step: int, steps: int) -> float:
    """Return the share of the peak learning rate for the update number `step` (0-based) of `steps`.

    Warmup rises linearly and reaches 1 at update `warmup_steps`; where there is an end, the last update has `final_share`.
    """
    warmup = min(schedule.warmup_steps, steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    start = schedule.decay_start(steps)
    peak = min(warmup, steps - 2) if start is None else start - 1  # the last update at the peak
    progress = min(max(step - peak, 0) / max(steps - 1 - peak, 1), 1.0)
    return SHARES[schedule.kind](schedule.final_share, progress, (warmup + 1) / (step + 1))


def _cosine(final: float, progress: float, warmup_part: float) -> float:
    """Half a cosine between the peak and the final share (Loshchilov and Hutter 2017)."""
    return final + (1.0 - final) * ((1 + math.cos(math.pi * progress)) / 2)


def _linear(final: float, progress: float, warmup_part: float) -> float:
    """A line from the peak to the final share."""
    return final + (1.0 - final) * (1.0 - progress)


def _inverse_sqrt(final: float, progress: float, warmup_part: float) -> float:
    """The root of warmup / step (Vaswani et al. 2017, section 5.3), not below `final_share`."""
    return max(math.sqrt(warmup_part), final)


# Share of the peak of an update after the warmup, from final_share, the progress between the peak (0) and the last update (1),
# and the part of the updates so far that were warmup.
SHARES: dict[str, Callable[[float, float, float], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "inverse_sqrt": _inverse_sqrt,
    "wsd": _linear,  # after a constant rate (Hu et al. 2024; linear decay after Hägele et al. 2024)
    "constant": lambda *_: 1.0,
}


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
