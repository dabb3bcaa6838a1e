"""The recipe's table about a cluster: what `bessemer plan` counts with and `bessemer launch` asks its scheduler for."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from bessemer.recipe.section import Positive, Section, Words

NAME = r"^[A-Za-z0-9][A-Za-z0-9._,|&*()\[\]-]*$"  # what partitions, accounts and constraints are made of


class Cluster(Section):
    """The machines of a training on several nodes. Changes nothing of what is trained."""

    device: str | None = Field(
        None,
        min_length=1,
        description="Device to plan for, by its name in the catalogue (`bessemer plan --devices`), as H100; left out: this "
        "machine's.",
    )
    devices: Positive | None = Field(
        None,
        description="Devices to plan for, all together; left out: nodes x devices_per_node, or what [parallel] comes to.",
    )
    devices_per_node: Positive | None = Field(None, description="Devices in a node; left out: as the catalogue has it.")
    intra_bandwidth: float | None = Field(
        None, gt=0, description="GB/s that a device sends to others of its node, one way; left out: the catalogue's."
    )
    inter_bandwidth: float | None = Field(
        None, gt=0, description="GB/s that a device sends out of its node, one way; left out: the catalogue's."
    )
    storage_bandwidth: float = Field(
        2.0, gt=0, description="GB/s that a node writes to and reads from the storage of checkpoints and tokens."
    )
    price: float | None = Field(
        None, gt=0, description="Dollars for a device and hour; left out: the catalogue's, with its date."
    )
    failures_per_node_year: float | None = Field(
        None, gt=0, description="Failures of a node in a year that end a training; left out: a published rate."
    )
    catalogue: str | None = Field(None, description="A file of your own devices, in the catalogue's form.")
    stack: str = Field(
        "bessemer",
        description="Whose habits the plan assumes: bessemer, or a program that its figures were held against, as megatron-lm.",
    )
    nodes: Positive = Field(
        1,
        description="Nodes; each runs as many of the processes of [parallel] as the others. Left out: `launch` takes as many as "
        "the processes fill, where device or devices_per_node says what a node has.",
    )
    min_nodes: Positive | None = Field(
        None, description="Fewest nodes to go on with when some are lost (needs parallel.elastic); left out: all."
    )
    cpus_per_process: Positive = Field(8, description="Cores that the scheduler is asked for, for each process.")
    memory: str | None = Field(
        None,
        pattern=r"^[0-9]+[KMGT]i?$",
        description="Memory of a node, as 900Gi; left out: all of it (slurm), or 32Gi a process without a limit (kubernetes).",
    )
    time: str = Field(
        "24:00:00",
        pattern=r"^([0-9]+-)?[0-9]{1,2}:[0-9]{2}:[0-9]{2}$",
        description="Time limit of a job (slurm), [DAYS-]HH:MM:SS; a training that is longer goes on in the next one.",
    )
    save_seconds: Positive = Field(
        300, description="Time to finish a step and save it: so long before the limit the job is told to stop."
    )
    partition: str | None = Field(None, pattern=NAME, description="Partition (slurm).")
    account: str | None = Field(None, pattern=NAME, description="Account to charge (slurm).")
    qos: str | None = Field(None, pattern=NAME, description="Quality of service (slurm).")
    constraint: str | None = Field(None, pattern=NAME, description="Features that nodes must have (slurm).")
    image: str | None = Field(
        None, pattern=r"^[^\s'\"]+$", description="Container image; needed for kubernetes, for slurm with pyxis."
    )
    mounts: tuple[str, ...] = Words((), "Folders in the container, as /here:/there (slurm with pyxis).")
    setup: tuple[str, ...] = Words((), "Shell lines before the training starts, as module load cuda (slurm).")
    port: int = Field(29500, ge=1024, le=64000, description="Port of the first node at which the nodes meet.")
    namespace: str | None = Field(None, pattern=r"^[a-z0-9-]+$", description="Namespace (kubernetes).")
    claim: str | None = Field(
        None, pattern=r"^[a-z0-9.-]+$", description="Volume claim (ReadWriteMany) for the run folder (kubernetes)."
    )
    mount: str = Field(
        "/data", pattern=r"^/[^\s'\"]*$", description="Where the claim is in the container (kubernetes)."
    )
    shared_memory: str = Field(
        "16Gi", pattern=r"^[0-9]+[KMGT]i?$", description="Size of /dev/shm, which NCCL uses within a node (kubernetes)."
    )

    @model_validator(mode="after")
    def _fewer_are_fewer(self) -> Self:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes = {self.min_nodes} is more than nodes = {self.nodes}")
        return self
