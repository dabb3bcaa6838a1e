"""The processes of a run, and this one's place among them.

The mesh has five dimensions, the outermost first: pipeline, replicate, shard, context, tensor. Neighbours along `tensor`,
which talk most, have neighbouring ranks and so share a node.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bessemer.errors import BessemerError, InputError
from bessemer.parallel import traffic
from bessemer.recipe import Parallel

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Team:
    """This process among those of its run.

    mesh: all of them, by the axes; None for a process alone. control: a gloo group for small numbers of the host, which
    never waits for a device.
    """

    layout: Parallel
    rank: int = 0
    mesh: DeviceMesh | None = None
    control: Any = None

    @property
    def world(self) -> int:
        """Processes of the run."""
        return self.layout.world

    @property
    def is_alone(self) -> bool:
        """Whether there is no process group at all; a group of one process is not alone."""
        return self.mesh is None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes what is written once."""
        return self.rank == 0

    def place(self, axis: str) -> int:
        """This process's coordinate along an axis."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    def size(self, axis: str) -> int:
        """Processes along an axis."""
        return int(getattr(self.layout, axis))

    def group(self, axis: str) -> dist.ProcessGroup:
        """The processes along an axis, this one among them."""
        assert self.mesh is not None, "a process alone has no groups"
        return self.mesh.get_group(axis)

    @property
    def data_rank(self) -> int:
        """Which part of each global batch this process reads, of `layout.data` parts."""
        return self.place("replicate") * self.layout.shard + self.place("shard")

    @property
    def tells(self) -> bool:
        """Whether this process speaks for its part of the loss: the last stage knows it, and its tensor neighbours know
        the same."""
        return self.place("pipeline") == self.last_stage_place and self.place("tensor") == 0

    @property
    def last_stage_place(self) -> int:
        """Where on the pipeline axis the loss is computed: schedules in a V end where they began."""
        return 0 if self.layout.is_v_shaped else self.layout.pipeline - 1

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes of a small tensor on the CPU."""
        if not self.is_alone:
            values = values.clone()
            dist.all_reduce(values, group=self.control)
        return values

    def sum_of_parts(self, values: Tensor) -> Tensor:
        """The sum over the parts of the batch of what each process knows of its own part."""
        if self.is_alone:
            return values
        counts = all(self.place(axis) == 0 for axis in ("pipeline", "context", "tensor"))
        return self.sum(values if counts else torch.zeros_like(values))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return bool(self.sum(torch.tensor(int(flag))).item()) if not self.is_alone else flag

    def gather(self, value: Any) -> list[Any]:
        """Every process's value (anything that pickles), by rank, on every process."""
        if self.is_alone:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.control)
        return found

    def first(self, value: Any) -> Any:
        """The first process's value, on every process."""
        if self.is_alone:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=0, group=self.control)
        return told[0]

    def from_last_stage(self, value: Any) -> Any:
        """What the process of this one's pipeline that computes the loss gives (anything that pickles), on all of it."""
        if self.layout.pipeline == 1:
            return value
        assert self.mesh is not None
        source = self.mesh.mesh.select(0, self.last_stage_place)[tuple(self.place(axis) for axis in AXES[1:])]
        told = [value]
        dist.broadcast_object_list(told, src=int(source), group=self.group("pipeline"))
        return told[0]

    def wait(self) -> None:
        """Until every process has come here."""
        if not self.is_alone:
            dist.barrier(group=self.control)


ALONE = Team(Parallel())


def in_group() -> bool:
    """Whether a launcher started this process as one of a group."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(layout: Parallel, device: torch.device, timeout: timedelta = TIMEOUT, store: dist.Store | None = None) -> Team:
    """Join the group that the launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) describes.

    store: through which its processes find each other, where they share one already; then more processes than the layout
    needs may have been started, and the first ones join. Raises InputError when the layout needs another number of
    processes, BessemerError when the group cannot be reached.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        if store is None:
            require_world(layout, world)
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=layout.world)
    except (dist.DistError, RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        first = (str(error).strip().splitlines() or [""])[0]
        raise BessemerError(f"parallel: rank {rank} cannot join the group at {where}: {first}") from None
    mesh = init_device_mesh(device.type, tuple(int(getattr(layout, axis)) for axis in AXES), mesh_dim_names=AXES)
    control = dist.new_group(backend="gloo")  # its own also where the others are gloo's: an axis may be the whole world
    traffic.count(control)
    return Team(layout, rank, mesh, control)


def leave() -> None:
    """End the group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def require_world(layout: Parallel, world: int) -> None:
    """Raise InputError, with what would fit, when the layout's product is not the number of processes."""
    if layout.world == world:
        return
    product = " x ".join(
        f"{axis} {getattr(layout, axis)}" for axis in ("replicate", "shard", "tensor", "pipeline", "context")
    )
    rest = layout.tensor * layout.pipeline * layout.context
    if world % rest == 0:
        fits = f"parallel.shard = {world // rest} with replicate = 1 would fit"
    else:
        fits = f"tensor x pipeline x context = {rest} does not divide {world}; possible: {_divisors(world)}"
    raise InputError(f"parallel: {product} = {layout.world} processes, but there are {world}; {fits}")


def _divisors(number: int) -> Sequence[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
