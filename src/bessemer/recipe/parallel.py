"""[parallel] and [cluster] of the recipe: how a run is divided among processes, and the machines they run on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from pydantic import Field

from bessemer.recipe.section import Positive, SbatchOptions, Section, Words

# Axes along which [parallel] divides the work; and those whose processes work on the same part of the batch. The processes of
# `expert` are some of those of a pipeline stage, so it does not multiply their number.
AXES = ("replicate", "shard", "tensor", "pipeline", "context", "expert")
LAYOUT_KEYS = (*AXES, "zero", "schedule", "virtual")
MODEL_AXES = ("tensor", "pipeline", "context")
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"]


@dataclass(frozen=True)
class ScheduleFacts:
    """Properties of a pipeline schedule.

    Attributes:
        stages_per_rank: Pipeline stages per rank, unless the recipe sets another number.
        is_v_shaped: True if the stages go down the ranks and up again, so that rank r of p has stages r and 2p - 1 - r
            (Qi et al. 2024); then the number of stages is fixed.
        micro_batches_per_rank: Minimum number of micro-batches per step, divided by the number of ranks.
        has_equal_rounds: True if micro-batches are processed in rounds of equal size (`interleaved_rounds`).
        splits_backward: True if gradients of the inputs and of the weights are computed in separate passes.
    """

    stages_per_rank: int = 1
    is_v_shaped: bool = False
    micro_batches_per_rank: int = 1
    has_equal_rounds: bool = False
    splits_backward: bool = False

    def min_micro_batches(self, ranks: int) -> int:
        """Return the minimum number of micro-batches per step for a pipeline of `ranks` ranks."""
        return max(1, self.micro_batches_per_rank * ranks)


SCHEDULES: dict[str, ScheduleFacts] = {
    "gpipe": ScheduleFacts(micro_batches_per_rank=0),
    "1f1b": ScheduleFacts(),
    "interleaved": ScheduleFacts(stages_per_rank=2, has_equal_rounds=True),
    "zbv": ScheduleFacts(stages_per_rank=2, is_v_shaped=True, splits_backward=True),
    "dualpipev": ScheduleFacts(stages_per_rank=2, is_v_shaped=True, splits_backward=True, micro_batches_per_rank=2),
}


def stages_per_rank(schedule: str, pipeline: int, virtual: int | None = None) -> int:
    """Return the pipeline stages on each rank: 1 if `pipeline` is 1, else `virtual` or the schedule's default."""
    return 1 if pipeline == 1 else virtual or SCHEDULES[schedule].stages_per_rank


def stages_complaint(schedule: str, virtual: int | None) -> str | None:
    """Return the reason why a pipeline schedule cannot have `virtual` stages per rank; None if it can or it is not set."""
    facts = SCHEDULES[schedule]
    if virtual is None or virtual == facts.stages_per_rank or (facts.has_equal_rounds and virtual > 1):
        return None
    number = f"{facts.stages_per_rank}{' or more' * facts.has_equal_rounds}"
    return f"runs {number} stages a process, not virtual = {virtual}; leave virtual out, or choose another schedule"


