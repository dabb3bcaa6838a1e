"""The checks before a process group is formed, through the store at MASTER_ADDR:MASTER_PORT alone.

A group of a backend (NCCL, gloo) can hang or abort when its processes do not fit together. So rank 0 first compares a digest of
what each of them has (program, recipe, tokens), and all exit with the same message when they do not fit.
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
from bessemer.guard.incidents import FEWER_PROCESSES, record
from bessemer.hashing import digest
from bessemer.launch import reports
from bessemer.parallel.mesh import require_world
from bessemer.recipe import Parallel, Recipe, load
from bessemer.recipe.parallel import MODEL_AXES
from bessemer.run import RunFolder, published, read_json
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

    def collect(self, name: str, own: Callable[[], Any], decide: Callable[[list[Any]], Any]) -> Any:
        """Return on every process what rank 0 decides about all processes' values, by rank; all are plain values.

        Raises CommonError on every process: the error of the first process that has no value, else that of `decide`.
        """
        value, verdict = _caught(own), f"{name}/verdict"
        if self.rank:
            self.store.set(f"{name}/{self.rank}", json.dumps(value))
        else:
            self.store.set(verdict, json.dumps(_caught(lambda: decide(self._values(name, value)))))
        self.store.wait([verdict], TIMEOUT)
        try:
            return _value_of(json.loads(self.store.get(verdict)))
        except BessemerError as error:
            with contextlib.suppress(dist.DistError):  # whose store may be gone: all know the error
                if self.rank:
                    self.store.set(f"left/{self.rank}", "")
                elif self.world > 1:
                    self.store.wait([f"left/{rank}" for rank in range(1, self.world)], LEAVE_TIMEOUT)
            raise CommonError(error) from None

    def _values(self, name: str, own: dict[str, Any]) -> list[Any]:
        others = [f"{name}/{rank}" for rank in range(1, self.world)]
        if others:
            self.store.wait(others, TIMEOUT)
        values = [own, *(json.loads(text) for text in (self.store.multi_get(others) if others else []))]
        return [_value_of(value) for value in values]


def _value_of(result: dict[str, Any]) -> Any:
    """Return what `_caught` returned, or raise its error."""
    if "status" in result:
        raise reports.as_error(result)
    return result["value"]


def _caught(work: Callable[[], Any]) -> dict[str, Any]:
    """Return the value, or an expected failure, as a JSON object."""
    try:
        return {"value": work()}
    except BessemerError as error:
        return {"status": reports.status_of(error), "message": str(error)}
    except OSError as error:
        return {"status": "failed", "message": f"{error.filename or 'a file'}: {error.strerror or error}"}


def join() -> Rendezvous:
    """Return the rendezvous of the launcher's environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

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
        message = reports.first_line(error)
        raise BessemerError(f"parallel: rank {rank} cannot join the others at {where}: {message}") from None
    return Rendezvous(dist.PrefixStore("bessemer", store), rank, world)


def agree(
    group: Rendezvous, opened: Callable[[], tuple[Recipe, RunFolder]], prepare: Callable[[], None] | None
) -> Parallel:
    """Return the layout for the processes that were started, when program, recipe, tokens and run folder are the same for all.

    opened: on every process; prepare: on rank 0, once all have the same inputs. Raises CommonError, with the error of the first
    process that has one.
    """
    runs: list[RunFolder] = []

    def inputs() -> str:
        recipe, run = opened()
        runs.append(run)
        if not recipe.parallel.elastic:
            require_world(recipe.parallel, group.world)
        manifest = run.tokens / "manifest.json"
        tokens = read_json(manifest)["files"] if manifest.exists() else None
        return digest(__version__, recipe, tokens)

    def prepared(digests: list[str]) -> str:
        if others := [rank for rank, one in enumerate(digests) if one != digests[0]]:
            raise InputError(
                f"parallel: the processes have different recipes, tokens or versions of bessemer: rank {_ranks(others)} differs "
                "from rank 0; start all with the same"
            )
        if prepare is not None:
            prepare()
        mark = reports.folder(runs[0]) / f"seen-{time.time_ns()}-{os.getpid()}"  # no cache remembers its absence
        mark.touch()
        return mark.name

    def sees(mark: str) -> bool:
        deadline = time.monotonic() + SHARED_SECONDS
        while not (path := reports.folder(runs[0]) / mark).exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return path.exists()

    def layout(seen: list[bool]) -> dict[str, Any]:
        (reports.folder(runs[0]) / mark).unlink()
        if blind := [rank for rank, one in enumerate(seen) if not one]:
            raise InputError(
                f"{runs[0].path}: rank {_ranks(blind)} does not see what rank 0 writes there: the run folder has to be on a disk "
                "that all processes share; set run.dir to one"
            )
        return _layout(load(runs[0].recipe), group.world, runs[0]).model_dump()

    mark = group.collect("inputs", inputs, prepared)
    return Parallel(**group.collect("folder", lambda: sees(mark), layout))


def _layout(recipe: Recipe, processes: int, run: RunFolder) -> Parallel:
    if not recipe.parallel.elastic:
        return recipe.parallel
    layout = fitted(recipe, processes)
    if layout is None:
        least = recipe.parallel.ranks_per_part
        raise InputError(
            f"parallel.elastic: no layout of the {counted(processes, 'process')} left keeps the global batch with "
            f"{' x '.join(MODEL_AXES)} = {least} and train.micro_batch = {recipe.train.micro_batch}; it takes at least {least}"
        )
    if layout.world < recipe.parallel.world:
        action = f"continuing with {layout.world} of {counted(recipe.parallel.world, 'process')}"
        step = (published(run.checkpoints) or [0])[-1]
        record(run.incidents, FEWER_PROCESSES, step=step, cause=f"{processes} were started", action=action)
    return layout


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
