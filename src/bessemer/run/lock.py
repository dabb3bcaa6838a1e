"""A lock file between processes. The lock ends with its process, and errors name the process that holds it."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


def is_held(path: Path) -> bool:
    """Return True if a process on this machine holds the lock.

    It reads /proc/locks, because taking the lock could block a process that is starting.
    """
    with suppress(OSError):
        file, locks = os.stat(path), Path("/proc/locks").read_text()
        inode = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        return any("FLOCK" in line and inode in line.split() for line in locks.splitlines())
    return False


def was_held_locally(path: Path) -> bool:
    """Return True if the last process that held the lock was on this machine."""
    with suppress(OSError):
        holder = path.read_text(encoding="utf-8", errors="replace")
        return holder.partition(",")[0].endswith(f" of {socket.gethostname()}")
    return False
