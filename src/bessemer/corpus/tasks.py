"""Tasks to the places where they are done: this process, processes of this machine, or a Ray cluster.

A task is a small JSON value, its outcome lies in the work folder, published by one rename: it can be done twice,
anywhere and in any order, and the result is the same. So a worker that dies costs what it had under way.
"""

from __future__ import annotations

from collections.abc import Sequence

from bessemer.corpus import engine, worker
from bessemer.corpus.pool import Pool
from bessemer.corpus.worker import Done, Task, cores
from bessemer.recipe import Work

SMALL_BYTES = 8 << 20
"""Less work than this is done where we are: a process takes about a second to begin."""


def each(kind: str, tasks: Sequence[Task], num_bytes: int, settings: Work, done: Done) -> None:
    """Do all tasks of a kind; `done` hears of each result, in the order in which they come.

    num_bytes: what the tasks read, all together. Raises what a task raises, BessemerError for one whose worker dies
    again and again, KeyboardInterrupt when the person stops it; the workers are then ended.
    """
    if not tasks:
        return
    if settings.engine == "ray":
        from bessemer.corpus.cluster import each_on_ray

        each_on_ray(kind, tasks, settings, done)
        return
    num_workers = min(settings.workers or cores(), len(tasks))
    if num_workers == 1 or num_bytes < SMALL_BYTES:
        _here(kind, tasks, done)
    else:
        Pool(kind, num_workers, done).work(tasks)


def _here(kind: str, tasks: Sequence[Task], done: Done) -> None:
    def work() -> None:
        for task in tasks:
            engine.check_stop()
            done(worker.perform(kind, task))

    engine.run(work)
