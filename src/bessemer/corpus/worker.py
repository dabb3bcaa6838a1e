"""Tasks of the corpus, run in this process, in local worker processes, or on a Ray cluster.

A task is a small JSON value whose result is a folder published by one rename: idempotent, in any order and place, so
that a dead worker costs only its current task. On Ray each partition is a task of its own as well.

`python -m bessemer.corpus.worker` reads pickled (kind, task) pairs from standard input and writes pickled results or
exceptions. It ends with its input, even in the middle of a task: no worker outlives its build.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import bessemer
from bessemer import interrupt
from bessemer.corpus import engine
from bessemer.errors import BessemerError, InputError
from bessemer.recipe import Work

ATTEMPTS = 3
"""A task fails when its worker has died this often: once may be the machine's fault, three times is the task's."""

POLL_SECONDS = 0.1
PROBE_SECONDS = 10.0

SMALL_BYTES = 8 << 20
"""Less work than this is done in this process: a worker takes about a second to start."""

WAITING_PER_CORE = 4
"""Tasks submitted to Ray ahead of time for each core: enough that none waits, while the driver's memory stays bounded.
"""

Task = dict[str, Any]
Answer = dict[str, Any] | Exception
OnResult = Callable[[dict[str, Any]], None]


def run_tasks(kind: str, tasks: Sequence[Task], num_bytes: int, settings: Work, done: OnResult) -> None:
    """Run all tasks of a kind ("clean" a partition, "publish" a bucket); `done` is called with each result as it
    arrives.

    num_bytes: input of all tasks. Raises a task's error, BessemerError for one whose worker dies repeatedly,
    KeyboardInterrupt.
    """
    num_workers = min(settings.workers or cores(), len(tasks))
    if not tasks:
        return
    if settings.engine == "ray":
        run_on_ray(kind, tasks, settings, done)
    elif num_workers > 1 and num_bytes >= SMALL_BYTES:
        Pool(kind, num_workers, done).work(tasks)
    else:
        engine.run(lambda: _run_here(kind, tasks, done))


def _run_here(kind: str, tasks: Sequence[Task], done: OnResult) -> None:
    for task in tasks:
        engine.check_stop()
        done(perform(kind, task))


def perform(kind: str, task: Task) -> dict[str, Any]:
    """Do one task in this process. Raises what the task raises."""
    import pyarrow as pa

    if kind == "clean":
        from bessemer.corpus.partition import clean_partition

        result = clean_partition(task)
    else:
        from bessemer.corpus.publish import publish_bucket

        result = publish_bucket(task)
    pa.default_memory_pool().release_unused()
    return result


def answer(kind: str, task: Task) -> Answer:
    """The result of one task, or the exception that it raised."""
    try:
        return perform(kind, task)
    except OSError as error:
        return OSError(error.errno, error.strerror or str(error), error.filename)
    except (BessemerError, MemoryError) as error:
        return error
    except Exception as error:
        return BessemerError(f"corpus: the data engine failed: {type(error).__name__}: {engine.first_line(error)}")


def _result(answered: Answer) -> dict[str, Any]:
    if isinstance(answered, Exception):
        raise answered
    return answered


def _gave_up(kind: str, task: Task, why: str) -> BessemerError:
    name = task.get("number", f"{task.get('source')}, bucket {task.get('bucket')}")
    what = f"partition {name}" if kind == "clean" else f"source {name}"
    return BessemerError(
        f"corpus: {what}: its worker ended {ATTEMPTS} times ({why}); out of memory? Lower corpus.workers, or find the "
        f"document in {task['work']}; finished work is kept, and the same command resumes here"
    )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_environment() -> dict[str, str]:
    """What a worker needs to find this package and to use one core."""
    above = str(Path(bessemer.__file__).parent.parent)
    path = [above, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    threads = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), **dict.fromkeys(threads, "1")}


# --- Processes of this machine


@dataclass
class Worker:
    """A process and the task it has under way."""

    process: subprocess.Popen[bytes]
    task: Task | None = None


@dataclass
class Pool:
    """Does the tasks of one kind, then ends. A worker that dies is replaced and its task done again."""

    kind: str
    num_workers: int
    done: OnResult
    workers: list[Worker] = field(default_factory=list)
    deaths: Counter[int] = field(default_factory=Counter)
    """By id of the task."""

    def work(self, tasks: Sequence[Task]) -> None:
        """Do all tasks; raises what one raises, and BessemerError for one whose worker dies again and again."""
        waiting = deque(tasks)
        left = len(tasks)
        with selectors.DefaultSelector() as selector:
            try:
                for _ in range(self.num_workers):
                    self._start(selector, waiting)
                while left:
                    interrupt.check()
                    for key, _ in selector.select(POLL_SECONDS):
                        left -= self._receive(key.data, selector, waiting)
            finally:
                self._end()

    def _receive(self, worker: Worker, selector: selectors.BaseSelector, waiting: deque[Task]) -> bool:
        """Read the result of a worker that has one, or replace a dead worker; returns whether a task is finished."""
        try:
            answered = pickle.load(worker.process.stdout)  # type: ignore[arg-type]
        except (EOFError, pickle.UnpicklingError):
            selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
            if self._lost(worker, waiting):
                self._start(selector, waiting)
            return False
        worker.task = None
        self.done(_result(answered))
        self._assign(worker, waiting)
        return True

    def _start(self, selector: selectors.BaseSelector, waiting: deque[Task]) -> None:
        command = [sys.executable, "-m", "bessemer.corpus.worker"]
        environment = {**os.environ, **worker_environment()}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        worker = Worker(process)
        self.workers.append(worker)
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ, worker)
        self._assign(worker, waiting)

    def _assign(self, worker: Worker, waiting: deque[Task]) -> None:
        if waiting:
            worker.task = waiting.popleft()
            assert worker.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is dead; the end of its output says so
                pickle.dump((self.kind, worker.task), worker.process.stdin)
                worker.process.stdin.flush()

    def _lost(self, worker: Worker, waiting: deque[Task]) -> bool:
        """Queue the task of a dead worker again, unless it died of it too often; returns whether another is needed."""
        code = worker.process.wait()
        self.workers.remove(worker)
        if worker.task is None:
            return False
        self.deaths[id(worker.task)] += 1
        if self.deaths[id(worker.task)] >= ATTEMPTS:
            raise _gave_up(self.kind, worker.task, f"signal {-code}" if code < 0 else f"exit code {code}")
        waiting.appendleft(worker.task)
        return True

    def _end(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            with contextlib.suppress(BrokenPipeError), worker.process:
                pass  # waits, and closes the pipes
        self.workers.clear()


# --- A Ray cluster


def run_on_ray(kind: str, tasks: Sequence[Task], settings: Work, done: OnResult) -> None:
    """As `run_tasks`, on the cluster at `settings.address`, or on one that is started here for this process."""
    ray = _connected(settings)
    remote = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(answer)
    under_way: dict[Any, Task] = {}
    left = list(reversed(tasks))
    # At most `workers` tasks in flight; without a number the cluster's own queue is kept filled.
    ahead = settings.workers or max(int(ray.cluster_resources().get("CPU", 1)), 1) * WAITING_PER_CORE
    try:
        while left or under_way:
            interrupt.check()
            while left and len(under_way) < ahead:
                task = left.pop()
                under_way[remote.remote(kind, task)] = task
            ready, _ = ray.wait(list(under_way), num_returns=1, timeout=POLL_SECONDS)
            for reference in ready:
                task = under_way.pop(reference)
                try:
                    answered = ray.get(reference)
                except ray.exceptions.RayError as error:
                    why = f"{type(error).__name__}: {engine.first_line(error)}"[:300]
                    raise _gave_up(kind, task, why) from None
                done(_result(answered))
    finally:
        with contextlib.suppress(Exception):  # the cluster is gone: so are its tasks
            for reference in under_way:
                ray.cancel(reference, force=True)


def _connected(settings: Work) -> Any:
    """The ray module, connected; a cluster started here lives as long as this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise InputError("corpus.engine: ray is not installed; install it with: pip install 'bessemer[ray]'") from None
    if ray.is_initialized():
        return ray
    _probe(settings.address or os.environ.get("RAY_ADDRESS", ""))
    on_terminate = signal.getsignal(signal.SIGTERM)  # Ray replaces it with one that exits with another code
    common: dict[str, Any] = {
        "runtime_env": {"env_vars": worker_environment()},
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    try:
        if settings.address is None and "RAY_ADDRESS" not in os.environ:
            ray.init(num_cpus=settings.workers or cores(), include_dashboard=False, **common)
        else:
            ray.init(address=settings.address or "auto", **common)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = f"the cluster at {settings.address}" if settings.address else "a cluster on this machine"
        message = f"corpus.address: {where} cannot be reached: {engine.first_line(error)}; is it running?"
        raise BessemerError(message) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)
    return ray


def _probe(address: str) -> None:
    """Refuse an address where nothing answers: Ray itself would try for six minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # auto, local, or nothing
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
    except OSError as error:
        raise BessemerError(
            f"corpus.address: the cluster at {address} cannot be reached: {error.strerror or error}; is it running?"
        ) from None


# --- The worker process


def main() -> None:
    """Do tasks until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the build handles Ctrl-C and ends its workers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    received: SimpleQueue[tuple[str, Task]] = SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(EOFError):
            while True:
                received.put(pickle.load(sys.stdin.buffer))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    import pyarrow as pa

    pa.set_cpu_count(1)  # workers share the cores
    pa.set_io_thread_count(1)
    while True:
        pickle.dump(answer(*received.get()), answers)
        answers.flush()


if __name__ == "__main__":
    main()
