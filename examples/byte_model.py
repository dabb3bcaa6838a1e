"""A small model of bytes, which the notebooks of this folder train on the source of Python's standard library."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import model_config
from bessemer.model.recipe_defaults import resolve
from bessemer.model.transformer import build_model
from bessemer.recipe import Recipe, parse
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch
from bessemer.train import device as devices
from bessemer.train.trainer import Trainer
from bessemer.train.validation import validate

VOCABULARY, END_OF_TEXT = 256, 0  # a byte that no source file has
Text = npt.NDArray[np.uint8]
Reader = Callable[[int], Batch]


def make_recipe(sequences: int = 16, length: int = 64, steps: int = 100, **keys: Any) -> Recipe:
    """Resolve a recipe of two layers of width 64, changed by `keys`, where `__` stands for the dot: `model__width=128`."""
    values = {
        "run.name": "example", "tokens.sequence_length": length, "model.layers": 2, "model.width": 64, "model.heads": 2,
        "train.device": "cpu", "train.precision": "fp32", "train.compile": "off", "train.steps": steps,
        "train.global_batch_tokens": sequences * length, "train.micro_batch": min(sequences, 256),
        "train.optimizer.learning_rate": 0.008,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }  # fmt: skip
    return resolve(parse("", "example", [f"{key}={json.dumps(value)}" for key, value in values.items()]), VOCABULARY)


def make_trainer(recipe: Recipe, config: ModelConfig | None = None) -> Trainer:
    """Build the model of a recipe, or of `config`, with its optimizer."""
    model = build_model(config or model_config(recipe, VOCABULARY), recipe.run.seed)
    return Trainer(recipe, model, devices.choose(recipe.train), END_OF_TEXT, 1)


@cache
def python_text(max_bytes: int = 2_000_000) -> tuple[Text, Text]:
    """Return source of the standard library: text to train on, and its last tenth, which is held out."""
    paths, text = Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), bytearray()
    for path in sorted(paths, key=lambda path: hashlib.blake2b(path.name.encode()).digest()):
        text += path.read_bytes().replace(b"\0", b"") + bytes([END_OF_TEXT])
    whole = np.frombuffer(bytes(text[:max_bytes]), dtype=np.uint8)
    return whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]


def windows(text: Text, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Return `length` bytes of a text from each start, (starts, length)."""
    return np.stack([text[start : start + length] for start in starts]).astype(np.int64)


def reader(recipe: Recipe, text: Text | None = None) -> Reader:
    """Return a function that draws the batch of a step from a text, by default the Python source."""
    text, length = python_text()[0] if text is None else text, recipe.tokens.sequence_length
    sequences = (recipe.train.global_batch_tokens or 0) // length

    def read(step: int) -> Batch:
        starts = np.random.default_rng(step).integers(0, len(text) - length, sequences)
        return Batch.next_token(
            step * sequences, windows(text, starts, length + 1), np.zeros(sequences, dtype=np.int64)
        )

    return read


def train(trainer: Trainer, read: Reader, steps: range) -> list[float]:
    """Train for these steps. Returns the loss of each in nats a byte."""
    losses = []
    for step in steps:
        results = trainer.forward_backward(read(step))
        trainer.update(step, results.grad_norm)
        losses.append(float(results.loss))
    return losses


def held_out_loss(trainer: Trainer, sequences: int = 128) -> float:
    """Score held-out text, in nats a byte."""
    text, length = python_text()[1], trainer.model.config.sequence_length
    tokens = windows(text, np.linspace(0, len(text) - length - 1, sequences).astype(np.int64), length + 1)
    targets = np.where(tokens[:, 1:] == END_OF_TEXT, -1, tokens[:, 1:])
    part = HeldOut("python", tokens[:, :-1], targets, (targets >= 0).sum(axis=1))
    return validate(trainer, [part]).loss


def smoothed(losses: list[float], window: int = 10) -> npt.NDArray[np.float64]:
    """Average over the last `window` values, for plots."""
    sums = np.cumsum([0.0, *losses])
    ends = np.arange(1, len(losses) + 1)
    begins = np.maximum(ends - window, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)
