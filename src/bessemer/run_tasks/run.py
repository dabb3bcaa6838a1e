"""Run tasks: in this process, in local worker processes, on a Ray cluster, or by job arrays of Slurm.

A dead worker costs only its current task.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from bessemer.common.console import progress, warn
from bessemer.common.environment import num_cores
from bessemer.recipe import Work
from bessemer.run_tasks.local import Pool, in_threads
from bessemer.run_tasks.ray import run_on_ray
from bessemer.run_tasks.slurm import end_earlier, require_slurm, run_on_slurm
from bessemer.run_tasks.task import Task, require_receipt
from bessemer.storage.filesystem import StorePath
from bessemer.storage.path import each

# Less work than this is done in this process unless workers wait for some: one takes about a second to start
SMALL_BYTES = 8 << 20

_pool = Pool()  # of processes that wait for the next stage's tasks
_shared: Path | None = None  # a folder that all nodes see, for the queues of job arrays whose work is in a store


def run_tasks(
    what: str, unit: str, tasks: Sequence[Task], bytes_per_size: float, settings: Work
) -> Iterator[dict[str, Any]]:
    """Do the tasks that are not done, behind a progress bar; returns the receipts of all, each read when it is asked for.

    bytes_per_size: bytes of input that a task's `size` stands for. Raises a task's error, BessemerError for one whose
    worker dies repeatedly, KeyboardInterrupt.
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
    """The receipt of each task, None for one that has to be done; those of a store some at one time."""
    task_of = {task.folder: task for task in tasks}
    return each(lambda folder: task_of[folder].receipt(), task_of)


def require_engine(settings: Work) -> None:
    """Raise InputError when what the engine needs is not on this machine. Warns of settings of another engine."""
    for key, reader in (("address", "ray"), ("slurm", "slurm")):
        if settings.engine != reader and getattr(settings, key) != getattr(Work(), key):
            warn(f"corpus.{key} has no effect with corpus.engine = {settings.engine!r}")
    if settings.engine == "slurm":
        require_slurm()


def _run(what: str, tasks: Sequence[Task], num_bytes: int, settings: Work) -> Generator[Task, None, None]:
    """Do tasks in the place that suits `num_bytes` of input; yields each when it is done."""
    if not tasks:
        return
    work, is_small = tasks[0].work, num_bytes < SMALL_BYTES
    shared = _shared if isinstance(work, StorePath) else work
    if shared is not None:
        end_earlier(shared)
    num_workers = min(settings.workers or num_cores(), len(tasks))
    if settings.engine == "ray":
        yield from run_on_ray(tasks, settings)
    elif settings.engine == "slurm" and not is_small:
        assert shared is not None, "work in a store is done within kept_workers"
        yield from run_on_slurm(what, tasks, settings, shared)
    elif _pool.idle or (num_workers > 1 and not is_small):
        yield from _pool.run(tasks, num_workers)
    elif any(task.progress for task in tasks):
        yield from _pool.run(tasks, 1)
    else:
        yield from in_threads(Task.run, tasks)


@contextlib.contextmanager
def kept_workers(run: Path) -> Iterator[None]:
    """End the worker processes behind it: those of one stage do the tasks of the next as well, as one takes about a second to
    start. Job arrays whose work is in a store take their tasks from below the folder of the run."""
    global _shared
    _shared = run
    try:
        yield
    finally:
        _shared = None
        _pool.end()
        with contextlib.suppress(OSError):  # not empty: of an array that a killed driver left
            (run / "slurm").rmdir()
