"""A lock file between processes. The lock ends with its process, and errors name the process that holds it."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bessemer.common.errors import BessemerError


@contextmanager
def hold(path: Path, on_wait: Callable[[str], object] | None = None) -> Iterator[None]:
    """Hold the lock of a file, which is created if missing.

    Args:
        path: The lock file.
        on_wait: Function called with the holder, such as "pid 12 of node-3", before waiting for it. None: do not wait.

    Raises:
        BessemerError: Another process holds the lock, or the file system does not support locks.
        OSError: The file cannot be written.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 256, 0).decode(errors="replace") or "of another machine"
            if on_wait is None:
                problem = f"{path.parent}: another process ({holder}) is writing this run"
                raise BessemerError(f"{problem}; wait for it, or set another run.name") from None
            on_wait(holder)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            raise BessemerError(f"{path}: cannot be locked ({error.strerror}); set run.dir to another disk") from None
        os.ftruncate(handle, 0)
        job = f", Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
        os.pwrite(handle, f"pid {os.getpid()} of {socket.gethostname()}{job}".encode(), 0)
        yield
    finally:
        os.close(handle)
