"""A training job for the planner: a model, its layout, a cluster, a precision and the program that trains it.

Values only; what they come to is worked out in `memory` and `step`. Sizes in bytes, rates in FLOP/s and bytes/s, times in
seconds, prices in dollars.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from typing import Any, Literal, cast

from bessemer.model.config import ModelConfig
from bessemer.plan.devices import DeviceSpec
from bessemer.plan.estimate.frameworks import Framework
from bessemer.recipe import Parallel, Train
from bessemer.recipe.parallel import AXES, AxisSizes, PipelineSchedule, stages_per_rank


@dataclass(frozen=True)
class Physics:
    """What devices and networks reach of what their sheets say, as shares, and what starting something costs, in seconds.

    matmuls: a training step's matmuls, of the best that was measured of one alone; attention: unfused attention's; bandwidth:
    of the memory's, in element-wise passes; intra, inter: of a link's, in collectives; start: of the device for a kernel (fill,
    drain); depth: of a matmul's inner dimension in which its pipeline fills; launch: scales the host's seconds for a kernel
    (Framework.launch); call: seconds of a collective before it moves anything; near, far: of one hop in a node and between nodes;
    step: host seconds of a step outside of its blocks; spread: standard deviation of the speed of devices of one kind.

    matmuls, attention, bandwidth, start, depth, near, step (and Framework.launch) were fitted to the single-node A100 set
    (vTrain's), which leaves matmuls open between 0.83 and 1.0; the round value within was chosen with the other sets in
    view; intra and call to 22 us and 0.67 to 0.74 of the link that NCCL takes on a B200 node (MooreThreads/SimuMax,
    configs/system/b200_bf16_ceperm.json) together with it. inter, far: NCCL over InfiniBand as its tests are usually
    reported. spread, 1%, is assumed (and was added with the large sets in view): a synchronous step waits for the slowest
    device, and Sinha et al. 2022 ("Not All GPUs Are Created Equal") see 8% between the fastest and the slowest of a cluster,
    four standard deviations either way.
    """

    matmuls: float = 0.95
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

ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of an activation; 16 bits around fp8 matmuls too."""

TRAIN = Train()
Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True)
class Layout(AxisSizes):
    """How a model, its state and its batch are divided.

    zero: what `shard` divides while a step is computed: 0 nothing (the ranks of `shard` are then copies, as those of
    `replicate`), 1 optimizer state, 2 gradients too, 3 weights too; virtual: pipeline stages on each device; expert:
    ranks within tensor x context x shard that divide a mixture's experts; micro_batch:
    sequences of one forward pass; sequence_parallel: whether tensor ranks divide the tokens between the matmuls (Korthikanti
    et al. 2022, section 4.2.2).
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 1
    schedule: PipelineSchedule = "1f1b"
    micro_batch: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = True

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages on each device; schedules that need several have two unless `virtual` says more."""
        return stages_per_rank(self.schedule, self.pipeline, self.virtual if self.virtual > 1 else None)


@lru_cache(maxsize=16384)
def parallel(layout: Layout) -> Parallel:
    """A layout as a recipe's section; ranks of `shard` that divide nothing are copies."""
    zero = cast(Literal[1, 2, 3], layout.zero or 1)
    copies, shard = (layout.data, 1) if layout.zero == 0 else (layout.replicate, layout.shard)
    return Parallel.model_construct(
        **{axis: getattr(layout, axis) for axis in AXES} | {"replicate": copies, "shard": shard},
        zero=zero, schedule=layout.schedule, virtual=layout.stages_per_rank,
    )  # fmt: skip


def domain_size(device: DeviceSpec, devices: int) -> int:
    """Devices of a domain of so many devices: equal parts of whole nodes where that leaves at least half of the largest
    domain."""
    largest, per_node = min(device.scale_up_domain, devices), device.per_node
    equal = (n for n in range(largest, largest // 2, -1) if n % per_node == 0 and devices % n == 0)
    return next(equal, largest)


@dataclass(frozen=True)
class ClusterSpec:
    """Devices and what joins them. intra_bandwidth, inter_bandwidth: bytes/s that one device sends within its domain and out
    of it, one way; domain: devices that reach each other so, as a rack that NVLink joins or a slice of a TPU pod; 0: those of a
    node."""

    device: DeviceSpec
    devices: int
    per_node: int
    intra_bandwidth: float
    inter_bandwidth: float
    domain: int = 0

    @classmethod
    def of(cls, device: DeviceSpec, devices: int) -> ClusterSpec:
        """So many of a device, in nodes as they are typically built."""
        per_node, domain = min(device.per_node, devices), domain_size(device, devices)
        return cls(device, devices, per_node, device.intra_bandwidth, device.inter_bandwidth, domain)

    @property
    def near(self) -> int:
        """Devices that reach each other at intra_bandwidth."""
        return self.domain or self.per_node

    def intra_rate(self, size: int) -> float:
        """Bytes/s that a device moves within a group of a domain. On a torus such a group lies along as many axes as it needs of
        a cube of the domain, and has the links of those (jax-ml scaling book, "How to think about TPUs")."""
        axes = self.device.torus
        if not axes or size >= self.near:
            return self.intra_bandwidth
        used = min(max(round(axes * log(size) / log(self.near)), 1), axes) if size > 1 else 1
        return self.intra_bandwidth * used / axes

    @property
    def nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.devices // self.per_node)


@dataclass(frozen=True)
class Job:
    """One training step of a model. batch: sequences of the global batch, of model.sequence_length tokens each; train, offload:
    of a run of this program, as the recipe has them, for its memory."""

    model: ModelConfig
    layout: Layout
    cluster: ClusterSpec
    batch: int
    precision: Precision
    framework: Framework
    train: Train = TRAIN
    offload: bool = False

    @property
    def micro_batches(self) -> int:
        """Forward passes of a step on each device (of each of its stages)."""
        return self.layout.micro_batches(self.batch, self.layout.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.model.sequence_length

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch on a device, between matmuls of all tensor ranks together."""
        return self.layout.micro_batch * self.model.sequence_length // self.layout.context

    @property
    def stream_bytes(self) -> int:
        """Bytes of a micro-batch's hidden states on a device, of all tensor ranks together."""
        return ELEMENT_BYTES[self.precision] * self.micro_batch_tokens * self.model.width

    def with_layout(self, **changes: Any) -> Job:
        """The same job, split otherwise."""
        return replace(self, layout=replace(self.layout, **changes))
