"""The heartbeat of a training process: its phase, and since when, in shared memory that a watchdog reads.

A thread renews the time of the last beat each second, also while the main thread waits. A process that no longer beats was
stopped, or holds the interpreter; one that beats without progress waits for something.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bessemer.guard.incidents import HANG, record
from bessemer.run import RunFolder
from bessemer.terminal import warn

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0  # without a beat
# A step hangs that takes longer than so many times the 99th percentile of the last steps, and than so long.
STEP_FACTOR, SHORTEST_SECONDS = 5.0, 60.0
LONGEST_SECONDS = 1800.0  # of another phase
PHASES = ("start", "step", "validation", "saving", "end")
# The limit of a step follows the last WINDOW steps: from the first FEWEST_STEPS on, and every so many anew.
WINDOW, FEWEST_STEPS, RENEWED_EVERY = 256, 8, 32

_LAYOUT = struct.Struct("<qqqqddd")  # pid, rank, phase, step, time of the last beat, start of the phase, its limit


@dataclass(frozen=True)
class Reading:
    """The heartbeat of another process. silence: seconds since the last beat; waiting: since the last progress;
    limit: seconds after which waiting is a hang, 0 for never; step: the last that was completed."""

    pid: int
    rank: int
    phase: str
    step: int
    silence: float
    waiting: float
    limit: float

    @property
    def activity(self) -> str:
        """Its phase and step, for a message."""
        return _described(self.phase, self.step)

    @property
    def is_silent(self) -> bool:
        """Whether it does not answer: it was stopped, or holds the interpreter."""
        return bool(self.limit) and self.silence > min(SILENCE_SECONDS, self.limit)

    @property
    def hangs(self) -> bool:
        """Whether it makes no progress."""
        return bool(self.limit) and self.waiting > self.limit


def read(path: Path) -> Reading | None:
    """The heartbeat in a file; None where there is none yet."""
    try:
        data = path.read_bytes()
        pid, rank, phase, step, beat, since, limit = _LAYOUT.unpack(data[: _LAYOUT.size])
    except (OSError, struct.error):
        return None
    now = time.monotonic()
    return Reading(pid, rank, PHASES[phase], step, now - beat, now - since, limit) if pid else None


def last_step(place: Path) -> int:
    """The largest step in the heartbeats of a folder; 0 without any."""
    readings = [read(path) for path in place.glob("*.heartbeat")]
    return max((one.step for one in readings if one is not None), default=0)


class Heartbeat:
    """This process's heartbeat, for a watchdog in another process or for its own thread."""

    def __init__(
        self, path: Path | None, rank: int, stacks: Path, hang_seconds: float | None = None,
        on_hang: Callable[[str, int], None] = lambda cause, step: None,
    ) -> None:  # fmt: skip
        """path: of its file, None without a watchdog; stacks: file for the stacks of all threads, written at SIGUSR2, and without
        a watchdog when the process hangs, before `on_hang` is called; hang_seconds: limit of a step; None: by the last
        steps; 0: never."""
        self._path, self._rank, self._stacks = path, rank, stacks
        self._hang_seconds, self._on_hang = hang_seconds, on_hang
        self._ended, self._seconds = threading.Event(), deque[float](maxlen=WINDOW)
        self._slow_limit = SHORTEST_SECONDS
        self._phase, self._step, self._since = "start", 0, time.monotonic()
        self._limit = self._limit_of("start")
        self._memory: mmap.mmap | None = None

    def __enter__(self) -> Self:
        self._file = open(self._stacks, "a")
        faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True)
        if self._path is not None:
            with open(self._path, "wb+") as file:
                file.write(bytes(_LAYOUT.size))
                file.flush()
                self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._write(time.monotonic())
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        faulthandler.unregister(signal.SIGUSR2)
        self._file.close()
        if not self._stacks.stat().st_size:
            self._stacks.unlink()

    def mark(self, phase: str, step: int) -> None:
        """Begin a phase after `step` completed steps."""
        now = time.monotonic()
        if phase == self._phase == "step" and step == self._step + 1:
            self._seconds.append(now - self._since)
            if len(self._seconds) == FEWEST_STEPS or step % RENEWED_EVERY == 0:
                ascending = sorted(self._seconds)
                self._slow_limit = max(SHORTEST_SECONDS, STEP_FACTOR * ascending[int(0.99 * len(ascending))])
        self._phase, self._step, self._since, self._limit = phase, step, now, self._limit_of(phase)
        self._write(now)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Context of a validation or a save between two steps, or of a restore, which is of the phase "start"."""
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

    def _write(self, beat: float) -> None:
        if self._memory is not None:
            phase = PHASES.index(self._phase)
            values = os.getpid(), self._rank, phase, self._step, beat, self._since, self._limit
            _LAYOUT.pack_into(self._memory, 0, *values)

    def _beat(self) -> None:
        reported = 0.0  # start of the phase whose hang was reported
        while not self._ended.wait(BEAT_SECONDS):
            self._write(time.monotonic())
            waiting = time.monotonic() - self._since
            if self._memory is None and self._limit and waiting > self._limit and reported != self._since:
                reported = self._since
                faulthandler.dump_traceback(self._file, all_threads=True)
                where = _described(self._phase, self._step)
                self._on_hang(f"no progress for {waiting:.0f} s in {where}", self._step + 1)


def unwatched_heartbeat(run: RunFolder, rank: int, hang_seconds: float | None) -> Heartbeat:
    """The heartbeat of a process without a watchdog: it reports and records its own hang, with the stacks in the run folder."""
    stacks = run.path / ("stacks.txt" if rank == 0 else f"stacks-{rank}.txt")

    def report(cause: str, step: int) -> None:
        warn(f"{cause}; where its threads are is in {stacks}")
        record(run.incidents, HANG, step=step, cause=cause, rank=rank)

    return Heartbeat(None, rank, stacks, hang_seconds, report)


def _described(phase: str, step: int) -> str:
    names = {"start": "the start", "step": f"step {step + 1}", "end": "the end of the training"}
    return names.get(phase, f"the {phase} after step {step}")
