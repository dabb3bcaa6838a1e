"""Append-only logs of a run. A log that cannot be written is reported once and kept in memory; it never stops the run."""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from pathlib import Path
from threading import RLock
from typing import Any

from bessemer.common.console import warn

MAX_WAITING = 100_000  # entries of a file kept in memory while it cannot be written; the oldest are dropped first
_waiting: dict[Path, deque[bytes]] = {}
_lock = RLock()


def json_line(value: Any) -> bytes:
    """Encode a value as a line of a JSON Lines file."""
    return (json.dumps(value, ensure_ascii=False, default=str) + "\n").encode()


def append_entry(path: Path, entry: bytes) -> None:
    """Append an entry to a log file whole, so that readers never see part of an entry.

    While the file cannot be written, for example on a full disk, entries wait in memory, and each call, also for another file,
    tries again. The first failure prints a warning.
    """
    with _lock:
        was_waiting = path in _waiting
        _waiting.setdefault(path, deque(maxlen=MAX_WAITING)).append(entry)
        problem = _write_waiting().get(path)
        if problem and not was_waiting:
            warn(f"{path}: cannot be written ({problem}); keeping its lines in memory")


def close_logs() -> None:
    """Write the waiting entries of all logs at the end of a training or a process, and warn of those that are lost."""
    with _lock:
        for path in _write_waiting():
            lost = _waiting.pop(path)
            warn(f"{path}: its last {len(lost):,} entries are lost, because it could not be written")


def _write_waiting() -> dict[Path, str]:
    """Write all waiting entries, and return an error message for each file that cannot be written."""
    problems = {}
    for path, entries in [*_waiting.items()]:
        try:
            _append_whole(path, b"".join(entries))
            del _waiting[path]
        except OSError as error:
            problems[path] = error.strerror or str(error)
    return problems


def _append_whole(path: Path, data: bytes) -> None:
    """Append all of the data or none of it, and end a line that a kill left incomplete. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        before = os.fstat(file).st_size
        is_torn = before and path.suffix == ".jsonl" and os.pread(file, 1, before - 1) != b"\n"
        rest = memoryview(b"\n" + data if is_torn else data)
        try:
            while rest:  # a disk that becomes full accepts only part of it
                rest = rest[os.write(file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, before)
            raise
    finally:
        os.close(file)
