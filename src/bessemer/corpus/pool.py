"""Worker processes of this machine: each has one task under way; one that dies is replaced, its task done again."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bessemer import interrupt
from bessemer.corpus import worker
from bessemer.corpus.worker import ATTEMPTS, POLL_SECONDS, Done, Task, gave_up, worker_environment


@dataclass
class Worker:
    """A process and the task it has under way."""

    process: subprocess.Popen[str]
    task: Task | None = None


@dataclass
class Pool:
    """Does the tasks of one kind, then ends."""

    kind: str
    num_workers: int
    done: Done
    workers: list[Worker] = field(default_factory=list)
    deaths: dict[int, int] = field(default_factory=dict)

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
                        one: Worker = key.data
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
        one = Worker(process)
        self.workers.append(one)
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ, one)
        self._give(one, waiting)

    def _give(self, one: Worker, waiting: deque[Task]) -> None:
        if not waiting:
            return
        one.task = waiting.popleft()
        assert one.process.stdin is not None
        try:
            one.process.stdin.write(json.dumps({"kind": self.kind, "task": one.task}) + "\n")
            one.process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead; the end of its output says so, and the task goes to another

    def _bury(self, one: Worker, waiting: deque[Task]) -> bool:
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
