"""Executors on this machine: threads of this process, and local worker processes.

`python -m bessemer.run_tasks.local` is a worker. It reads tasks from standard input, each a line of JSON, and writes
one line of answer for each. It exits when its input ends, even in the middle of a task, so no worker outlives its
build.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import bessemer
from bessemer.common import extensions, interrupt
from bessemer.common.console import warn
from bessemer.run_tasks.task import ATTEMPTS, STOP, Task, answer, check_stop, expected_errors, raise_error, worker_error
from bessemer.run_tasks.time_limit import slow_documents

Item = TypeVar("Item")
Result = TypeVar("Result")

POLL_SECONDS = 0.1
STOP_SECONDS = 2.0  # how long a stopped build waits for threads to release their files
# Threads of libraries, since workers share the cores of their machine; Arrow reads the first for its computations
SINGLE_THREAD = (
    "OMP_NUM_THREADS", "ARROW_IO_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS",
)  # fmt: skip
# Variables passed to workers on other machines: trusted code and store endpoints; credentials come from their machines.
HANDED_ON = (extensions.TRUSTED, "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION")


def in_threads(
    work: Callable[[Item], object], items: Sequence[Item], num_threads: int = 1, end: Callable[[], None] = lambda: None
) -> Iterator[Item]:
    """Call `work` for each item in threads, and yield each item when its call is done.

    The main thread handles signals within 0.1 s, even while native code runs in the others. An exception of a call is raised
    here. After an exception or a stop, `end` is called, and the threads, which are daemons, get two seconds to finish.
    """
    waiting, answers = deque(items), SimpleQueue[tuple[Item, BaseException | None]]()

    def serve() -> None:
        with suppress(IndexError):  # raised when no item is left
            while True:
                item, failure = waiting.popleft(), None
                try:
                    work(item)
                except BaseException as error:
                    failure = error
                answers.put((item, failure))

    STOP.clear()
    threads = [threading.Thread(target=serve, daemon=True) for _ in range(num_threads)]
    try:
        for thread in threads:
            thread.start()
        num_left = len(items)
        while num_left:
            interrupt.check()
            with suppress(Empty):
                item, failure = answers.get(timeout=POLL_SECONDS)
                if failure is not None:
                    raise failure
                num_left -= 1
                yield item
    except BaseException:
        waiting.clear()
        STOP.set()
        end()
        for thread in threads:
            thread.join(STOP_SECONDS)
        raise


def run_in_thread(work: Callable[[], Result], stage: str = "corpus") -> Result:
    """Run `work` in a thread, as `in_threads` does, and return its result.

    OSError, MemoryError and BessemerError pass through. Any other exception becomes a BessemerError that names `stage`.
    """
    results: list[Result] = []
    with expected_errors(f"{stage}: the work"):
        for _ in in_threads(lambda _: results.append(work()), [None]):
            pass
    return results[0]


class Pool:
    """A pool of worker processes, which replaces workers that die and repeats their tasks."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.idle: list[subprocess.Popen[bytes]] = []
        self.starting = threading.Lock()

    def run(self, tasks: Sequence[Task], num_workers: int) -> Iterator[Task]:
        """Run tasks in `num_workers` processes and yield each task when it is done.

        Raises the exception of a failed task, and BessemerError for a task whose worker process dies repeatedly.
        """
        return in_threads(self._do, tasks, num_workers, self.end)

    def end(self) -> None:
        """End all processes."""
        with self.starting:
            for process in self.processes:
                process.kill()
            for process in self.processes:
                with suppress(BrokenPipeError), process:
                    pass  # waits, and closes the pipes
            self.processes, self.idle = [], []

    def _do(self, task: Task) -> None:
        """Run a task in a worker process, up to ATTEMPTS times if the process dies. Raises the exception of the task."""
        reason, num_attempts, slow = "", 0, slow_documents(task.progress)
        while num_attempts < ATTEMPTS:
            process = self._take_process()
            try:
                return run_in_process(process, task)
            except ValueError:  # it is dead, or its pipes are closed
                code = process.wait()
                reason = f"signal {-code}" if code < 0 else f"exit code {code}"
                if slow == (slow := slow_documents(task.progress)):
                    num_attempts += 1
                    if not STOP.is_set():
                        warn(f"{task.stage}: {task}: its worker died ({reason}); starting another")
            finally:
                self.idle.append(process)
        raise worker_error(task, reason)

    def _take_process(self) -> subprocess.Popen[bytes]:
        """Return an idle worker process, or start one. Raises Stopped if the user has stopped the build."""
        with self.starting:
            check_stop()
            while self.idle:
                if (process := self.idle.pop()).poll() is None:
                    return process
            command = [sys.executable, "-m", "bessemer.run_tasks.local"]
            environment = {**os.environ, **worker_environment()}
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self.processes.append(process)
            return process


def run_in_process(process: subprocess.Popen[bytes], task: Task) -> None:
    """Run a task in a worker process. Raises the exception of the task, or ValueError if the process is dead."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(f"{task.to_json()}\n".encode())
        process.stdin.flush()
    raise_error(process.stdout.readline())


def worker_environment() -> dict[str, str]:
    """Return environment variables for a worker process: import path, store endpoints, trusted code and one thread."""
    above = str(Path(bessemer.__file__).parent.parent)
    path = [above, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    handed_on = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), **dict.fromkeys(SINGLE_THREAD, "1"), **handed_on}


def main() -> None:
    """Run the tasks on standard input, one JSON line each, until it ends, and print a JSON line with each result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the build handles Ctrl-C and ends its workers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    received: SimpleQueue[bytes] = SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            received.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        print(answer(received.get()), file=answers, flush=True)


if __name__ == "__main__":
    main()
