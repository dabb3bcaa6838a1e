"""A training job for the planner: model, layout, cluster, precision and training program.

The classes hold values only; `memory` and `step` estimate from them. Sizes are in bytes, rates in FLOP/s and bytes/s,
times in seconds and prices in dollars.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    """Efficiencies of devices and networks relative to their data sheets, and fixed costs in seconds.

    `matmuls`, `attention`, `bandwidth`, `start`, `depth`, `near`, `step` and `Framework.launch` were fitted to the
    single-node A100 set (vTrain's). That set leaves `matmuls` open between 0.83 and 1.0; the round value within was
    chosen with the other sets in view. `intra` and `call` were fitted to the same set together with 22 us and the 0.67
    to 0.74 of the link that NCCL reaches on a B200 node (MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json).
    `inter` and `far` are typical reports of NCCL's tests over InfiniBand. The `spread` of 1% is assumed, and was added
    with the large sets in view: a synchronous step waits for the slowest device, and Sinha et al. 2022 ("Not All GPUs
    Are Created Equal") see 8% between the fastest and the slowest of a cluster, four standard deviations in either
    direction.

    Attributes:
        matmuls: Rate of a training step's matmuls over the best measured rate of a single one.
        attention: Rate of unfused attention's matmuls over that of other matmuls.
        bandwidth: Share of the memory bandwidth that element-wise passes reach.
        intra: Share of the link bandwidth that collectives reach within a node.
        inter: Share of the link bandwidth that collectives reach between nodes.
        start: Device seconds to fill and drain for one kernel.
        depth: Inner dimension over which a matmul's pipeline fills.
        launch: Factor on the host's seconds for a kernel (`Framework.launch`).
        call: Seconds of a collective before it moves data.
        near: Seconds of one hop within a node.
        far: Seconds of one hop between nodes.
        step: Host seconds of a step outside its blocks.
        spread: Standard deviation of the relative speed of devices of one kind.
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
"""Bytes of an activation element by precision; 16 bits also around fp8 matmuls."""

TRAIN = Train()
Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True)
class Layout(AxisSizes):
    """A division of a model, its state and its batch over devices.

    Attributes:
        zero: State that `shard` divides: 0 none (ranks of `shard` are then replicas), 1 optimizer state, 2 also
            gradients, 3 also weights.
        virtual: Pipeline stages on each device.
        expert: Ranks of a pipeline stage that divide the experts of a mixture.
        micro_batch: Sequences of one forward pass.
        sequence_parallel: True if tensor ranks divide the tokens between matmuls (Korthikanti et al. 2022, section
            4.2.2).
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
        """Pipeline stages on each device. Schedules that need several have two unless `virtual` is higher."""
        return stages_per_rank(self.schedule, self.pipeline, self.virtual if self.virtual > 1 else None)


def parallel(layout: Layout) -> Parallel:
    """Convert a layout to a recipe's [parallel] section, with `shard` as `replicate` if ZeRO divides nothing."""
    copies, shard = (layout.data, 1) if layout.zero == 0 else (layout.replicate, layout.shard)
    rest = layout.tensor, layout.pipeline, layout.context, layout.expert
    zero = cast(Literal[1, 2, 3], layout.zero or 1)
    return _parallel((copies, shard, *rest), zero, layout.schedule, layout.stages_per_rank)


@lru_cache(maxsize=65_536)
def _parallel(sizes: tuple[int, ...], zero: Literal[1, 2, 3], schedule: PipelineSchedule, virtual: int) -> Parallel:
    axes: dict[str, Any] = dict(zip(AXES, sizes, strict=True))
    return Parallel.model_construct(**axes, zero=zero, schedule=schedule, virtual=virtual)


def domain_size(device: DeviceSpec, devices: int) -> int:
    """Return the devices of one scale-up domain (devices joined by the fast links) in a cluster of `devices` devices.

    Prefers domains of equal size and whole nodes if this size is at least half of the largest possible one.
    """
    largest, per_node = min(device.scale_up_domain, devices), device.per_node
    equal = (n for n in range(largest, largest // 2, -1) if n % per_node == 0 and devices % n == 0)
    return next(equal, largest)


@dataclass(frozen=True)
class ClusterSpec:
    """The devices of a cluster and the links between them.

    Attributes:
        device: Kind of device.
        devices: Number of devices.
        per_node: Devices of a node.
        intra_bandwidth: Bytes/s that one device sends within its domain, one way.
        inter_bandwidth: Bytes/s that one device sends out of its domain, one way.
        domain: Devices that reach each other at `intra_bandwidth`, as in an NVLink rack or a TPU slice; 0: those of a
            node.
    """

    device: DeviceSpec
    devices: int
    per_node: int
    intra_bandwidth: float
    inter_bandwidth: float
    domain: int = 0

    @classmethod
    def of(cls, device: DeviceSpec, devices: int) -> ClusterSpec:
        """Return a cluster of this many devices in typical nodes."""
        per_node, domain = min(device.per_node, devices), domain_size(device, devices)
        return cls(device, devices, per_node, device.intra_bandwidth, device.inter_bandwidth, domain)

    @property
    def near(self) -> int:
        """Devices that reach each other at `intra_bandwidth`."""
        return self.domain or self.per_node

    def intra_rate(self, size: int) -> float:
        """Return the bytes/s that one device moves within a group of `size` devices of a domain.

        On a torus, the group spans as many axes of a cubic domain as its size needs, and has the links of these axes
        (jax-ml scaling book, "How to think about TPUs").
        """
        axes = self.device.torus
        if not axes or size >= self.near:
            return self.intra_bandwidth
        used = min(max(round(axes * log(size) / log(self.near)), 1), axes) if size > 1 else 1
        return self.intra_bandwidth * used / axes

    @property
    def nodes(self) -> int:
        """Nodes of the cluster, including a partial last one."""
        return -(-self.devices // self.per_node)


@dataclass(frozen=True)
class Job:
    """A training job: one step of a model on a cluster, in a given layout and precision.

    Attributes:
        model: Model to train.
        layout: Division over devices.
        cluster: Devices and links.
        batch: Global batch, in sequences of `model.sequence_length` tokens.
        precision: Precision of matmuls.
        framework: Profile of the training program.
        train: Training settings that determine memory; used for Bessemer only.
        offload: True if sharded weights, gradients and optimizer state stay in CPU memory; used for Bessemer only.
    """

    model: ModelConfig
    layout: Layout
    cluster: ClusterSpec
    batch: int
    precision: Precision
    framework: Framework
    train: Train = field(default=TRAIN, hash=False)  # almost always TRAIN
    offload: bool = False

    @property
    def micro_batches(self) -> int:
        """Forward passes of a step on each device, for each of its stages."""
        return self.layout.micro_batches(self.batch, self.layout.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.batch * self.model.sequence_length

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch on a device; all tensor ranks together, where these divide them between matmuls."""
        return self.layout.micro_batch * self.model.sequence_length // self.layout.context

    @property
    def stream_bytes(self) -> int:
        """Bytes of a micro-batch's hidden states on a device, all tensor ranks together."""
        return ELEMENT_BYTES[self.precision] * self.micro_batch_tokens * self.model.width

    def with_layout(self, **changes: Any) -> Job:
        """Return the job with changed fields of its layout."""
        return replace(self, layout=replace(self.layout, **changes))
