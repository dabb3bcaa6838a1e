"""The clock of a calibration: everything is timed in turns, round after round, until it is stable or the time is up.

Turns, because a machine that others use is slow for seconds at a time: what is timed once in each of many rounds meets the same
neighbours as everything else, and a median over rounds forgets the bad ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, thread_time
from typing import Any

from bessemer.plan.machine import Timing

Clock = Callable[[], float]

LEAST_ROUNDS = 3
ENOUGH_ROUNDS = 15
STABLE = 0.03  # spread of the median item, at which more rounds would teach little
SHORTEST = 5e-4  # seconds of one timing: shorter ones are repeated, for the clock's and the caller's own time to vanish
MOST_REPEATS = 200


@dataclass
class Item:
    """Something to be timed. call: does it so many times, and returns the seconds that took."""

    key: tuple[Any, ...]
    call: Callable[[int], float]
    repeats: int = 1
    seconds: list[float] = field(default_factory=list)

    def timing(self) -> Timing:
        """Median and spread of what was timed so far."""
        return timing_of(self.seconds)


def timing_of(seconds: Sequence[float]) -> Timing:
    """Median, and the interquartile range as a share of it."""
    middle = median(seconds)
    return Timing(middle, (_quantile(seconds, 0.75) - _quantile(seconds, 0.25)) / middle if middle > 0 else 0.0)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def timer_of(threads: int, is_cuda: bool = False) -> Clock:
    """What a call's own seconds are read from: with one thread on a CPU those that it had the core, which a neighbour that takes
    turns with it does not lengthen; else the wall's."""
    return thread_time if threads == 1 and not is_cuda else perf_counter


def timed(work: Callable[[int], object], timer: Clock) -> Callable[[int], float]:
    """A call that says how long it took."""

    def call(repeats: int) -> float:
        began = timer()
        work(repeats)
        return timer() - began

    return call


def measure(
    items: Sequence[Item], budget: float, clock: Clock, advance: Callable[[float], None] = lambda seconds: None
) -> int:
    """Time every item in rounds for at most about `budget` seconds, and at least once each. Returns the number of rounds.

    The first round warms up and finds how often a short item is repeated. Ends early when the median item's spread is below
    STABLE after ENOUGH_ROUNDS // 2 rounds, and after ENOUGH_ROUNDS in any case.
    """
    started = clock()

    def left() -> float:
        return budget - (clock() - started)

    for item in items:
        item.call(1)
        once = max(item.call(1), 1e-9)
        item.repeats = min(max(round(SHORTEST / once), 1), MOST_REPEATS)
        item.seconds = []
        if left() < 0 and once > SHORTEST:
            item.seconds.append(once)  # perhaps there will be no round that reaches it
    done = 0
    longest_round = 0.0
    while done < ENOUGH_ROUNDS:
        if done and left() < longest_round:
            break
        began = clock()
        for item in items:
            then = clock()
            item.seconds.append(max(item.call(item.repeats), 1e-9) / item.repeats)
            advance(clock() - then)
            if left() < 0 and all(other.seconds for other in items):
                return done
        done += 1
        longest_round = max(longest_round, clock() - began)
        if done >= ENOUGH_ROUNDS // 2 and median(item.timing().spread for item in items) < STABLE:
            break
    return done
