"""Failures and checkpoints of a run: mean time between failures, checkpoint interval, effective training time.

Times are in seconds. An interval T runs from the end of one checkpoint to the end of the next and includes the cost C
of the checkpoint (Aupy et al. 2013, section 3; the formulas are in its table 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bessemer.plan.run_cost import DAY

GPUS_PER_NODE = 8
"""GPUs of a node in the published failure rates."""


FAILURES_PER_NODE_DAY = 6.5e-3
"""Failures per node and day, as the authors of the RSC-1 study project them to large jobs. Their small jobs failed three to
four times as often (7.9 h between failures at 1,024 GPUs, where this rate gives 28.8 h). Published rates differ by a factor of
four: OPT's A100s had 1.4e-2 (Zhang et al. 2022, section 2.5)."""
FAILURES_PER_HOPPER_DAY = 3.8e-3
"""Failures per node and day of Hopper GPUs. Llama 3 had 419 unexpected interruptions of 2,048 nodes in 54 days (Grattafiori et
al. 2024, table 5)."""


def published_rate(generation: str | None) -> float:
    """Return the published failures per node and day for a GPU generation (`DeviceSpec.generation`), else a default."""
    return FAILURES_PER_HOPPER_DAY if generation == "Hopper" else FAILURES_PER_NODE_DAY


DETECTION_SECONDS, RESTART_SECONDS = 600.0, 300.0
"""Seconds from a failure to the replaced node, and from there until training continues. The first is MegaScale's bound (Jiang
et al. 2024, section 4: found and diagnosed in less than 10 minutes). The second is assumed: MegaScale catches up within 15
minutes, including the repeated work."""


MIN_INTERVAL_SECONDS, MIN_INTERVALS = 300.0, 20
"""Least seconds between checkpoints on storage, and least number of intervals between two failures (assumed). The second
replaces the first where failures are frequent. A copy to the host stalls training so briefly that minimal waste alone would
write terabytes to shared storage every few steps."""


def mtbf(devices: int, per_node_day: float = FAILURES_PER_NODE_DAY) -> float:
    """Return the mean seconds between failures of a job.

    Args:
        devices: Number of devices. Each fails at an eighth of the rate of a node of eight.
        per_node_day: Failures per node and day.
    """
    return DAY * GPUS_PER_NODE / (devices * per_node_day)


def optimal(mtbf_seconds: float, cost: float) -> float:
    """Return the checkpoint interval of least expected time, in seconds.

    Failures are a Poisson process, and the result is exact (Aupy et al. 2013, section 3). The derivative of
    `exact_time` is zero where 1 + c - x = exp(-x), with x = T / mu and c = C / mu. Newton's method starts from the
    interval of Young (1974), on the side where the function is convex. Neither downtime nor recovery changes the
    optimum.

    Args:
        mtbf_seconds: Mean seconds between failures, mu.
        cost: Seconds of a checkpoint, C.
    """
    relative = cost / mtbf_seconds
    x = math.sqrt(2 * relative) + relative
    for _ in range(50):
        off = -math.expm1(-x) + relative - x  # (1 - exp(-x)) + c - x, precise for small x
        step = off / -math.expm1(-x)
        x += step
        if abs(step) <= 1e-14 * x:
            break
    return mtbf_seconds * x


def exact_time(
    interval: float, mtbf_seconds: float, cost: float, downtime: float = 0.0, recovery: float = 0.0
) -> float:
    """Return the expected time as a multiple of the time without failures and checkpoints.

    The factor is (mu + D) e^(R / mu) (e^(T / mu) - 1) / (T - C), which includes failures during checkpoints and
    recoveries (Aupy et al. 2013, section 3). It is infinite where the result overflows a double.

    Args:
        interval: Seconds from one checkpoint to the next, T.
        mtbf_seconds: Mean seconds between failures, mu.
        cost: Seconds of a checkpoint, C.
        downtime: Seconds from a failure until recovery starts, D.
        recovery: Seconds of a recovery, R.
    """
    if (recovery + interval) / mtbf_seconds > 700:
        return math.inf
    growth = (mtbf_seconds + downtime) * math.exp(recovery / mtbf_seconds) * math.expm1(interval / mtbf_seconds)
    return growth / (interval - cost)


@dataclass(frozen=True)
class CheckpointCost:
    """The cost of one checkpoint.

    Attributes:
        stall: Seconds that training waits for the save.
        write: Seconds until the checkpoint is durable. A failure before that falls back to the previous checkpoint.
        bytes: Bytes written by all devices together.
    """

    stall: float
    write: float
    bytes: float


COPY_BANDWIDTH = 10e9
"""Bytes/s from one device to its host: half of the bandwidth of PCIe 4.0 x16, which two devices share."""


def checkpoint(state_bytes: float, devices: int, storage_bandwidth: float) -> CheckpointCost:
    """Return the cost of an asynchronous save, in which training continues once the host has a copy.

    Args:
        state_bytes: Bytes of the whole state, each part written once.
        devices: Number of devices that copy their parts in parallel.
        storage_bandwidth: Bytes/s of the storage for all writers together.
    """
    return CheckpointCost(state_bytes / devices / COPY_BANDWIDTH, state_bytes / storage_bandwidth, state_bytes)


@dataclass(frozen=True)
class Outlook:
    """The expected effect of failures and checkpoints on a run.

    Attributes:
        mtbf: Mean seconds between failures.
        interval: Seconds from one checkpoint to the next.
        every: Steps between checkpoints.
        failures: Expected number of failures in the run.
        effective: Share of the time that is neither lost nor spent on checkpoints (effective training time ratio).
        seconds: Duration of the run with failures and checkpoints.
        lost: Seconds lost to failures.
        saves: Seconds spent on checkpoints.
        checkpoints: Number of checkpoints.
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
    """Predict the effect of failures and checkpoints on a run.

    Args:
        training_seconds: Seconds of all steps.
        step_seconds: Seconds of one step.
        mtbf_seconds: Mean seconds between failures.
        save: Cost of one checkpoint.
        every: Steps between checkpoints. None selects the interval of least waste in whole steps, but not below the
            time of a write, because two saves would queue, nor below `MIN_INTERVAL_SECONDS`.
    """
    shortest = min(MIN_INTERVAL_SECONDS, mtbf_seconds / MIN_INTERVALS)
    best = max(optimal(mtbf_seconds, save.stall) - save.stall, save.write, shortest)
    steps = every or max(round(min(best, training_seconds) / step_seconds), 1)
    interval = steps * step_seconds + save.stall
    # The time to detect a failure, and the work that is lost because the last save was not yet durable.
    downtime = DETECTION_SECONDS + max(save.write - save.stall, 0.0)
    seconds = training_seconds * exact_time(interval, mtbf_seconds, save.stall, downtime, RESTART_SECONDS)
    saves = training_seconds / (steps * step_seconds)
    return Outlook(
        mtbf=mtbf_seconds, interval=interval, every=steps, failures=seconds / mtbf_seconds,
        effective=training_seconds / seconds, seconds=seconds,
        lost=seconds - training_seconds - saves * save.stall, saves=saves * save.stall, checkpoints=int(saves),
    )  # fmt: skip
