"""Failures and checkpoints of a run: mean time between failures, interval of checkpoints, effective share of the time.

Times in seconds. An interval T runs from the end of one checkpoint to the end of the next, so of each T the cost C is spent on
the checkpoint (Aupy et al. 2013, section 3, whose table 2 these functions give).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bessemer.plan.run_cost import DAY

GPUS_PER_NODE = 8
"""Of the nodes that the published rates count."""


FAILURES_PER_NODE_DAY = 6.5e-3
"""Failures of a node in a day, as RSC-1's authors project it to large jobs; their small ones failed three to four times as often
(7.9 h at 1,024 GPUs, where the rate gives 28.8 h). Published rates are fourfold apart: 1.4e-2 on OPT's A100s (Zhang et al. 2022,
section 2.5)."""
FAILURES_PER_HOPPER_DAY = 3.8e-3
"""The same of Hopper: 419 unexpected interruptions of 2,048 nodes in 54 days (Llama 3: Grattafiori et al. 2024, table 5)."""


def published_rate(generation: str | None) -> float:
    """Return the failures of a node in a day."""
    return FAILURES_PER_HOPPER_DAY if generation == "Hopper" else FAILURES_PER_NODE_DAY


DETECTION_SECONDS, RESTART_SECONDS = 600.0, 300.0
"""Default seconds until a failure is found and its node replaced, and from there until training goes on. The first is MegaScale's
bound (Jiang et al. 2024, section 4: found and diagnosed in less than 10 minutes); the second is assumed: they catch up within 15
minutes, of which the work that is done again is a part."""


MIN_INTERVAL_SECONDS, MIN_INTERVALS = 300.0, 20
"""Between checkpoints on storage, at the least, unless failures come less than so many intervals apart: an assumption. A copy to
the host stalls training for so short a time that least waste alone asks for terabytes every few steps, to shared
storage."""


def mtbf(devices: int, per_node_day: float = FAILURES_PER_NODE_DAY) -> float:
    """Mean seconds between failures of a job on `devices` devices, each as likely to fail as an eighth of a node of eight."""
    return DAY * GPUS_PER_NODE / (devices * per_node_day)


def optimal(mtbf_seconds: float, cost: float) -> float:
    """The interval of least expected time when failures are a Poisson process: no approximation (Aupy et al. 2013, section 3).

    exact_time's derivative is zero where 1 + c - x = exp(-x), with x = T / mu and c = C / mu; by Newton from the interval of
    Young (1974), on the side where the function is convex. Neither downtime nor recovery moves it.
    """
    relative = cost / mtbf_seconds
    x = math.sqrt(2 * relative) + relative
    for _ in range(50):
        off = -math.expm1(-x) + relative - x  # (1 - exp(-x)) + c - x, which keeps its digits when x is small
        step = off / -math.expm1(-x)
        x += step
        if abs(step) <= 1e-14 * x:
            break
    return mtbf_seconds * x


def exact_time(
    interval: float, mtbf_seconds: float, cost: float, downtime: float = 0.0, recovery: float = 0.0
) -> float:
    """Expected time over the time without failures and checkpoints: (mu + D) e^(R / mu) (e^(T / mu) - 1) / (T - C), which
    counts failures during checkpoints and recoveries too (Aupy et al. 2013, section 3); infinite beyond what a double holds."""
    if (recovery + interval) / mtbf_seconds > 700:
        return math.inf
    growth = (mtbf_seconds + downtime) * math.exp(recovery / mtbf_seconds) * math.expm1(interval / mtbf_seconds)
    return growth / (interval - cost)


@dataclass(frozen=True)
class CheckpointCost:
    """stall: seconds that training waits for a save; write: seconds until it is durable, during which a failure still falls
    back to the one before; bytes: of all devices."""

    stall: float
    write: float
    bytes: float


COPY_BANDWIDTH = 10e9
"""Bytes/s from one device to its host: half of what PCIe 4.0 x16 carries, shared by two devices."""


def checkpoint(state_bytes: float, devices: int, storage_bandwidth: float) -> CheckpointCost:
    """What an asynchronous save takes: training goes on once the copy lies in the host's memory.

    state_bytes: of the whole state, each part written once; storage_bandwidth: bytes/s of the storage, all writers together.
    """
    return CheckpointCost(state_bytes / devices / COPY_BANDWIDTH, state_bytes / storage_bandwidth, state_bytes)


@dataclass(frozen=True)
class Outlook:
    """What failures and checkpoints take of a run.

    mtbf, interval: seconds; every: steps between checkpoints; failures: expected in the run; effective: share of the
    time that is neither lost nor spent on checkpoints (the effective training time ratio);
    seconds: of the run with them; lost: seconds to failures, saves: seconds to checkpoints.
    """

    mtbf: float
    interval: float
    every: int
    failures: float
    effective: float
    seconds: float
    lost: float
    saves: float
    checkpoints: int


def outlook(
    training_seconds: float, step_seconds: float, mtbf_seconds: float, save: CheckpointCost, every: int | None = None
) -> Outlook:
    """A run of `training_seconds` of steps with a failure every `mtbf_seconds` seconds.

    every: steps between checkpoints; None: they come at the interval of least waste, in whole steps, and no shorter than a write
    takes (two saves would queue) or MIN_INTERVAL_SECONDS allows.
    """
    shortest = min(MIN_INTERVAL_SECONDS, mtbf_seconds / MIN_INTERVALS)
    best = max(optimal(mtbf_seconds, save.stall) - save.stall, save.write, shortest)
    steps = every or max(round(min(best, training_seconds) / step_seconds), 1)
    interval = steps * step_seconds + save.stall
    # Until a failure is found, with the work done while the last save was not durable yet.
    downtime = DETECTION_SECONDS + max(save.write - save.stall, 0.0)
    taken = training_seconds * exact_time(interval, mtbf_seconds, save.stall, downtime, RESTART_SECONDS)
    saves = training_seconds / (steps * step_seconds)
    return Outlook(
        mtbf=mtbf_seconds, interval=interval, every=steps, failures=taken / mtbf_seconds,
        effective=training_seconds / taken, seconds=taken,
        lost=taken - training_seconds - saves * save.stall, saves=saves * save.stall, checkpoints=int(saves),
    )  # fmt: skip
