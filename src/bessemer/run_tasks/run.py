"""Run tasks with the engine of the recipe: this process, local worker processes, a Ray cluster, or Slurm job arrays.

A worker that dies loses only its current task.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from bessemer.common.console import progress, warn
from bessemer.common.environment import num_cores
from bessemer.common.errors import InputError
from bessemer.recipe import Work
from bessemer.run_tasks.local import Pool, in_threads
from bessemer.run_tasks.ray import run_on_ray
from bessemer.run_tasks.slurm import end_earlier, run_on_slurm
from bessemer.run_tasks.task import Task, require_receipt
from bessemer.storage.filesystem import StorePath
from bessemer.storage.path import each

# Less work than this runs in this process unless workers are idle, since a worker takes about a second to start.
SMALL_BYTES = 8 << 20

_pool = Pool()  # worker processes, kept for the next stage's tasks
_shared: Path | None = None  # folder on a shared disk for Slurm queues whose work folder is in a store


def run_tasks(
    what: str, unit: str, tasks: Sequence[Task], bytes_per_size: float, settings: Work
) -> Iterator[dict[str, Any]]:
    """Run the unfinished tasks with a progress bar and return the receipts of all tasks, in order.

    A receipt is the record of a finished task: its inputs, file sizes and the values that `Task.make` returned. Receipts are
    read as the caller iterates. Raises a task's exception, and BessemerError for a task whose worker dies repeatedly.

    Args:
        what: Title of the progress bar.
        unit: Unit of the tasks' `size`.
        tasks: The tasks.
        bytes_per_size: Bytes of input per unit of `size`; few bytes in total run without workers.
        settings: The engine settings of [corpus].
    """
    missing = [task for task, done in zip(tasks, _receipts(tasks), strict=True) if done is None]
    size, to_do = (sum(task.size for task in some) for some in (tasks, missing))
    with progress(what, size, unit) as advance:
        advance(size - to_do)
        with contextlib.closing(_run(what, missing, int(to_do * bytes_per_size), settings)) as done_tasks:
            for task in done_tasks:
                advance(task.size)
    return map(require_receipt, tasks, _receipts(tasks))


def _receipts(tasks: Sequence[Task]) -> Iterator[dict[str, Any] | None]:
    """Yield the receipt of each task in order, None if it must still run. Those in an object store are read in parallel."""
    task_of = {task.folder: task for task in tasks}
    return each(lambda folder: task_of[folder].receipt(), task_of)


def require_engine(settings: Work) -> None:
    """Raise InputError if the engine cannot run on this machine, and warn about settings that only other engines read."""
    for key, reader in (("address", "ray"), ("slurm", "slurm")):
        if settings.engine != reader and getattr(settings, key) != getattr(Work(), key):
            warn(f"corpus.{key} has no effect with corpus.engine = {settings.engine!r}")
    if settings.engine == "slurm" and shutil.which("sbatch") is None:
        raise InputError("corpus.engine: sbatch is not on the PATH; run this on a login node of the Slurm cluster")


def _run(what: str, tasks: Sequence[Task], num_bytes: int, settings: Work) -> Generator[Task, None, None]:
    """Run tasks with the engine of the recipe and yield each when it is done.

    If they read few bytes in total (`num_bytes`), run them in this process instead.
    """
    if not tasks:
        return
    work, is_small = tasks[0].work, num_bytes < SMALL_BYTES
    shared = _shared if isinstance(work, StorePath) else work
    if shared is not None:
        end_earlier(shared)
    num_workers = 1 if is_small else min(settings.workers or num_cores(), len(tasks))
    if settings.engine == "ray":
        yield from run_on_ray(tasks, settings)
    elif settings.engine == "slurm" and not is_small:
        assert shared is not None, "work in a store is done within keep_workers"
        yield from run_on_slurm(what, tasks, settings, shared)
    elif num_workers > 1 or _pool.idle or any(task.progress for task in tasks):
        yield from _pool.run(tasks, num_workers)
    else:
        yield from in_threads(Task.run, tasks)


@contextlib.contextmanager
def keep_workers(run: Path) -> Iterator[None]:
    """Keep worker processes alive between stages, and end them when the context exits.

    Starting a worker takes about a second, so the workers of one stage also run the tasks of the next. Inside the
    context, job arrays whose work folder is in a store keep their queues below the run directory.
    """
    global _shared
    _shared = run
    try:
        yield
    finally:
        _shared = None
        _pool.end()
        with contextlib.suppress(OSError):  # not empty if a killed driver left an array
            (run / "slurm").rmdir()
