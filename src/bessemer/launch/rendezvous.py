"""The checks before a training on several processes: all must have the same inputs and see the same run directory.

An NCCL group can hang or abort if its processes do not fit together. So rank 0 first compares a digest of the inputs of each
process, in a small gloo group of all started processes. If they do not fit, all raise the same error.
"""

from __future__ import annotations

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
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_json

TIMEOUT = timedelta(minutes=30)  # covers the start of the slowest process, and the preparation of the run by rank 0
SHARED_SECONDS, POLL_SECONDS = 4.0, 0.1  # time within which all processes must see a file that one has written


def prepare_run(
    open_run: Callable[[], tuple[Recipe, RunDirectory]], prepare: Callable[[], object] | None
) -> tuple[dist.Store, RunDirectory, Parallel]:
    """Return the processes' key-value store, the run, and the layout that the started processes train with.

    Args:
        open_run: Function that returns the recipe and the run, called on every process. They must be equal on all.
        prepare: Function that prepares the run for training, called on rank 0 only; None if it is prepared.

    Raises:
        BessemerError: A process failed, or recipe, tokens or version differ; raised on all.
    """
    store, rank, world = next(dist.rendezvous("env://", timeout=TIMEOUT))
    group = dist.PrefixStore("start", store)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=world, timeout=TIMEOUT)
    everyone = ProcessMesh(Parallel(replicate=world), rank, control=dist.group.WORLD)
    runs: list[RunDirectory] = []

    def inputs() -> str:
        recipe, run = open_run()
        runs.append(run)
        if not recipe.parallel.elastic:
            require_world(recipe.parallel, world)
        manifest = run.tokens / "manifest.json"
        return digest(__version__, recipe, read_json(manifest)["files"] if manifest.exists() else None)

    def prepared(digests: list[str]) -> list[str]:
        _require_all([one == digests[0] for one in digests], "parallel", (
            "differs from rank 0: recipe, tokens or version of bessemer differ; start all processes with the same"
        ))  # fmt: skip
        if prepare is not None:
            prepare()
        mark = runs[0].status / f"seen-{time.time_ns()}"  # a new name, since a file system may cache a file's absence
        mark.touch()
        return [mark.name] * world

    def sees_mark() -> bool:
        deadline = time.monotonic() + SHARED_SECONDS
        while not (sees := (runs[0].status / mark).exists()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return sees

    def layouts(seen: list[bool]) -> list[Parallel]:
        (runs[0].status / mark).unlink()
        _require_all(seen, str(runs[0].path), (
            "does not see the files of rank 0; set run.dir to a folder on a file system that all processes share"
        ))  # fmt: skip
        recipe = load_resolved(runs[0].recipe)
        layout = fit_layout(recipe, world) if recipe.parallel.elastic else recipe.parallel
        if layout.world < recipe.parallel.world:
            action = f"continuing with {layout.world} of {counted(recipe.parallel.world, 'process')}"
            step = (checkpoint_steps(runs[0].checkpoints) or [0])[-1]
            record(runs[0].incidents, FEWER_PROCESSES, step=step, cause=f"{world} processes started", action=action)
        return [layout] * world

    mark = gather_scatter(everyone, inputs, prepared)
    layout = gather_scatter(everyone, sees_mark, layouts)
    leave()
    return store, runs[0], layout


def _require_all(fits: list[bool], where: str, problem: str) -> None:
    """Raise InputError that names the ranks whose entry in `fits` is False; do nothing if all are True.

    The message is `where`, the ranks and `problem`, in this order.
    """
    if wrong := [str(rank) for rank, one in enumerate(fits) if not one]:
        raise InputError(f"{where}: rank {', '.join(wrong[:8])} {problem}")


def fit_layout(recipe: ResolvedRecipe, processes: int) -> Parallel:
    """Return the largest layout for at most `processes` processes that keeps a resolved recipe's batch.

    `replicate` shrinks first, and `shard` only if not even one replica fits. The axes that split the model (tensor, pipeline,
    context) stay. Each process takes the same number of micro-batches, so the data-parallel ranks have to divide the batch.
    Raises InputError if no layout fits.
    """
    layout, micro, batches = recipe.parallel, recipe.train.micro_batch, recipe.batches
    parts = processes // layout.ranks_per_part
    replicas = [(n, layout.shard) for n in range(parts // layout.shard, 0, -1)]
    shards = [(1, n) for n in range(min(layout.shard, parts), 0, -1)]
    sizes = {batches.sequences(step) for step in range(batches.ramp_steps + 1)}
    for replicate, shard in replicas + shards:
        fitted = layout.model_copy(update={"replicate": replicate, "shard": shard})
        if all(fitted.runs_batch(size, micro) for size in sizes):
            return fitted
    raise InputError(
        f"parallel.elastic: no layout of {processes} processes keeps the batch; start at least {layout.ranks_per_part}"
    )
