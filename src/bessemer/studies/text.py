"""What the studies of small byte models share: the sources of Python's standard library as text, and recipes from few keys."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.defaults.derived_keys import resolve
from bessemer.recipe import Recipe, parse
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch

VOCABULARY = 256
END_OF_TEXT = 0  # a byte that no source file has


def study_recipe(name: str, values: dict[str, Any], base: str = "", vocabulary: int = VOCABULARY) -> Recipe:
    """The resolved recipe of these keys; base: what stands in its file."""
    overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()]
    return resolve(parse(base, name, ["run.name=study", *overrides]), vocabulary)


@lru_cache(maxsize=2)
def training_and_held_out(max_bytes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """About so many bytes of the library's modules, each ended by END_OF_TEXT, in an order that has no theme: text to train on,
    and the last tenth, which is held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for file in sorted(folder.glob("*.py"), key=lambda path: hashlib.blake2b(path.name.encode()).digest()):
        if len(text) >= max_bytes:
            break
        text += file.read_bytes().replace(b"\0", b"") + bytes([END_OF_TEXT])
    whole, border = np.frombuffer(bytes(text), dtype=np.uint8), len(text) * 9 // 10
    return whole[:border], whole[border:]


def _windows(text: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """(starts, length + 1) tokens."""
    return np.stack([text[start : start + length + 1] for start in starts]).astype(np.int64)


def sampler(text: npt.NDArray[np.uint8], sequences: int, length: int) -> Callable[[int], Batch]:
    """Batches of windows of a text, each a function of its step alone."""

    def read(step: int) -> Batch:
        starts = np.random.default_rng(step).integers(0, len(text) - length, sequences)
        return Batch.next_token(step * sequences, _windows(text, starts, length), np.zeros(sequences, dtype=np.int64))

    return read


def spread(name: str, text: npt.NDArray[np.uint8], sequences: int, length: int) -> HeldOut:
    """Windows spread evenly over a text, to be scored; every byte counts but the one that ends a file."""
    tokens = _windows(text, np.linspace(0, len(text) - length - 1, sequences).astype(np.int64), length)
    targets = np.where(tokens[:, 1:] == END_OF_TEXT, -1, tokens[:, 1:])
    return HeldOut(name, tokens[:, :-1], targets, (targets >= 0).sum(axis=1))


def batch(step: int, sequences: int, length: int, max_bytes: int) -> Batch:
    """The batch of a step, of the training text."""
    return sampler(training_and_held_out(max_bytes)[0], sequences, length)(step)


def held_out(sequences: int, length: int, max_bytes: int) -> HeldOut:
    return spread("python", training_and_held_out(max_bytes)[1], sequences, length)
