"""How long a step's micro-batches take to pass a pipeline: closed forms where they are the schedule's own time, and its
action list simulated elsewhere.

Times in seconds; forward, backward: of each stage for a micro-batch, by stage (p x v of them); send: of a result.
"""

from __future__ import annotations

from functools import lru_cache

from bessemer.layout.schedules import generate
from bessemer.plan.timetable import Durations, simulate


def passage(
    name: str, ranks: int, virtual: int, micro_batches: int, forward: tuple[float, ...], backward: tuple[float, ...], send: float
) -> float:  # fmt: skip
    """Seconds from the first forward to the last backward.

    GPipe: the forwards and then the backwards, each a flow through stages in order. 1F1B: see `_alternating`. Interleaved: the
    slowest rank's stages together, with the way down and up 1/v as long (Narayanan et al. 2021, section 2.2). ZB-V, DualPipeV:
    what the simulated list idles, stages alike, beside the work of the slowest rank.
    """
    if ranks == 1:
        return micro_batches * (sum(forward) + sum(backward))
    if name == "gpipe":
        ways = 2 * send * (ranks - 1)
        return sum(forward) + sum(backward) + (micro_batches - 1) * (max(forward) + max(backward)) + ways
    if name == "1f1b":
        return _alternating(micro_batches, forward, backward, send)
    if name == "interleaved":
        by_rank = [sum(forward[rank::ranks]) + sum(backward[rank::ranks]) for rank in range(ranks)]
        ways = (sum(by_rank) - max(by_rank)) / virtual + 2 * send * (ranks - 1)
        return micro_batches * max(by_rank) + ways
    one = sum(forward) / len(forward)
    ratio = round(sum(backward) / sum(forward), 1)
    idle = _idle(name, ranks, micro_batches, ratio, round(send / one, 2))
    by_rank = [sum(forward[stage] + backward[stage] for stage in (rank, 2 * ranks - 1 - rank)) for rank in range(ranks)]
    return micro_batches * max(by_rank) + idle * one


def _alternating(micro_batches: int, forward: tuple[float, ...], backward: tuple[float, ...], send: float) -> float:
    """1F1B: the stage that takes longest with all that it waits for.

    Stage k first waits for the first forward of those before it, and its last backward has to pass them. It sends w = p - 1 - k
    micro-batches ahead, and waits where these take less time than a micro-batch takes on its way behind it and back: once for
    its first backward, after w forwards, and once for its last, after w backwards. With stages alike this is
    (p - 1)(F + B) in all. With no more than w micro-batches it is a way through all stages and the stage's other micro-batches.
    """
    whole = [one + other for one, other in zip(forward, backward, strict=True)]
    before, total, stages, longest = 0.0, sum(whole), len(whole), 0.0
    for k, (one, other) in enumerate(zip(forward, backward, strict=True)):
        ahead = stages - 1 - k
        behind = total - before - whole[k] + 2 * send * ahead
        through = total + 2 * send * (stages - 1) + (micro_batches - 1) * whole[k]
        if micro_batches > ahead:
            waits = max(behind - ahead * one, 0.0) + max(behind - ahead * other, 0.0)
            through = min(through, before + 2 * send * k + micro_batches * whole[k] + waits)
        longest = max(longest, through)
        before += whole[k]
    return longest


@lru_cache(maxsize=512)
def _idle(name: str, ranks: int, micro_batches: int, ratio: float, send: float) -> float:
    """Forwards of one stage that a schedule takes beyond a rank's work. In its steady state a further micro-batch adds none, so
    that no more than 4 p micro-batches are simulated."""
    enough = min(micro_batches, 4 * ranks)
    return simulate(generate(name, ranks, enough), Durations(1.0, ratio, send)).timesteps - enough * 2 * (1.0 + ratio)
