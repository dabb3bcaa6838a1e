"""Tasks of the corpus, run in this process, in local worker processes, on a Ray cluster, or by job arrays of Slurm (slurm.py).

A dead worker costs only its current task. On Ray each task of the corpus is a task of its own as well.

`python -m bessemer.run_tasks.run` reads pickled tasks from standard input and writes a pickled None or exception for
each. It ends with its input, even in the middle of a task: no worker outlives its build.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

from bessemer.common import interrupt
from bessemer.common.console import progress, warn
from bessemer.common.environment import num_cores
from bessemer.common.errors import BessemerError, first_line, require_import
from bessemer.recipe import Work
from bessemer.run_tasks import engine
from bessemer.run_tasks.slurm import end_earlier, require_slurm, run_on_slurm
from bessemer.run_tasks.task import CorpusTask
from bessemer.run_tasks.time_limit import slow_documents
from bessemer.storage.filesystem import Location
from bessemer.storage.path import each

POLL_SECONDS = 0.1
PROBE_SECONDS = 10.0
# Less work than this is done in this process unless workers wait for some: one takes about a second to start
SMALL_BYTES = 8 << 20
# Tasks submitted to Ray ahead of time for each core: enough that none waits, while the driver's memory stays bounded
WAITING_PER_CORE = 4


def run_tasks(
    what: str, unit: str, tasks: Sequence[CorpusTask], bytes_per_size: float, settings: Work
) -> Iterator[dict[str, Any]]:
    """Do the tasks that are not done, behind a progress bar; returns the receipts of all, each read when it is asked for.

    bytes_per_size: bytes of input that a task's `size` stands for. Raises a task's error, BessemerError for one whose
    worker dies repeatedly, KeyboardInterrupt.
    """
    found = zip(tasks, _receipts(tasks), strict=True)
    missing = [task for task, done in found if done is None]
    size, to_do = (sum(task.size for task in some) for some in (tasks, missing))
    with progress(what, size, unit) as advance:
        advance(size - to_do)
        _run(what, missing, int(to_do * bytes_per_size), settings, lambda task: advance(task.size))
    return map(engine.require_receipt, tasks, _receipts(tasks))


def _receipts(tasks: Sequence[CorpusTask]) -> Iterator[dict[str, Any] | None]:
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


def _run(what: str, tasks: Sequence[CorpusTask], num_bytes: int, settings: Work, done: engine.OnResult) -> None:
    """Do all tasks, in the place that suits `num_bytes` of input; `done` is called after each."""
    num_workers = min(settings.workers or num_cores(), len(tasks))
    if not tasks:
        return
    shared = _shared if isinstance(tasks[0].work, Location) else tasks[0].work
    if shared is not None:
        end_earlier(shared)
    if settings.engine == "ray":
        run_on_ray(tasks, settings, done)
    elif settings.engine == "slurm" and num_bytes >= SMALL_BYTES:
        assert shared is not None, "work in a store is done within kept_workers"
        run_on_slurm(what, tasks, settings, done, shared)
    elif _kept or (num_workers > 1 and num_bytes >= SMALL_BYTES):
        Pool(tasks).work(num_workers, done)
    elif any(task.progress for task in tasks):
        Pool(tasks).work(1, done)
    else:
        engine.run(lambda: _run_here(tasks, done), tasks[0].stage)


def _run_here(tasks: Sequence[CorpusTask], done: engine.OnResult) -> None:
    for task in tasks:
        engine.check_stop()
        engine.perform(task)
        done(task)


# --- Processes of this machine

# processes that wait for the next stage's tasks; None: none are kept
_kept: list[subprocess.Popen[bytes]] | None = None
_shared: Path | None = None  # a folder that all nodes see, for the queues of job arrays whose work is in a store


@contextlib.contextmanager
def kept_workers(run: Path) -> Iterator[None]:
    """Within it the processes of one stage do the tasks of the next as well: a process takes about a second to start; and job
    arrays whose work is in a store take their tasks from below the folder of the run."""
    global _kept, _shared
    _kept, _shared = [], run
    try:
        yield
    finally:
        kept, _kept, _shared = _kept, None, None
        with contextlib.suppress(OSError):  # not empty: of an array that a killed driver left
            (run / "slurm").rmdir()
        _end(kept)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        with contextlib.suppress(BrokenPipeError), process:
            pass  # waits, and closes the pipes


class Pool:
    """Processes that do tasks, each served by a thread. One that dies is replaced and its task done again."""

    def __init__(self, tasks: Sequence[CorpusTask]) -> None:
        self.waiting = deque(tasks)
        self.answers: SimpleQueue[tuple[CorpusTask | None, Exception | None]] = SimpleQueue()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.has_ended = False
        self.starting = threading.Lock()

    def work(self, num_workers: int, done: engine.OnResult) -> None:
        """Do all tasks; raises what one raises, and BessemerError for one whose worker dies again and again."""
        threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(num_workers)]
        left = len(self.waiting)
        try:
            for thread in threads:
                thread.start()
            while left:
                interrupt.check()
                with contextlib.suppress(Empty):
                    task, failure = self.answers.get(timeout=POLL_SECONDS)
                    if failure is not None:
                        raise failure
                    assert task is not None
                    done(task)
                    left -= 1
            if _kept is not None:
                for thread in threads:
                    thread.join()
                _kept.extend(self.processes)
                self.processes = []
        finally:
            with self.starting:
                self.has_ended = True
            _end(self.processes)

    def _serve(self) -> None:
        """Give tasks to a process of its own until none is left."""
        process = None
        try:
            while self.waiting:
                task = self.waiting.popleft()
                why, num_attempts, slow = "", 0, slow_documents(task.progress)
                while num_attempts < engine.ATTEMPTS:
                    process = process or self._start()
                    if process is None:
                        return
                    try:
                        self.answers.put((task, self._ask(process, task)))
                        break
                    except (EOFError, BrokenPipeError, pickle.UnpicklingError, ValueError):  # it is dead
                        code = process.wait()
                        why, process = f"signal {-code}" if code < 0 else f"exit code {code}", None
                        if slow == (slow := slow_documents(task.progress)):
                            num_attempts += 1
                            if not self.has_ended:
                                warn(f"{task.stage}: {task}: its worker ended ({why}) and is replaced")
                else:
                    self.answers.put((task, engine.gave_up(task, why)))
        except IndexError:  # another thread took the last task
            pass
        except OSError as error:
            self.answers.put((None, error))

    def _start(self) -> subprocess.Popen[bytes] | None:
        """A process that waits, or a new one; None once the pool has ended."""
        command = [sys.executable, "-m", "bessemer.run_tasks.run"]
        environment = {**os.environ, **engine.worker_environment()}
        with self.starting:
            if self.has_ended:
                return None
            while _kept:
                process = _kept.pop()
                self.processes.append(process)
                if process.poll() is None:
                    return process
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self.processes.append(process)
            return process

    def _ask(self, process: subprocess.Popen[bytes], task: CorpusTask) -> Exception | None:
        assert process.stdin is not None and process.stdout is not None
        pickle.dump(task, process.stdin)
        process.stdin.flush()
        return cast("Exception | None", pickle.load(process.stdout))


# --- A Ray cluster


def run_on_ray(tasks: Sequence[CorpusTask], settings: Work, done: engine.OnResult) -> None:
    """Do all tasks on the cluster at `settings.address`, or on one that is started here for this process."""
    ray = _connected(settings)
    remote = ray.remote(num_cpus=1, max_retries=engine.ATTEMPTS - 1)(engine.answer)
    under_way: dict[Any, CorpusTask] = {}
    left = list(reversed(tasks))
    # At most `workers` tasks in flight; without a number the cluster's own queue is kept filled.
    ahead = settings.workers or max(int(ray.cluster_resources().get("CPU", 1)), 1) * WAITING_PER_CORE
    try:
        while left or under_way:
            interrupt.check()
            while left and len(under_way) < ahead:
                task = left.pop()
                under_way[remote.remote(task)] = task
            ready, _ = ray.wait(list(under_way), num_returns=1, timeout=POLL_SECONDS)
            for reference in ready:
                task = under_way.pop(reference)
                try:
                    failure = ray.get(reference)
                except ray.exceptions.RayError as error:  # its node is gone, or its worker died too often
                    why = f"{type(error).__name__}: {first_line(error)}"[:300]
                    failure = engine.gave_up(task, why, "lower corpus.workers")
                if failure is not None:
                    raise failure
                done(task)
    finally:
        with contextlib.suppress(Exception):  # the cluster is gone: so are its tasks
            for reference in under_way:
                ray.cancel(reference, force=True)


def _connected(settings: Work) -> Any:
    """The ray module, connected; a cluster started here lives as long as this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with require_import("corpus.engine: ray is not installed; install it with: pip install 'bessemer[ray]'"):
        import ray
    if ray.is_initialized():
        return ray
    address = settings.address or os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    on_terminate = signal.getsignal(signal.SIGTERM)  # Ray replaces it with one that exits with another code
    cluster: dict[str, Any] = {"address": address}
    if not address:
        cluster = {"num_cpus": settings.workers or num_cores(), "include_dashboard": False}
    environment = {"env_vars": engine.worker_environment()}
    try:
        if host and port.isdecimal():  # Ray itself would try for six minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
        ray.init(**cluster, runtime_env=environment, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        where = f"the cluster at {address}" if address else "a cluster on this machine"
        why = first_line(error)
        raise BessemerError(f"corpus.address: {where} cannot be reached: {why}; is it running?") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)
    return ray


# --- The worker process


def main() -> None:
    """Do tasks until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the build handles Ctrl-C and ends its workers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    received: SimpleQueue[CorpusTask] = SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(EOFError):
            while True:
                received.put(pickle.load(sys.stdin.buffer))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    engine.use_one_core()
    while True:
        pickle.dump(engine.answer(received.get()), answers)
        answers.flush()


if __name__ == "__main__":
    main()
