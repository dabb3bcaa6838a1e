"""Tasks to the places where they are done: this process, processes of this machine, or a Ray cluster.

A task is a small JSON value, its outcome lies in the work folder, published by one rename: it can be done twice,
anywhere and in any order, and the result is the same. So a worker that dies costs what it had under way.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bessemer
from bessemer.corpus import engine, worker
from bessemer.errors import BessemerError
from bessemer.recipe import Work

SMALL_BYTES = 8 << 20
"""Less work than this is done where we are: a process takes about a second to begin."""

ATTEMPTS = 3
"""A task whose worker died so often is given up; once may be the machine's fault, three times is the task's."""

POLL_SECONDS = 0.1

Done = Callable[[dict[str, Any]], None]
Task = dict[str, Any]


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
        _Pool(kind, num_workers, done).work(tasks)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_environment() -> dict[str, str]:
    """What a worker's process needs to find this package and to keep to one core."""
    above = str(Path(bessemer.__file__).parent.parent)
    path = [above, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    single = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "NUMBA_NUM_THREADS": "1", **single}


def gave_up(kind: str, task: Task, why: str) -> BessemerError:
    """The error for a task whose worker died each time."""
    name = task.get("number", f"{task.get('source')}, bucket {task.get('bucket')}")
    what = f"partition {name}" if kind == "clean" else f"source {name}"
    return BessemerError(
        f"corpus: {what}: its worker ended {ATTEMPTS} times ({why}); out of memory? Lower corpus.workers, or find the "
        f"document in {task['work']}; what is finished is kept, the same command goes on from here"
    )


def _here(kind: str, tasks: Sequence[Task], done: Done) -> None:
    def work() -> None:
        for task in tasks:
            engine.check_stop()
            done(worker.perform(kind, task))

    engine.run(work)


@dataclass
class _Worker:
    """A process and the task it has under way."""

    process: subprocess.Popen[str]
    task: Task | None = None


@dataclass
class _Pool:
    kind: str
    num_workers: int
    done: Done
    workers: list[_Worker] = field(default_factory=list)
    deaths: dict[int, int] = field(default_factory=dict)

    def work(self, tasks: Sequence[Task]) -> None:
        waiting = deque(tasks)
        left = len(tasks)
        with selectors.DefaultSelector() as selector:
            try:
                for _ in range(self.num_workers):
                    self._start(selector, waiting)
                while left:
                    for key, _ in selector.select(POLL_SECONDS):
                        one: _Worker = key.data
                        line = one.process.stdout.readline() if one.process.stdout else ""
                        if line.endswith("\n"):
                            one.task = None
                            left -= 1
                            self.done(worker.result(json.loads(line)))
                            self._give(one, waiting)
                        else:
                            selector.unregister(key.fileobj)
                            if self._bury(one, waiting):
                                self._start(selector, waiting)
            finally:
                self._end()

    def _start(self, selector: selectors.BaseSelector, waiting: deque[Task]) -> None:
        command = [sys.executable, "-m", "bessemer.corpus.worker"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
            env={**os.environ, **worker_environment()},
        )  # fmt: skip
        one = _Worker(process)
        self.workers.append(one)
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ, one)
        self._give(one, waiting)

    def _give(self, one: _Worker, waiting: deque[Task]) -> None:
        if not waiting:
            return
        one.task = waiting.popleft()
        assert one.process.stdin is not None
        try:
            one.process.stdin.write(json.dumps({"kind": self.kind, "task": one.task}) + "\n")
            one.process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead; the end of its output says so, and the task goes to another

    def _bury(self, one: _Worker, waiting: deque[Task]) -> bool:
        """A worker ended by itself: its task goes back, unless it has ended too many; whether another is needed."""
        code = one.process.wait()
        self.workers.remove(one)
        if one.task is None:
            return False
        key = id(one.task)
        self.deaths[key] = self.deaths.get(key, 0) + 1
        if self.deaths[key] >= ATTEMPTS:
            raise gave_up(self.kind, one.task, f"signal {-code}" if code < 0 else f"exit code {code}")
        waiting.appendleft(one.task)
        return True

    def _end(self) -> None:
        for one in self.workers:
            one.process.kill()
        for one in self.workers:
            one.process.wait()
            for stream in (one.process.stdin, one.process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        self.workers.clear()
