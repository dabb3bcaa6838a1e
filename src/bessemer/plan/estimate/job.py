"""A training job as the planner sees it: a model, how it is split, on what, and how the software that runs it behaves.

Values only; what they come to is worked out in `memory` and `step`. Sizes in bytes, rates in FLOP/s and bytes/s, times in
seconds, prices in dollars.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from bessemer.layout.devices import Device
from bessemer.model.config import ModelConfig
from bessemer.plan.estimate.stacks import Stack
from bessemer.recipe.parallel import PipelineSchedule

Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True)
class Layout:
    """How a model, its state and its batch are divided.

    zero: what `shard` divides while a step is computed: 0 nothing (the ranks of `shard` are then copies, as those of
    `replicate`), 1 optimizer state, 2 gradients too, 3 weights too; virtual: pipeline stages on each device; micro_batch:
    sequences of one forward pass; sequence_parallel: whether tensor ranks divide the tokens between the products (Korthikanti
    et al. 2022, section 4.2.2).
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    zero: int = 1
    schedule: PipelineSchedule = "1f1b"
    micro_batch: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = True

    @property
    def data(self) -> int:
        """Groups of devices that each take a part of the batch."""
        return self.replicate * self.shard

    @property
    def devices(self) -> int:
        """Devices of the job."""
        return self.data * self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class Cluster:
    """Devices and what joins them. intra, inter: bytes/s that one device sends within its node and out of it, one way."""

    device: Device
    devices: int
    per_node: int
    intra: float
    inter: float

    @classmethod
    def of(cls, device: Device, devices: int) -> Cluster:
        """So many of a device, in nodes as they are typically built."""
        return cls(device, devices, min(device.domain or device.per_node, devices), device.intra, device.inter)

    @property
    def nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.devices // self.per_node)


@dataclass(frozen=True)
class Job:
    """One training step of a model. batch: sequences of the global batch, of model.sequence_length tokens each."""

    model: ModelConfig
    layout: Layout
    cluster: Cluster
    batch: int
    precision: Precision
    stack: Stack

    @property
    def micro_batches(self) -> int:
        """Forward passes of a step on each device (of each of its stages)."""
        return self.batch // (self.layout.data * self.layout.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.model.sequence_length

    def with_layout(self, **changes: Any) -> Job:
        """The same job, split otherwise."""
        return replace(self, layout=replace(self.layout, **changes))
