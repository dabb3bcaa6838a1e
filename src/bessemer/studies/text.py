"""Real text that is on every machine, for studies: the sources of Python's standard library, byte by byte."""

from __future__ import annotations

import hashlib
import sysconfig
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch

VOCABULARY = 256
END_OF_TEXT = 0  # a byte that no source file has


@lru_cache(maxsize=2)
def standard_library(max_bytes: int) -> npt.NDArray[np.uint8]:
    """About so many bytes of the library's modules, each ended by END_OF_TEXT, in an order that has no theme."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"), key=lambda path: hashlib.blake2b(path.name.encode()).digest())
    text = bytearray()
    for file in files:
        if len(text) >= max_bytes:
            break
        text += file.read_bytes().replace(b"\0", b"") + bytes([END_OF_TEXT])
    return np.frombuffer(bytes(text), dtype=np.uint8)


@lru_cache(maxsize=2)
def _cut(max_bytes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Training and held-out text: the last tenth is held out."""
    text = standard_library(max_bytes)
    border = len(text) * 9 // 10
    return text[:border], text[border:]


def batch(step: int, sequences: int, length: int, max_bytes: int) -> Batch:
    """The batch of a step: windows of the training text, a function of the step alone."""
    text, _ = _cut(max_bytes)
    starts = np.random.default_rng(step).integers(0, len(text) - length, sequences)
    tokens = np.stack([text[start : start + length + 1] for start in starts]).astype(np.int64)
    return Batch(step * sequences, tokens, np.zeros(sequences, dtype=np.int64))


def held_out(sequences: int, length: int, max_bytes: int) -> HeldOut:
    """Windows spread evenly over the held-out text; every byte counts but the one that ends a file."""
    _, text = _cut(max_bytes)
    starts = np.linspace(0, len(text) - length - 1, sequences).astype(np.int64)
    tokens = np.stack([text[start : start + length + 1] for start in starts]).astype(np.int64)
    valid = tokens[:, 1:] != END_OF_TEXT
    return HeldOut("python", tokens, valid, valid.sum(axis=1))
