"""The checks before a process group is formed, through the store at MASTER_ADDR:MASTER_PORT alone.

A group of a backend (NCCL, gloo) can hang or abort when its processes do not fit together. So rank 0 first compares what each
of them has (program, recipe, run folder, tokens), and all exit with the same message when they do not fit.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bessemer import __version__
from bessemer.errors import BessemerError, InputError
from bessemer.hashing import digest
from bessemer.launch import status
from bessemer.parallel.mesh import require_world
from bessemer.recipe import Parallel, Recipe, load
from bessemer.recipe.parallel import MODEL_AXES
from bessemer.run import RunFolder, read_json
from bessemer.terminal import counted

TIMEOUT = timedelta(minutes=30)  # for the slowest process to start, and for rank 0 to prepare the run
LEAVE_TIMEOUT = timedelta(seconds=10)  # for the others to read the last message of rank 0, which hosts the store
SHARED_SECONDS, POLL_SECONDS = 4.0, 0.1  # until other processes must see a file of one process
PORT_IN_USE = "EADDRINUSE"


class CommonError(Exception):
    """An error that all processes of the run have received."""

    def __init__(self, error: BessemerError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class Rendezvous:
    """The store, and this process's rank among those that were started for a run."""

    store: dist.Store
    rank: int
    world: int

    def agree(self, name: str, own: Callable[[], dict[str, Any]], compare: Callable[[list[Any]], Any]) -> Any:
        """Every process contributes plain values; rank 0 compares them, by rank, and its result is returned on all.

        Raises CommonError on every process: the error of the first process that could not contribute, else that of `compare`.
        """
        value = _caught(own)
        if self.rank:
            self.store.set(f"{name}/{self.rank}", json.dumps(value))
        return self.broadcast(name, lambda: compare(self._collect(name, value)))

    def _collect(self, name: str, own: dict[str, Any]) -> list[Any]:
        """On rank 0, every process's value by rank. Raises the error of the first process that could not contribute."""
        others = [f"{name}/{rank}" for rank in range(1, self.world)]
        if others:
            self.store.wait(others, TIMEOUT)
        values = [own, *(json.loads(text) for text in (self.store.multi_get(others) if others else []))]
        return [_value_of(value) for value in values]

    def broadcast(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of `work` on rank 0 (a plain value), on every process; CommonError when it fails."""
        key = f"{name}/verdict"
        if self.rank == 0:
            self.store.set(key, json.dumps(_caught(work)))
        self.store.wait([key], TIMEOUT)
        try:
            return _value_of(json.loads(self.store.get(key)))
        except BessemerError as error:
            with contextlib.suppress(dist.DistError):  # whose store may be gone: all know the error
                if self.rank:
                    self.store.set(f"left/{self.rank}", "")
                elif self.world > 1:
                    self.store.wait([f"left/{rank}" for rank in range(1, self.world)], LEAVE_TIMEOUT)
            raise CommonError(error) from None


def _value_of(result: dict[str, Any]) -> Any:
    """What `_caught` returned, or raised."""
    if "status" in result:
        raise status.as_error(result)
    return result["value"]


def _caught(work: Callable[[], Any]) -> dict[str, Any]:
    """The value, or an expected failure, as a JSON object."""
    try:
        return {"value": work()}
    except BessemerError as error:
        return {"status": status.status_of(error), "message": str(error)}
    except OSError as error:
        return {"status": "failed", "message": f"{error.filename or 'a file'}: {error.strerror or error}"}


def join() -> Rendezvous:
    """The rendezvous of the launcher's environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    Raises InputError when the environment is incomplete or another program uses the port, BessemerError when rank 0 cannot be
    reached.
    """
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        where = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT'])}"
    except (KeyError, ValueError) as error:
        raise InputError(
            f"parallel: the launcher's environment lacks {error}; it takes RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            "MASTER_PORT, as torchrun sets them"
        ) from None
    try:
        store, rank, world = next(dist.rendezvous("env://", rank, world, timeout=TIMEOUT))
    except (dist.DistError, RuntimeError, ValueError) as error:
        if PORT_IN_USE in str(error):
            raise InputError(
                f"parallel: {where} is in use by another program; set another MASTER_PORT (torchrun: --master-port)"
            ) from None
        if status.NODE in os.environ:  # a node was lost meanwhile: the agent starts the group again
            raise
        message = status.first_line(error)
        raise BessemerError(f"parallel: rank {rank} cannot join the others at {where}: {message}") from None
    # A store that torchrun keeps over restarts; else each start has its own, and nodes may count their restarts differently.
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_kept else "0"
    return Rendezvous(dist.PrefixStore(f"bessemer/{attempt}", store), rank, world)


def agree_on_recipe(rendezvous: Rendezvous, opened: Callable[[], tuple[Recipe, RunFolder]]) -> RunFolder:
    """The run folder, when every process has the same recipe and program and the number of processes fits.

    Raises CommonError, with the error of the first process that has one.
    """
    runs: list[RunFolder] = []

    def own() -> dict[str, Any]:
        recipe, run = opened()
        if not recipe.parallel.elastic:
            require_world(recipe.parallel, rendezvous.world)
        runs.append(run)
        return {"program": __version__, "recipe": digest(recipe), "folder": str(run.path)}

    def compare(values: list[dict[str, Any]]) -> None:
        for key, what in (("program", "versions of bessemer"), ("folder", "run folders"), ("recipe", "recipes")):
            _require_same(values, key, what)

    rendezvous.agree("recipe", own, compare)
    return runs[0]


def agree_on_folder(rendezvous: Rendezvous, run: RunFolder) -> Parallel:
    """The layout of a prepared run for the processes that were started, when all see the same run folder and tokens."""
    place = status.folder(run)

    def mark() -> str:
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"seen-{time.time_ns()}-{os.getpid()}"
        path.touch()
        return path.name

    name = rendezvous.broadcast("mark", mark)

    def own() -> dict[str, Any]:
        deadline = time.monotonic() + SHARED_SECONDS  # a new name, so that no cache remembers its absence
        while not (sees := (place / name).exists()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        manifest = run.tokens / "manifest.json"
        tokens = digest(read_json(manifest)["files"]) if manifest.exists() else "none"
        return {"sees": sees, "tokens": tokens}

    def compare(values: list[dict[str, Any]]) -> dict[str, Any]:
        (place / name).unlink(missing_ok=True)
        blind = [rank for rank, one in enumerate(values) if not one["sees"]]
        if blind:
            raise InputError(
                f"{run.path}: rank {_ranks(blind)} does not see what rank 0 writes there: the run folder has to lie on a disk "
                "that all processes share; set run.dir to one"
            )
        _require_same(values, "tokens", f"tokens in {run.tokens}")
        return _layout(load(run.recipe), rendezvous.world).model_dump()

    return Parallel(**rendezvous.agree("folder", own, compare))


def _layout(recipe: Recipe, processes: int) -> Parallel:
    if not recipe.parallel.elastic:
        return recipe.parallel
    layout = fitted(recipe, processes)
    if layout is None:
        least = recipe.parallel.ranks_per_part
        raise InputError(
            f"parallel.elastic: no layout of the {counted(processes, 'process')} left keeps the global batch with "
            f"{' x '.join(MODEL_AXES)} = {least} and train.micro_batch = {recipe.train.micro_batch}; it takes at least {least}"
        )
    return layout


def _require_same(values: list[dict[str, Any]], key: str, what: str) -> None:
    others = [rank for rank, one in enumerate(values) if one.get(key) != values[0].get(key)]
    if others:
        raise InputError(f"parallel: the processes have different {what}: rank {_ranks(others)} differs from rank 0")


def _ranks(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def fitted(recipe: Recipe, processes: int) -> Parallel | None:
    """The largest layout for at most `processes` processes that keeps a resolved recipe's batch; None if there is none.

    `replicate` follows the number, and `shard` where not even one replica is left. What splits the model (tensor, pipeline,
    context) stays. Each process takes equally many micro-batches, so the data-parallel ranks have to divide the batch.
    """
    layout = recipe.parallel
    model = layout.ranks_per_part
    replicas = [(n, layout.shard) for n in range(processes // (layout.shard * model), 0, -1)]
    shards = [(1, n) for n in range(min(layout.shard, processes // model), 0, -1)]
    for replicate, shard in replicas + shards:
        if _divides_batch(recipe, replicate * shard):
            return layout.model_copy(update={"replicate": replicate, "shard": shard})
    return None


def _divides_batch(recipe: Recipe, data_ranks: int) -> bool:
    micro, batches, layout = recipe.train.micro_batch, recipe.batches, recipe.parallel
    assert micro is not None, "the recipe is resolved"
    sizes = {batches.sequences(step) for step in range(batches.ramp_steps + 1)}
    each = data_ranks * micro
    return all(size % each == 0 and (layout.pipeline == 1 or layout.fits_micro_batches(size // each)) for size in sizes)
