"""The process groups of a run, as a mesh of five axes, and decisions that rank 0 makes for all processes.

The axes are, from the outermost: pipeline, replicate, shard, context, tensor. Ranks along `tensor` communicate most, so
they are neighbours and share a node.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from bessemer.common.errors import BessemerError, InputError, Stopped, first_line
from bessemer.recipe import Parallel
from bessemer.recipe.parallel import AXES, MODEL_AXES

# Neighbouring ranks along the last axis are nearest to each other. AXES has the axes in the order of the recipe, and `expert`.
MESH_AXES = ("pipeline", "replicate", "shard", "context", "tensor")
SHARD_CONTEXT = "shard_context"  # the two axes as one, over which FSDP2 shards
COPIES, EXPERT = "copies", "expert"  # axes of the mesh of experts (expert.py)
TIMEOUT = timedelta(minutes=10)
CONTROL_TIMEOUT = timedelta(minutes=30)  # longer, because the other ranks wait in this group while rank 0 writes

Gathered = TypeVar("Gathered")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ProcessMesh:
    """The processes of a run and the rank of this one.

    Attributes:
        layout: The parallel layout.
        rank: The rank of this process among all processes of the run.
        device_mesh: All processes, with the axes MESH_AXES; None for a run without a process group.
        control: A gloo group for small values on the CPU, whose collectives never wait for a device; None without a process
            group.
    """

    layout: Parallel
    rank: int = 0
    device_mesh: DeviceMesh | None = None
    control: Any = None

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def is_single(self) -> bool:
        """True without a process group; a group of one process is not single."""
        return self.control is None

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes logs and other files of the run."""
        return self.rank == 0

    def coordinate(self, axis: str) -> int:
        return 0 if self.device_mesh is None else self.device_mesh.get_local_rank(axis)

    def size(self, axis: str) -> int:
        return int(getattr(self.layout, axis))

    def group(self, axis: str) -> dist.ProcessGroup:
        assert self.device_mesh is not None, "a single process has no groups"
        return self.device_mesh.get_group(axis)

    @property
    def data_rank(self) -> int:
        """The index of the part of each global batch that this process reads, out of `layout.data` parts."""
        return self.coordinate("replicate") * self.layout.shard + self.coordinate("shard")

    @property
    def is_loss_rank(self) -> bool:
        """True on the ranks whose losses add up to the batch's: last pipeline stage, tensor rank 0, any data and context rank."""
        return self.coordinate("pipeline") == self.loss_coordinate and self.coordinate("tensor") == 0

    @property
    def loss_coordinate(self) -> int:
        """The pipeline coordinate of the last stage; V-shaped schedules place it on the first process."""
        return 0 if self.layout.facts.is_v_shaped else self.layout.pipeline - 1

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a small CPU tensor over all processes."""
        if not self.is_single:
            values = values.clone()
            dist.all_reduce(values, group=self.control)
        return values

    def sum_on_device(self, values: Tensor) -> Tensor:
        """Return the sum over all processes of a small tensor on their training devices, without waiting on the host."""
        if not self.is_single:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Return the sum of a small CPU tensor over data-parallel ranks; ranks that share a part of the batch count once."""
        return self.sum(values if self.leads_data else torch.zeros_like(values))

    @property
    def leads_data(self) -> bool:
        """True on exactly one of the ranks that share a part of the batch."""
        return all(self.coordinate(axis) == 0 for axis in MODEL_AXES)

    def any(self, flag: bool) -> bool:
        """Return True on every process if the flag is set on any process."""
        return flag if self.is_single else bool(self.sum(torch.tensor(int(flag))).item())

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank, on every process. Values must pickle."""
        if self.is_single:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every process."""
        return value if self.is_single else _broadcast(value, 0, self.control)

    def broadcast_from_loss_stage(self, value: Any) -> Any:
        """Return the last stage's value on every process of its pipeline. Values must pickle, with tensors on the CPU."""
        if self.layout.pipeline == 1:
            return value
        assert self.device_mesh is not None
        ranks = self.device_mesh.mesh.select(0, self.loss_coordinate)
        source = int(ranks[tuple(self.coordinate(axis) for axis in MESH_AXES[1:])])
        return _broadcast(value, source, self.group("pipeline"))

    def barrier(self) -> None:
        if not self.is_single:
            dist.barrier(group=self.control)


SINGLE_PROCESS = ProcessMesh(Parallel())


def _broadcast(value: Any, source: int, group: dist.ProcessGroup) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=source, group=group)
    return values[0]


