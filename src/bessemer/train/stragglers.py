"""Stragglers: processes that compute longer than those with equal work, so that all others wait for them in every step.

On a CPU what is compared is the time of a step without the waits for data and for other processes (parallel/traffic.py). On
a GPU a process does not see its device wait, so a matmul is timed on each device instead, which shows a clock that was lowered.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median_low
from time import perf_counter

import torch

from bessemer.guard.incidents import STRAGGLER, record
from bessemer.parallel.mesh import ProcessMesh
from bessemer.terminal import step_time, warn
from bessemer.train.device import Device, synchronize
from bessemer.train.metrics import MetricsLog

SLOW_FACTOR = 1.15  # of the median of its peers; published runs look for 10 to 15%
PERSISTENT = 2  # windows in a row
PROBE_EDGE, PROBES = 4096, 5  # of a GPU's matmul


@dataclass(frozen=True)
class RankTime:
    """Mean times of one process in a window. seconds: of computing in a step, or of the matmul; data_wait: seconds a step; work:
    ranks with the same number have equal work: the same pipeline stage and part of the sequences."""

    rank: int
    host: str
    seconds: float
    data_wait: float
    work: int


def excess(times: list[RankTime]) -> dict[int, float]:
    """By rank, the share by which it takes longer than the median of its peers, without ranks that have no peers. Of an even
    number it is the lower median: of two ranks, the slow one is compared with the other."""
    by_work: dict[int, list[RankTime]] = {}
    for one in times:
        by_work.setdefault(one.work, []).append(one)
    return {
        one.rank: one.seconds / max(median_low([peer.seconds for peer in peers]), 1e-9) - 1.0
        for peers in by_work.values()
        for one in peers
        if len(peers) > 1
    }


class Stragglers:
    """Compares the processes in windows of `every` steps, and reports those that are slow in several windows in a row."""

    def __init__(self, mesh: ProcessMesh, device: Device, every: int, incidents: Path) -> None:
        """every: steps, 0 for never; incidents: the file of the run."""
        self._mesh, self._device, self._incidents = mesh, device, incidents
        self._every = 0 if mesh.is_single else every
        self._busy, self._waits = list[float](), list[float]()
        self._windows: dict[int, int] = {}
        self.slow_ranks: dict[int, str] = {}  # a sentence for each, of the first time

    def stepped(self, log: MetricsLog, step: int, busy: float, data_wait: float) -> None:
        """Take in the times of a step. busy: seconds of this process, without waits. Collective at the end of a window."""
        if not self._every:
            return
        self._busy.append(busy)
        self._waits.append(data_wait)
        if step % self._every:
            return
        # The first step of a session compiles, and allocates.
        mine = fmean(self._busy[1:] or self._busy) if not self._device.is_cuda else probe_seconds(self._device)
        work = self._mesh.coordinate("pipeline") * self._mesh.size("context") + self._mesh.coordinate("context")
        own = RankTime(self._mesh.rank, socket.gethostname(), mine, fmean(self._waits), work)
        self._busy, self._waits = [], []
        self._judge(log, step, self._mesh.gather(own))

    def _judge(self, log: MetricsLog, step: int, times: list[RankTime]) -> None:
        shares = excess(times)
        log.write(
            "ranks", step, compute_seconds={str(one.rank): one.seconds for one in times},
            data_wait={str(one.rank): one.data_wait for one in times},
            slowest=max(shares, key=lambda rank: shares[rank], default=None),
        )  # fmt: skip
        for one in times:
            is_slow = shares.get(one.rank, 0.0) > SLOW_FACTOR - 1.0
            self._windows[one.rank] = self._windows.get(one.rank, 0) + 1 if is_slow else 0
            if self._windows[one.rank] < PERSISTENT:
                continue
            peers = [peer.seconds for peer in times if peer.work == one.work]
            what = "a matmul takes" if self._device.is_cuda else "computing takes"
            is_pair = len(peers) == 2
            than, theirs = ("the other rank with the same work", "there") if is_pair else ("its peers", "their median")
            cause = f"rank {one.rank} on {one.host} is {shares[one.rank]:.0%} slower than {than}: {what} "
            cause += f"{step_time(one.seconds)}, {theirs} {step_time(median_low(peers))}"
            if one.rank not in self.slow_ranks and self._mesh.is_main:
                warn(f"step {step}: {cause}; all others wait for it")
                record(
                    self._incidents, STRAGGLER, step=step, cause=cause, rank=one.rank, host=one.host,
                )  # fmt: skip
            self.slow_ranks.setdefault(one.rank, cause)


def probe_seconds(device: Device) -> float:
    """Seconds of a matmul on the device, the best of several."""
    x = torch.ones(PROBE_EDGE, PROBE_EDGE, device=device.torch_device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(PROBES):
        synchronize(device)
        began = perf_counter()
        torch.mm(x, x)
        synchronize(device)
        seconds.append(perf_counter() - began)
    return min(seconds)
