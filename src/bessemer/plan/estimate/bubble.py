"""How long a step's micro-batches take to pass a pipeline: closed forms where they are the schedule's own time, and its
action list simulated elsewhere.

Times in seconds; forward, backward: of each stage for a micro-batch, by stage (p x v of them); send: of a result.
"""

from __future__ import annotations

from functools import lru_cache

from bessemer.plan.schedules import generate
from bessemer.plan.timetable import Durations, simulate


def passage(
    name: str, ranks: int, virtual: int, micro_batches: int, forward: tuple[float, ...], backward: tuple[float, ...], send: float
) -> float:  # fmt: skip
    """Seconds from the first forward to the last backward.

    1F1B and GPipe: the first micro-batch passes all stages both ways, and the slowest stage does the others one after the
    other; exact where stages are alike, and where one is slower (a test compares with the simulation). Interleaved: the same
    of a rank's stages together, with the way down and up 1/v as long (Narayanan et al. 2021, section 2.2). ZB-V, DualPipeV:
    simulated with stages alike, up to as many micro-batches as show what one more takes.
    """
    if ranks == 1:
        return micro_batches * (sum(forward) + sum(backward))
    if name in ("gpipe", "1f1b", "interleaved"):
        stages = ranks * virtual
        by_rank = [
            sum(forward[stage] + backward[stage] for stage in range(rank, stages, ranks)) for rank in range(ranks)
        ]
        slowest = max(by_rank)
        ways = (sum(by_rank) - slowest) / virtual + 2 * send * (ranks - 1)
        return micro_batches * slowest + ways
    one = sum(forward) / len(forward)
    ratio = round(sum(backward) / sum(forward), 1)
    return _simulated(name, ranks, micro_batches, ratio, round(send / one, 2)) * one * _slowest(name, forward, backward)


def _slowest(name: str, forward: tuple[float, ...], backward: tuple[float, ...]) -> float:
    """The slowest rank over the mean one. In a V a rank holds a stage and its mirror image."""
    each = [
        forward[stage] + backward[stage] + forward[-1 - stage] + backward[-1 - stage]
        for stage in range(len(forward) // 2)
    ]
    return max(each) / (sum(each) / len(each))


@lru_cache(maxsize=512)
def _simulated(name: str, ranks: int, micro_batches: int, ratio: float, send: float) -> float:
    """Forwards of one stage that a schedule takes. Once a schedule is in its steady state a further micro-batch adds what one
    costs, so that more than 4 p micro-batches are not simulated."""
    enough = min(micro_batches, 4 * ranks)
    if name == "dualpipev":
        enough = max(enough, min(micro_batches, 2 * ranks))
    time = simulate(generate(name, ranks, enough), Durations(1.0, ratio, send)).timesteps
    return time + (micro_batches - enough) * 2 * (1.0 + ratio)