def join(layout: Parallel, device: torch.device, store: dist.Store | None = None) -> ProcessMesh:
    """Initialise the process group described by the launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Args:
        layout: The parallel layout.
        device: The device that this process trains on; it selects NCCL or gloo.
        store: An existing rendezvous store. With one, more processes than the layout needs may have been started, and the
            first ranks join.

    Raises:
        InputError: The layout needs another number of processes.
        BessemerError: The group cannot be reached.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        if store is None:
            require_world(layout, world)
            dist.init_process_group(backend, timeout=TIMEOUT)
        else:
            dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=layout.world)
    except (dist.DistError, RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise BessemerError(f"parallel: rank {rank} cannot join the group at {where}: {first_line(error)}") from None
    sizes = tuple(int(getattr(layout, axis)) for axis in MESH_AXES)
    device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=MESH_AXES)
    for axis in MESH_AXES:  # init_device_mesh leaves torch's default timeout on its groups
        set_timeout(device_mesh.get_group(axis))
    # This is a separate group even if one axis spans all processes.
    control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    return ProcessMesh(layout, rank, device_mesh, control)


def set_timeout(group: dist.ProcessGroup) -> None:
    """Set a group's timeout to the mesh's, instead of torch's default."""
    _set_pg_timeout(TIMEOUT, group)


def leave() -> None:
    """Destroy the process group if one exists."""
    if dist.is_initialized():
        dist.destroy_process_group()


def require_world(layout: Parallel, world: int) -> None:
    """Raise InputError, with layouts that fit, when the layout needs another number of processes than `world`."""
    if layout.world == world:
        return
    product = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in AXES if axis in MESH_AXES)
    rest = layout.ranks_per_part
    if world % rest == 0:
        fits = f"set parallel.shard = {world // rest} and parallel.replicate = 1"
    else:
        divisors = [candidate for candidate in range(1, world + 1) if world % candidate == 0]
        fits = f"set {' x '.join(MODEL_AXES)}, now {rest}, to one of {divisors}"
    raise InputError(f"parallel: {product} = {layout.world} processes, but {world} were started; {fits}")


def on_rank_zero(mesh: ProcessMesh, act: Callable[[], Result]) -> Result:
    """Call `act` on rank 0 and return its result, which must pickle, on every process. Collective.

    Errors are raised as by `gather_scatter`.
    """
    return gather_scatter(mesh, lambda: None, lambda by_rank: [act()] * len(by_rank))


def gather_scatter(
    mesh: ProcessMesh, local: Callable[[], Gathered], decide: Callable[[list[Gathered]], list[Result]]
) -> Result:
    """Gather a value of every process on rank 0, compute each process's result there, and scatter the results. Collective.

    Values and results must pickle. When `local` or `decide` raises on any process, every process raises one error that
    names the rank. A single process raises its own error.

    Args:
        mesh: The processes of the run.
        local: Returns this process's value; called on every process.
        decide: Maps the values, by rank, to the results, by rank; called on rank 0.

    Raises:
        InputError: A process raised an InputError.
        Stopped: A process raised Stopped.
        BessemerError: A process raised another BessemerError or an OSError, which a user can fix.
        RuntimeError: A process raised any other exception.
    """
    if mesh.is_single:
        return decide([local()])[0]
    value, fault, cause = _attempt(local)
    is_main, world = mesh.rank == 0, mesh.world
    gathered: list[Any] | None = [None] * world if is_main else None
    dist.gather_object((value, fault), gathered, dst=0, group=mesh.control)
    answers: list[Any] | None = None
    if gathered is not None:
        failed = next((rank for rank, (_, its_fault) in enumerate(gathered) if its_fault is not None), None)
        if failed is None:
            values = [its_value for its_value, _ in gathered]
            # Check the number of results here: an error below would leave the other processes waiting.
            decided, fault, cause = _attempt(lambda: [one for one, _ in zip(decide(values), values, strict=True)])
            failed = 0 if fault is not None else None
        else:
            fault = gathered[failed][1]
        answers = [(None, (failed, *fault)) if fault else (decided[rank], None) for rank in range(world)]
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, answers, src=0, group=mesh.control)
    answer, failure = scattered[0]
    if failure is not None:
        rank, message, kind = failure
        try:
            raise kind(f"rank {rank}: {message}") from cause
        finally:
            del cause  # it refers to this frame, a reference cycle that would keep the group alive
    result: Result = answer
    return result


def _attempt(act: Callable[[], Any]) -> tuple[Any, tuple[str, type[Exception]] | None, Exception | None]:
    """Return (result, None, None), or after a failure (None, (message, type of error for the other ranks), exception)."""
    try:
        return act(), None, None
    except Exception as error:
        if not isinstance(error, BessemerError | OSError):
            return None, (f"{type(error).__name__}: {error}", RuntimeError), error
        kind = next((kind for kind in (InputError, Stopped) if isinstance(error, kind)), BessemerError)
        return None, (str(error), kind), error
