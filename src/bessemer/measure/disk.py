"""How fast a folder's disk writes and reads, and how fast tokens are read from a mapped file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

from bessemer.errors import InputError
from bessemer.plan.machine import Disk

BLOCK = 1 << 22
SEQUENCE = 1024  # tokens of a mapped read
LEAST, MOST = 1 << 23, 400_000_000  # bytes written


def measure(folder: Path, budget: float) -> Disk:
    """Write a file there for about a third of `budget` seconds, read it back, and read sequences of it at random places.

    The file is removed. Reading is from the disk where the kernel drops the file from its cache when asked (Linux). Raises
    InputError where the folder cannot be written or has no room.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".bessemer-", dir=folder) as place:
            return _measure(Path(place) / "tokens.bin", budget / 3.0)
    except OSError as error:
        raise InputError(
            f"{folder}: the disk cannot be measured there ({error.strerror}); name another folder with --disk DIR"
        ) from None


def _measure(file: Path, budget: float) -> Disk:
    data = np.random.default_rng(0).integers(0, 1 << 16, BLOCK // 2, dtype=np.uint16).tobytes()
    written, began = 0, perf_counter()
    with open(file, "wb", buffering=0) as out:
        while written < LEAST or (written < MOST and perf_counter() - began < budget):
            written += out.write(data)
        os.fsync(out.fileno())
        write = written / (perf_counter() - began)
        with contextlib.suppress(AttributeError, OSError):  # not on macOS
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = perf_counter()
    with open(file, "rb", buffering=0) as back:
        while back.read(BLOCK):
            pass
    read = written / (perf_counter() - began)
    tokens = np.memmap(file, dtype=np.uint16, mode="r")
    draw, taken, began = np.random.default_rng(1), 0, perf_counter()
    while taken < LEAST or (perf_counter() - began < budget and taken < 4 * written):
        for start in draw.integers(0, len(tokens) - SEQUENCE, 256):
            taken += tokens[start : start + SEQUENCE].astype(np.int64).nbytes // 4
    mapped = taken / (perf_counter() - began)
    del tokens
    return Disk(write, read, mapped)
