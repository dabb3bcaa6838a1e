"""The checks before a training on several processes: all have the same inputs and see the same run directory.

A group of NCCL can hang or abort when its processes do not fit together. So rank 0 first compares a digest of what each of them
has, in a small gloo group of all that were started, and all raise the same error when they do not fit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from bessemer import __version__
from bessemer.common.console import counted
from bessemer.common.errors import InputError
from bessemer.common.hashing import digest
from bessemer.distributed.mesh import ProcessMesh, gather_scatter, leave, require_world
from bessemer.guard.incidents import FEWER_PROCESSES, record
from bessemer.recipe import Parallel, Recipe, ResolvedRecipe, load_resolved
from bessemer.recipe.parallel import MODEL_AXES
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_json

TIMEOUT = timedelta(minutes=30)  # for the slowest process to start, and for rank 0 to prepare the run
SHARED_SECONDS, POLL_SECONDS = 4.0, 0.1  # until other processes must see a file of one process


def join() -> dist.Store:
    """Join a group of all processes that were started. Returns the store of the launcher's environment."""
    store: dist.Store
    store, rank, world = next(dist.rendezvous("env://", timeout=TIMEOUT))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("start", store), rank=rank, world_size=world, timeout=TIMEOUT
    )
    return store


def agree(
    opened: Callable[[], tuple[Recipe, RunDirectory]], prepare: Callable[[], None] | None
) -> tuple[RunDirectory, Parallel]:
    """Return the run and the layout for the processes that were started, when program, recipe and tokens are the same for all.

    opened: on every process; prepare: on rank 0, once all have the same inputs. Raises the same BessemerError on all.
    """
    world, runs = dist.get_world_size(), list[RunDirectory]()
    everyone = ProcessMesh(Parallel(replicate=world), dist.get_rank(), control=dist.group.WORLD)

    def inputs() -> str:
        recipe, run = opened()
        runs.append(run)
        if not recipe.parallel.elastic:
            require_world(recipe.parallel, world)
        manifest = run.tokens / "manifest.json"
        return digest(__version__, recipe, read_json(manifest)["files"] if manifest.exists() else None)

    def prepared(digests: list[str]) -> list[str]:
        _require_all([one == digests[0] for one in digests], "parallel", (
            "differs from rank 0: the processes have different recipes, tokens or versions of bessemer; start all with the same"
        ))  # fmt: skip
        if prepare is not None:
            prepare()
        mark = runs[0].status / f"seen-{time.time_ns()}-{os.getpid()}"  # no cache remembers its absence
        mark.touch()
        return [mark.name] * world

    def sees_mark() -> bool:
        path, deadline = runs[0].status / mark, time.monotonic() + SHARED_SECONDS
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return path.exists()

    def layouts(seen: list[bool]) -> list[Parallel]:
        (runs[0].status / mark).unlink()
        _require_all(seen, str(runs[0].path), (
            "does not see what rank 0 writes there: the run directory must be on a disk that all processes see; set run.dir"
        ))  # fmt: skip
        return [_layout(load_resolved(runs[0].recipe), world, runs[0])] * world

    mark = gather_scatter(everyone, inputs, prepared)
    layout = gather_scatter(everyone, sees_mark, layouts)
    leave()
    return runs[0], layout


def _require_all(fits: list[bool], where: str, problem: str) -> None:
    """Raise InputError with the ranks that do not fit."""
    if wrong := [str(rank) for rank, one in enumerate(fits) if not one]:
        raise InputError(f"{where}: rank {', '.join(wrong[:8])} {problem}")


def _layout(recipe: ResolvedRecipe, processes: int, run: RunDirectory) -> Parallel:
    if not recipe.parallel.elastic:
        return recipe.parallel
    layout = fitted(recipe, processes)
    if layout is None:
        raise InputError(
            f"parallel.elastic: no layout of the {counted(processes, 'process')} left keeps the global batch; "
            f"{' x '.join(MODEL_AXES)} takes at least {recipe.parallel.ranks_per_part}"
        )
    if layout.world < recipe.parallel.world:
        action = f"continuing with {layout.world} of {counted(recipe.parallel.world, 'process')}"
        step = (checkpoint_steps(run.checkpoints) or [0])[-1]
        record(run.incidents, FEWER_PROCESSES, step=step, cause=f"{processes} were started", action=action)
    return layout


def fitted(recipe: ResolvedRecipe, processes: int) -> Parallel | None:
    """The largest layout for at most `processes` processes that keeps a resolved recipe's batch; None if there is none.

    `replicate` follows the number, and `shard` where not even one replica is left. What splits the model (tensor, pipeline,
    context) stays. Each process takes equally many micro-batches, so the data-parallel ranks have to divide the batch.
    """
    layout = recipe.parallel
    model = layout.ranks_per_part
    replicas = [(n, layout.shard) for n in range(processes // (layout.shard * model), 0, -1)]
    shards = [(1, n) for n in range(min(layout.shard, processes // model), 0, -1)]
    micro, batches = recipe.train.micro_batch, recipe.batches
    sizes = {batches.sequences(step) for step in range(batches.ramp_steps + 1)}
    layouts = (layout.model_copy(update={"replicate": one, "shard": each}) for one, each in replicas + shards)
    return next((each for each in layouts if all(each.runs_batch(size, micro) for size in sizes)), None)
