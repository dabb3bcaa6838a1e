"""The heartbeat and watchdog of a training process.

The watchdog is a timer of `faulthandler`. If the process makes no progress for too long, it dumps the stacks of all threads,
even while another thread holds the GIL. In a group of processes it then ends this one, so that torchrun restarts the group.

The heartbeat is a small file from which the next start finds the process that hung. A thread writes it each second, so it stops
in a process that is suspended or holds the GIL.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from bessemer.common.console import warn
from bessemer.guard.incidents import HANG, record
from bessemer.run.directory import RunDirectory

BEAT_SECONDS = 1.0
# A step hangs if it takes longer than STEP_FACTOR x the 99th percentile of the last steps, and SHORTEST_SECONDS.
STEP_FACTOR, SHORTEST_SECONDS = 5.0, 60.0
LONGEST_SECONDS = 1800.0  # the limit of the other phases
PHASES = ("start", "step", "validation", "saving", "end")
# The limit of a step follows the last WINDOW steps. It is first set after FEWEST_STEPS steps, then every RENEWED_EVERY.
WINDOW, FEWEST_STEPS, RENEWED_EVERY = 256, 8, 32
FILE_BYTES = 512
REARM_SHARE = 0.05  # share of the limit within which progress does not reset the timer, to save system calls


@dataclass(frozen=True)
class Reading:
    """The heartbeat of a process.

    Attributes:
        pid: The process id.
        rank: The rank.
        node: The number of the node in the group.
        host: The name of the machine.
        phase: One of PHASES.
        step: The last completed step.
        beat: The time of the last beat, seconds since the epoch.
        since: The time of the last progress.
        limit: The seconds without progress after which the process hangs; 0 for never.
    """

    pid: int
    rank: int
    node: int
    host: str
    phase: str
    step: int
    beat: float
    since: float
    limit: float

    @property
    def activity(self) -> str:
        """The phase and step as words of a message."""
        names = {"start": "the start", "step": f"step {self.step + 1}", "end": "the end of the training"}
        return names.get(self.phase, f"the {self.phase} after step {self.step}")


def read(path: Path) -> Reading | None:
    """Return the heartbeat in a file; None if it is missing or invalid."""
    try:
        return Reading(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


class Heartbeat:
    """The heartbeat and watchdog of this process, as a context manager."""

    def __init__(self, path: Path | None, rank: int, stacks: Path, hang_seconds: float | None = None) -> None:
        """Prepare the heartbeat and the watchdog; entering the context starts them.

        Args:
            path: The heartbeat file of a process in a group, which the watchdog may end; None for a single process.
            rank: The rank of this process.
            stacks: The file for the stack traces of a process that hangs.
            hang_seconds: The seconds after which a step hangs; 0 for never, None for a multiple of the last steps' duration.
        """
        self._path, self._rank, self._stacks, self._hang_seconds = path, rank, stacks, hang_seconds
        self._ended, self._seconds = threading.Event(), deque[float](maxlen=WINDOW)
        self._slow_limit = SHORTEST_SECONDS
        self._phase, self._step, self._since = "start", 0, time.time()
        self._limit = self._limit_of("start")
        self._runs, self._armed = False, 0.0

    def __enter__(self) -> Self:
        self._file = open(self._stacks, "a")
        self._handle = None if self._path is None else os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._runs = True
        self._arm()
        self._write()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._runs = False
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if self._handle is not None:
            os.close(self._handle)
        if not self._stacks.stat().st_size:
            self._stacks.unlink()

    def mark(self, phase: str, step: int) -> None:
        """Record progress: `phase` (one of PHASES) starts or continues after `step` completed steps."""
        now = time.time()
        if phase == self._phase == "step" and step == self._step + 1:
            self._seconds.append(now - self._since)
            if len(self._seconds) == FEWEST_STEPS or step % RENEWED_EVERY == 0:
                ascending = sorted(self._seconds)
                self._slow_limit = max(SHORTEST_SECONDS, STEP_FACTOR * ascending[int(0.99 * len(ascending))])
        before, self._limit = self._limit, self._limit_of(phase)
        self._phase, self._step, self._since = phase, step, now
        if self._runs:
            if self._limit != before or now - self._armed > REARM_SHARE * self._limit:
                self._arm()
            self._write()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enter a phase for the block: a validation or a save between steps, or "start" for a restore."""
        before, step = self._phase, self._step
        self.mark(phase, step)
        try:
            yield
        finally:
            self.mark(before, step)

    def _limit_of(self, phase: str) -> float:
        if self._hang_seconds == 0:
            return 0.0
        if phase != "step":
            return LONGEST_SECONDS
        return self._slow_limit if self._hang_seconds is None else self._hang_seconds

    def _arm(self) -> None:
        """Restart the watchdog's timer, which reports a hang after the limit of the current phase."""
        self._armed = time.time()
        if self._limit:
            faulthandler.dump_traceback_later(self._limit, exit=self._path is not None, file=self._file)

    def _reading(self) -> Reading:
        node, host = int(os.environ.get("GROUP_RANK", "0")), socket.gethostname()
        times = time.time(), self._since, self._limit
        return Reading(os.getpid(), self._rank, node, host, self._phase, self._step, *times)

    def _write(self) -> None:
        if self._handle is not None:  # a single call, so that a kill does not leave half a line
            os.pwrite(self._handle, json.dumps(asdict(self._reading())).ljust(FILE_BYTES).encode(), 0)

    def _beat(self) -> None:
        reported, dumped = 0.0, 0  # the last progress before the reported hang, and the size of the stacks then
        while not self._ended.wait(BEAT_SECONDS):
            self._write()
            waiting, size = time.time() - self._since, os.fstat(self._file.fileno()).st_size
            is_late = self._limit and waiting > self._limit and size > dumped  # the timer has dumped the stacks
            if self._path is None and is_late and reported != self._since:
                reported, dumped = self._since, size
                self._report(f"no progress for {waiting:.0f} s in {self._reading().activity}")

    def _report(self, cause: str) -> None:
        """Report the hang of a single process, which keeps waiting."""
        warn(f"{cause}; the stacks of its threads are in {self._stacks}")
        record(RunDirectory(self._stacks.parent).incidents, HANG, step=self._step + 1, cause=cause, rank=self._rank)