def interleaved_rounds(pipeline: int, count: int) -> int:
    """Return the number of rounds in which the interleaved schedule processes `count` micro-batches, as in torch.

    Rounds must have equal size. In one round micro-batches pass through one stage of a process before its next stage
    runs (Narayanan et al. 2021, section 2.2.2, where a round has as many micro-batches as there are processes).
    """
    return max(1, count // pipeline)


class AxisSizes:
    """Base of layouts: numbers derived from the sizes of the parallel axes, which a subclass defines as attributes."""

    replicate: int
    shard: int
    tensor: int
    pipeline: int
    context: int
    expert: int

    @property
    def world(self) -> int:
        """Number of processes of the run."""
        return self.data * self.ranks_per_part

    @property
    def data(self) -> int:
        """Data-parallel size: number of parts into which the global batch is divided."""
        return self.replicate * self.shard

    @property
    def ranks_per_part(self) -> int:
        """Number of processes that work on the same data-parallel part of the batch (model parallelism)."""
        return prod(getattr(self, axis) for axis in MODEL_AXES)

    @property
    def stage_ranks(self) -> int:
        """Number of processes of a pipeline stage, among which the experts of a layer can be divided."""
        return self.world // self.pipeline

    @property
    def expert_shards(self) -> int:
        """Number of processes that hold the same experts, among which FSDP divides them."""
        return self.stage_ranks // self.expert

    @property
    def state_shards(self) -> int:
        """Number of processes among which FSDP divides weights, gradients and optimizer state."""
        return self.shard * self.context

    def micro_batches(self, sequences: int, micro_batch: int) -> int:
        """Return the number of micro-batches per step in each data-parallel part of the batch; 0 if it is not a whole number.

        `sequences` is the size of the global batch and `micro_batch` that of a micro-batch, both in sequences.
        """
        count, rest = divmod(sequences, self.data * micro_batch)
        return 0 if rest else count


class Parallel(AxisSizes, Section):
    """The layout of a run on processes.

    The product of the sizes of the axes except `expert` is the number of processes; with 1 everywhere there is one process.
    """

    auto: bool = False
    replicate: Positive = 1
    shard: Positive = 1
    tensor: Positive = 1
    pipeline: Positive = 1
    context: Positive = 1
    expert: Positive = 1
    zero: Literal[1, 2, 3] = 3
    schedule: PipelineSchedule = "1f1b"
    virtual: Positive | None = None
    offload: bool = False
    restarts: int = Field(3, ge=0)
    elastic: bool = False

    def _complaints(self) -> Iterator[str]:
        is_open = self.auto and "schedule" not in self.given_layout
        if not is_open and (complaint := stages_complaint(self.schedule, self.virtual)):
            yield f"parallel.schedule = {self.schedule}: {complaint}"

    @property
    def given_layout(self) -> frozenset[str]:
        """Names of the layout keys that the recipe sets; with `auto` the planner keeps them and chooses the others."""
        return frozenset(self.model_fields_set & set(LAYOUT_KEYS))

    def num_devices(self, num_nodes: int, is_cuda: bool) -> int:
        """Return the number of devices of a run: one GPU per process, or on CPU one per node, whose processes share it."""
        return self.world if is_cuda else min(num_nodes, self.world)

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages per process."""
        return stages_per_rank(self.schedule, self.pipeline, self.virtual)

    @property
    def facts(self) -> ScheduleFacts:
        """Properties of the pipeline schedule; the defaults without a pipeline."""
        return SCHEDULES[self.schedule] if self.pipeline > 1 else ScheduleFacts()

    @property
    def uses_ddp(self) -> bool:
        """True if all processes are plain replicas, whose gradients DDP reduces."""
        return self.replicate == self.world > 1 == self.expert

    @property
    def uses_fsdp(self) -> bool:
        """True if FSDP2 reduces the gradients: several processes hold parts of the data or experts and are not plain replicas."""
        return self.replicate * self.state_shards * self.expert > 1 and not self.uses_ddp

    def fits_micro_batches(self, count: int) -> bool:
        """Return True if the pipeline schedule can run `count` micro-batches per step.

        With fewer micro-batches than ranks some stages would always be idle. So training rejects such counts, although
        `distributed.schedules` has schedules for them.
        """
        rounds = interleaved_rounds(self.pipeline, count) if self.facts.has_equal_rounds else 1
        return count >= self.min_micro_batches and count % rounds == 0

    def runs_batch(self, sequences: int, micro_batch: int) -> bool:
        """Return True if the data-parallel parts and the pipeline can run a global batch in micro-batches of this size."""
        return self.fits_micro_batches(self.micro_batches(sequences, micro_batch))

    @property
    def min_micro_batches(self) -> int:
        """Minimum number of micro-batches per step in every data-parallel part of the batch."""
        return self.facts.min_micro_batches(self.pipeline)

    def batch_complaint(self, sequences: int, micro_batch: int | None) -> str | None:
        """Return an error text if the data-parallel parts cannot divide a global batch of `sequences` sequences, else None.

        The text names batch sizes that work.
        """
        if self.micro_batches(sequences, micro_batch or 1):
            return None
        size, micro = self.data, ""
        if micro_batch is not None:
            size, micro = size * micro_batch, f" with train.micro_batch = {micro_batch}"
        low = max(sequences // size, 1) * size
        return (
            f"parallel: {self.data} parts of the batch (replicate x shard){micro} do not divide the {sequences} "
            f"sequence{'s' * (sequences != 1)} of a global batch (train.global_batch_tokens); take {low} or {low + size}"
            f"{', or leave train.micro_batch out' if micro else ''}"
        )


FASTEST = 20_000  # GB/s, far above any network or storage; a larger value was written in another unit


class Cluster(Section):
    """The machines of a run on several nodes, for planning and launching. They do not change the training result."""

    device: str | None = Field(None, min_length=1)
    devices: Positive | None = None
    devices_per_node: Positive | None = None
    inter_bandwidth: float | None = Field(None, gt=0)
    price: float | None = Field(None, gt=0)
    failures_per_node_year: float | None = Field(None, gt=0)
    catalogue: str | None = None
    framework: str = "bessemer"
    nodes: Positive = 1
    min_nodes: Positive | None = None
    save_seconds: Positive = 300
    sbatch: SbatchOptions = ()
    setup: Words = ()
    image: str | None = Field(None, pattern=r"^[^\s'\"]+$")
    mounts: Words = ()
    pod: dict[str, Any] = Field(default_factory=dict)

    def _complaints(self) -> Iterator[str]:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            yield f"min_nodes = {self.min_nodes} is more than nodes = {self.nodes}"
        if (value := self.inter_bandwidth or 0.0) > FASTEST:
            yield f"inter_bandwidth = {value:g} is more than any network has; give GB/s, at most {FASTEST:,}"
