"""Corpus and tokens of the same inputs are built once for all runs under one `run.dir`, and shared by hard links.

A link is a name of its own for the same bytes: whichever run is removed, the others keep theirs. Published stages are never
written to in place, so no run sees what another does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bessemer.run import STAGE_FILE, link, stage_is_current, staging
from bessemer.terminal import say, warn


@contextmanager
def built_once(folder: Path, inputs: str, is_whole: Callable[[Path], bool] = Path.exists) -> Iterator[Path | None]:
    """Take a stage's `folder` over from a run beside this one that has it of the same `inputs`.

    Gives that run's folder, or None: then the block builds it, and others that want the same wait for it. Only published
    stages with files of full length are taken, of which `is_whole` says that they are as they were written; a copy is made
    where hard links are impossible.
    """
    with _lock(folder.parent.parent / f".building-{folder.name}-{inputs[:16]}", folder.name):
        yield None if stage_is_current(folder, inputs) else _taken(folder, inputs, is_whole)


def _taken(folder: Path, inputs: str, is_whole: Callable[[Path], bool]) -> Path | None:
    for record in sorted(folder.parent.parent.glob(f"*/{folder.name}/{STAGE_FILE}")):
        theirs = record.parent
        if theirs == folder or not stage_is_current(theirs, inputs):
            continue
        try:
            with staging(folder) as staged:
                link(theirs.resolve(), staged)
                if not stage_is_current(staged, inputs):
                    raise FileNotFoundError(theirs)
                if not is_whole(staged):
                    warn(f"{theirs}: damaged, so it is not taken over; `bessemer run {theirs.parent}` mends it")
                    raise FileNotFoundError(theirs)
        except (FileNotFoundError, shutil.Error):  # removed or replaced while it was linked, or damaged
            continue
        return theirs.parent
    return None


@contextmanager
def _lock(path: Path, what: str) -> Iterator[None]:
    """Hold a lock among processes; it ends with its process, and its file with the last holder."""
    handle = _opened(path, what)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: who waits notices that the file is another
        os.close(handle)


def _opened(path: Path, what: str) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _wait(handle, what)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _wait(handle: int, what: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"  another run is building the same {what}: waiting, to share it")
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks: each builds its own
