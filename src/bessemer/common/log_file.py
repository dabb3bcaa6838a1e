"""Append-only logs of a run. A log that cannot be written is reported once and kept in memory; it never stops the run."""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, Self

from bessemer.common.console import warn

MAX_UNWRITTEN = 100_000  # entries kept in memory while the file cannot be written; the oldest are dropped first


def json_line(value: Any) -> bytes:
    """Encode a value as a line of a JSON Lines file."""
    return (json.dumps(value, ensure_ascii=False, default=str) + "\n").encode()


def is_torn(path: Path) -> bool:
    """Return True if a file of lines ends within a line, as after a kill."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class LogFile:
    """A log file to which entries are appended whole, so that readers never see part of an entry.

    An incomplete last line, left by a kill, is ended. While the file cannot be written, for example on a full disk, entries
    wait in memory. Each `append` tries again, as does each successful one to another log of the process. The first failure
    prints a warning, as do entries lost at the end.
    """

    waiting: ClassVar[set[LogFile]] = set()
    _lock = RLock()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten: deque[bytes] = deque(maxlen=MAX_UNWRITTEN)
        with contextlib.suppress(OSError):  # the first entry reports a file that cannot be written
            if path.suffix == ".jsonl" and is_torn(path):
                _append_whole(path, b"\n")

    def append(self, entry: bytes) -> None:
        """Append an entry, after entries that could not be written before."""
        with self._lock:
            self._unwritten.append(entry)
            if self._flush():
                for log in [*self.waiting]:
                    log._flush()

    def _flush(self) -> bool:
        try:
            _append_whole(self.path, b"".join(self._unwritten))
        except OSError as error:
            if self not in self.waiting:
                warn(f"{self.path}: cannot be written ({error.strerror or error}); keeping its lines in memory")
            self.waiting.add(self)
            return False
        self._unwritten.clear()
        self.waiting.discard(self)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._unwritten:
            self._flush()
        if self._unwritten:
            warn(f"{self.path}: its last {len(self._unwritten):,} entries are lost, because it could not be written")
            self._unwritten.clear()
        self.waiting.discard(self)


def write_waiting() -> None:
    """Write the waiting entries of all logs at the end of a process, and warn of those that are lost."""
    for log in [*LogFile.waiting]:
        log.__exit__()


def _append_whole(path: Path, data: bytes) -> None:
    """Append all of the data or none of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        before, rest = os.fstat(file).st_size, memoryview(data)
        try:
            while rest:  # a disk that becomes full accepts only part of it
                rest = rest[os.write(file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, before)
            raise
    finally:
        os.close(file)
