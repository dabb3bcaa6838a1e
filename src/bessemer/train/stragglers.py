"""Stragglers: devices that compute more slowly than the others, so that all processes wait for them in every step.

A process does not see its GPU wait for others. So each device times the same matmul, which reveals a lowered clock.
"""

from __future__ import annotations

import socket
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median_low

import torch

from bessemer.common.console import step_time, warn
from bessemer.distributed.mesh import ProcessMesh
from bessemer.guard.incidents import STRAGGLER, record
from bessemer.train.device import Device, fastest
from bessemer.train.metrics import MetricsLog

SLOW_FACTOR = 1.15  # multiple of the median; published runs look for 10 to 15%
PERSISTENT = 2  # slow comparisons in a row before a device is reported
PROBE_EDGE, PROBES = 4096, 5  # the matmul's edge, and its number of repeats


class Stragglers:
    """The comparison of a run's GPUs every `every` steps, which reports those that are slow several times in a row."""

    def __init__(self, mesh: ProcessMesh, device: Device, every: int, incidents: Path) -> None:
        """Prepare the comparison.

        Args:
            mesh: The processes.
            device: The device of this process.
            every: The number of steps between comparisons; 0 for never.
            incidents: The path of incidents.jsonl.
        """
        self._mesh, self._device, self._incidents = mesh, device, incidents
        self._every = every if device.is_cuda and not mesh.is_single else 0
        self._slow_in_a_row = Counter[int]()  # by rank

    def compare_if_due(self, log: MetricsLog, step: int) -> None:
        """Compare the devices if that is due after `step` steps. All ranks must call it."""
        if not self._every or step % self._every:
            return
        hosts, seconds = zip(*self._mesh.gather((socket.gethostname(), probe_seconds(self._device))), strict=True)
        median = median_low(seconds)  # with two devices, the slow one is compared with the other
        log.write(
            "ranks", step, matmul_seconds={str(rank): one for rank, one in enumerate(seconds)},
            slowest=seconds.index(max(seconds)),
        )  # fmt: skip
        for rank, (host, one) in enumerate(zip(hosts, seconds, strict=True)):
            self._slow_in_a_row[rank] = self._slow_in_a_row[rank] + 1 if one > SLOW_FACTOR * median else 0
            if self._slow_in_a_row[rank] == PERSISTENT and self._mesh.is_main:
                slower = f"rank {rank} on {host} is {one / median - 1:.0%} slower than the median of the ranks"
                cause = f"{slower}: a matmul takes {step_time(one)}, the median {step_time(median)}"
                warn(f"step {step}: {cause}; all other ranks wait for it")
                record(self._incidents, STRAGGLER, step=step, cause=cause, rank=rank, host=host)


def probe_seconds(device: Device) -> float:
    """Return the seconds of a matmul on the device, the best of several."""
    x = torch.ones(PROBE_EDGE, PROBE_EDGE, device=device.torch_device, dtype=torch.bfloat16)
    return fastest(partial(torch.mm, x, x), device, budget=0.0, min_repeats=PROBES)
