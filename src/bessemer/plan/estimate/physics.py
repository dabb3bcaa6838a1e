"""The few numbers of the step's arithmetic that no data sheet gives, each with where it is from.

They are a value and travel with a job, so that a calibration replaces them (estimate/calibrated.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Physics:
    """What devices and networks reach of what their sheets say, as shares, and what starting something costs, in seconds.

    products: a training step's products, of the best that was measured of one alone; attention: unfused attention's; bandwidth:
    of the memory's, in element-wise passes; intra, inter: of a link's, in collectives; start: of the device for a kernel (fill,
    drain); depth: of a product's inner dimension in which its pipeline fills; launch: scales the host's seconds for a kernel
    (Stack.launch); call: seconds of a collective before it moves anything; near, far: of one hop in a node and between nodes;
    step: host seconds of a step beside its blocks; spread: how far devices of one kind differ in speed, as a standard deviation.

    products, attention, bandwidth, start, depth, near, step (and Stack.launch) were fitted to the single-node A100 set
    (vTrain's), which leaves products open between 0.83 and 1.0; the round value within was chosen with the other sets in
    view; intra and call to 22 us and 0.67 to 0.74 of the link that NCCL takes on a B200 node (MooreThreads/SimuMax,
    configs/system/b200_bf16_ceperm.json) together with it. inter, far: NCCL over InfiniBand as its tests are usually
    reported. spread, 1%, is assumed (and was added with the large sets in view): a synchronous step waits for the slowest
    device, and Sinha et al. 2022 ("Not All GPUs Are Created Equal") see 8% between the fastest and the slowest of a cluster,
    four standard deviations either way.
    """

    products: float = 0.95
    attention: float = 0.55
    bandwidth: float = 0.88
    intra: float = 0.74
    inter: float = 0.80
    start: float = 18e-6
    depth: float = 50.0
    launch: float = 1.0
    call: float = 25e-6
    near: float = 6e-6
    far: float = 12e-6
    step: float = 5e-3
    spread: float = 0.01


PHYSICS = Physics()
