"""How likely a layout is to run out of memory, by how much of the device it is planned to take.

Measured over planned peak memory is taken as lognormal: a run fails where it lies above what a device really has. Median and
spread were fitted to the 272 runs of the 1.34B and 8.86B models of nanotron's H100 sweep with at most 8 tensor ranks (101
failed); the 328 runs of its 3.57B and 80B models, which took no part, fit best with the same two figures
(docs/plan-accuracy.md#risk). A device has a little more than its data sheet says (81,559 MiB are 85.5e9 bytes of an H100's 80
GB), which is why the median lies above 1.
"""

from __future__ import annotations

from math import log
from statistics import NormalDist

MEDIAN_LIMIT = 1.06
"""Planned bytes over the data sheet's at which half of the runs fail."""
SPREAD = 0.16
"""Standard deviation of the logarithm of measured over planned bytes."""
OTHER_FAILURES = 0.05
"""Share of the sweep's runs that failed with memory to spare: hangs and time limits. Not part of the risk."""
HEADROOM = 0.15
"""Default share of a device's memory that a chosen layout leaves free: of the sweep's runs that were planned to leave more, fewer
than 5% failed, hangs included."""


def out_of_memory(planned_bytes: float, device_bytes: float) -> float:
    """Probability from 0 to 1 that a layout of so many planned bytes runs out of a device's memory."""
    if planned_bytes <= 0:
        return 0.0
    return NormalDist(log(MEDIAN_LIMIT), SPREAD).cdf(log(planned_bytes / device_bytes))
