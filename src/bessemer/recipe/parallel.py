"""[parallel] and [cluster] of the recipe: how a run is split over processes, and on which machines they run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bessemer.recipe.section import Positive, Section, Words

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"]
V_SHAPED: tuple[PipelineSchedule, ...] = ("zbv", "dualpipev")
"""Two stages a rank, placed down the ranks and up again: rank r of p has stages r and 2p - 1 - r (Qi et al. 2024)."""
SEVERAL_STAGES: tuple[PipelineSchedule, ...] = ("interleaved", *V_SHAPED)  # on each rank


def stages_per_rank(schedule: str, pipeline: int, virtual: int | None = None) -> int:
    """Pipeline stages on each rank; a schedule that needs several has two unless `virtual` says otherwise."""
    return virtual or (2 if pipeline > 1 and schedule in SEVERAL_STAGES else 1)


def interleaved_rounds(pipeline: int, count: int) -> int:
    """Rounds, which must be of equal size, in which the interleaved schedule takes `count` micro-batches, as in torch.

    One round is what goes through one stage of a process before the next stage has its turn (Narayanan et al. 2021, section
    2.2.2, where it is as many micro-batches as there are processes).
    """
    return max(1, count // pipeline)


class Parallel(Section):
    """How a run is split. The product of the five ways is the number of processes; 1 everywhere: one process."""

    auto: bool = False
    """Let the planner choose the layout it predicts to be fastest on the devices of [cluster], or of this machine."""
    replicate: Positive = Field(1, description="Copies of the model, each for its own part of the batch.")
    shard: Positive = 1
    """Processes that share one copy's optimizer state, gradients and weights (see zero), and the batch."""
    tensor: Positive = Field(1, description="Processes that share every matrix: heads, hidden units, vocabulary.")
    pipeline: Positive = Field(1, description="Stages of blocks, each on its own process.")
    context: Positive = Field(1, description="Processes that share every sequence.")
    zero: Literal[1, 2, 3] = 3
    """What `shard` divides: 1: optimizer state; 2: gradients too; 3: weights too."""
    schedule: PipelineSchedule = "1f1b"
    """Order of the micro-batches in the pipeline: gpipe, 1f1b, interleaved, zbv or dualpipev."""
    virtual: Positive | None = None
    """Stages a process of the pipeline holds; left out: 2 for interleaved, zbv and dualpipev, else 1."""
    offload: bool = Field(False, description="Keep sharded weights, gradients and optimizer state in the CPU's memory.")
    restarts: int = Field(3, ge=0, description="Times that the group starts again after a process was lost.")
    elastic: bool = False
    """Go on with fewer or more processes than before: replicate, else shard, follows their number."""

    @property
    def world(self) -> int:
        """Processes of the run."""
        return self.replicate * self.shard * self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Processes (groups of them) that each take a part of the batch."""
        return self.replicate * self.shard

    @model_validator(mode="after")
    def _chosen_once(self) -> Self:
        chosen = [way for way in ("replicate", "shard", "tensor", "pipeline", "context") if getattr(self, way) > 1]
        if self.auto and chosen:
            raise ValueError(f"auto = true chooses {chosen[0]} itself; leave one of the two out")
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        if self.virtual is not None and self.virtual > 1 and self.schedule not in SEVERAL_STAGES:
            raise ValueError(
                f"parallel.virtual = {self.virtual} needs a schedule with several stages a process: {', '.join(SEVERAL_STAGES)}"
            )
        if self.schedule in V_SHAPED and self.virtual not in (None, 2):
            raise ValueError(f"parallel.schedule = {self.schedule} has 2 stages a process, not {self.virtual}")
        return self

    @property
    def stages_each(self) -> int:
        """Pipeline stages on each process."""
        return stages_per_rank(self.schedule, self.pipeline, self.virtual)

    @property
    def is_v_shaped(self) -> bool:
        """Whether the pipeline's stages go down the ranks and up again."""
        return self.pipeline > 1 and self.schedule in V_SHAPED

    @property
    def uses_ddp(self) -> bool:
        """Whether the processes are plain replicas, whose gradients DDP adds up."""
        return self.replicate > 1 and self.shard * self.context * self.tensor * self.pipeline == 1

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 adds the gradients up: wherever several processes hold parts of the data, but for plain replicas."""
        return self.data * self.context > 1 and not self.uses_ddp

    def fits_micro_batches(self, count: int) -> bool:
        """Whether the pipeline schedule can run so many micro-batches a step."""
        if self.schedule == "gpipe" or self.pipeline == 1:
            return count >= 1
        if self.schedule == "interleaved":  # at least one for each process in each round
            return count >= self.pipeline and count % interleaved_rounds(self.pipeline, count) == 0
        return count >= self.min_micro_batches

    @property
    def min_micro_batches(self) -> int:
        """The smallest number of micro-batches a step that every part of the batch needs."""
        if self.schedule == "gpipe" or self.pipeline == 1:
            return 1
        return self.pipeline * (2 if self.schedule == "dualpipev" else 1)

    def batch_complaint(self, sequences: int, micro_batch: int | None, sequence_length: int) -> str | None:
        """Why a global batch cannot be divided among the parts of the batch, with what would do; None: it can."""
        size = micro_batch or 1
        if sequences % (self.data * size) == 0:
            return None
        parts = f"{self.data} parts of the batch (replicate x shard)"
        of = f"the {sequences} sequences of a global batch"
        if sequences % self.data:
            unit = self.data * sequence_length
            low = max(sequences // self.data, 1) * unit
            divisors = [n for n in range(1, min(sequences, 4096) + 1) if sequences % n == 0]
            return (
                f"parallel: {parts} do not divide {of}; train.global_batch_tokens may be {low} or {low + unit}, or the parts "
                f"{', '.join(map(str, divisors[:12]))}"
            )
        each = sequences // self.data
        fits = ", ".join(str(n) for n in range(1, each + 1) if each % n == 0)
        return (
            f"parallel: {parts} with train.micro_batch = {size} do not divide {of}; train.micro_batch may be {fits}, or left "
            "out: it is then chosen to fit"
        )


NAME = r"^[A-Za-z0-9][A-Za-z0-9._,|&*()\[\]-]*$"  # what partitions, accounts and constraints are made of


class Cluster(Section):
    """The machines of a training on several nodes. Changes nothing of what is trained."""

    device: str | None = Field(None, min_length=1)
    """Device to plan for, by its name in the catalogue (`bessemer plan --devices`); left out: this machine's."""
    devices: Positive | None = None
    """Devices to plan for, all together; left out: nodes x devices_per_node, or what [parallel] comes to."""
    devices_per_node: Positive | None = Field(None, description="Devices in a node; left out: as the catalogue has it.")
    intra_bandwidth: float | None = Field(None, gt=0)
    """GB/s that a device sends to others of its node, one way; left out: the catalogue's."""
    inter_bandwidth: float | None = Field(None, gt=0)
    """GB/s that a device sends out of its node, one way; left out: the catalogue's."""
    storage_bandwidth: float = Field(2.0, gt=0)
    """GB/s that a node writes to and reads from the storage of checkpoints and tokens."""
    price: float | None = Field(None, gt=0, description="Dollars per device-hour; left out: the catalogue's, dated.")
    failures_per_node_year: float | None = Field(None, gt=0)
    """Failures of a node in a year that end a training; left out: a published rate."""
    catalogue: str | None = Field(None, description="A file of your own devices, in the catalogue's form.")
    framework: str = "bessemer"
    """Framework whose memory and overlap the plan models: bessemer, or one it was validated on, as megatron-lm."""
    nodes: Positive = 1
    """Nodes, with equally many processes each; left out: `launch` takes as many as the processes fill where device or
    devices_per_node says what a node has."""
    min_nodes: Positive | None = None
    """Fewest nodes to go on with when some are lost (needs parallel.elastic); left out: all."""
    cpus_per_process: Positive = Field(8, description="Cores that the scheduler is asked for, for each process.")
    memory: str | None = Field(None, pattern=r"^[0-9]+[KMGT]i?$")
    """Memory of a node, as 900Gi; left out: all of it (slurm), or 32Gi a process without a limit (kubernetes)."""
    time: str = Field("24:00:00", pattern=r"^([0-9]+-)?[0-9]{1,2}:[0-9]{2}:[0-9]{2}$")
    """Time limit of a job (slurm), [DAYS-]HH:MM:SS; a training that is longer goes on in the next one."""
    save_seconds: Positive = 300
    """Time to finish a step and save it: so long before the limit the job is told to stop."""
    partition: str | None = Field(None, pattern=NAME, description="Partition (slurm).")
    account: str | None = Field(None, pattern=NAME, description="Account to charge (slurm).")
    qos: str | None = Field(None, pattern=NAME, description="Quality of service (slurm).")
    constraint: str | None = Field(None, pattern=NAME, description="Features that nodes must have (slurm).")
    image: str | None = Field(None, pattern=r"^[^\s'\"]+$")
    """Container image; needed for kubernetes, for slurm with pyxis."""
    mounts: Words = Field((), description="Folders in the container, as /here:/there (slurm with pyxis).")
    setup: Words = Field((), description="Shell lines before the training starts, as module load cuda (slurm).")
    port: int = Field(29500, ge=1024, le=64000, description="Port of the first node at which the nodes meet.")
    namespace: str | None = Field(None, pattern=r"^[a-z0-9-]+$", description="Namespace (kubernetes).")
    claim: str | None = Field(None, pattern=r"^[a-z0-9.-]+$")
    """Volume claim (ReadWriteMany) for the run folder (kubernetes)."""
    mount: str = Field("/data", pattern=r"^/[^\s'\"]*$", description="Where the claim is mounted (kubernetes).")
    shared_memory: str = Field("16Gi", pattern=r"^[0-9]+[KMGT]i?$")
    """Size of /dev/shm, which NCCL uses within a node (kubernetes)."""

    @model_validator(mode="after")
    def _fewer_are_fewer(self) -> Self:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes = {self.min_nodes} is more than nodes = {self.nodes}")
        return self
