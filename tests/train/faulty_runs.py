"""Trainings of the small recipe with damaged batches and steps."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.check.replay import replay
from bessemer.cli import run_command
from bessemer.recipe import load_resolved
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_lines
from bessemer.tokens.loader import Batch, Loader
from bessemer.train.trainer import DeviceStats, Trainer


def poison(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool]) -> None:
    """Replace the tokens of batches whose first sample satisfies `is_bad` by random ones, as in a damaged shard."""
    honest = Loader.batch

    def batch(self: Loader, first: int, count: int) -> Batch:
        read = honest(self, first, count)
        if not is_bad(first):
            return read
        draw = np.random.default_rng(first)
        tokens = draw.integers(0, 400, (len(read.inputs), read.inputs.shape[1] + 1))
        return replace(read, inputs=tokens[:, :-1], targets=tokens[:, 1:])

    monkeypatch.setattr(Loader, "batch", batch)


def incidents(folder: Path) -> list[dict[str, Any]]:
    return read_json_lines(folder / "incidents.jsonl")


STEPS, EVERY = 130, 10


SMALL = "model.layers=1", "train.micro_batch=8", "report.tensorboard=false"


def train(recipe_file: Path, runs: Path, *overrides: str, expected: int = 0) -> Path:
    values = (f"run.dir={runs}", f"train.steps={STEPS}", f"checkpoint.every={EVERY}", *SMALL, *overrides)
    sets = [part for value in values for part in ("--set", value)]
    assert run_command(["train", str(recipe_file), *sets]) == expected
    return runs / "small"


def copied(runs: Path, name: str) -> Path:
    """Copy the runs to another folder, with the same tokens."""
    place = runs.with_name(name)
    shutil.copytree(runs, place)
    return place


def change_steps(patch: pytest.MonkeyPatch, change: Callable[[Trainer, Batch, DeviceStats], DeviceStats]) -> None:
    """Pass the gradients and statistics of each step through `change`."""
    honest = Trainer.forward_backward

    def forward_backward(self: Trainer, batch: Batch, *scale: Any) -> DeviceStats:
        return change(self, batch, honest(self, batch, *scale))

    patch.setattr(Trainer, "forward_backward", forward_backward)


def record_batches(patch: pytest.MonkeyPatch) -> list[Batch]:
    """Return a list to which every trained batch is appended."""
    batches: list[Batch] = []
    change_steps(patch, lambda trainer, batch, stats: (batches.append(batch), stats)[1])
    return batches


def faulty(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool]) -> None:
    """Set the gradient norm to NaN in steps for which `is_bad` is true of the number of earlier calls."""
    calls = count()
    change_steps(monkeypatch, lambda trainer, batch, stats: (
        replace(stats, grad_norm=stats.grad_norm * math.nan) if is_bad(next(calls)) else stats))  # fmt: skip


def replayed(folder: Path, step: int) -> dict[str, Any]:
    return replay(load_resolved(folder), RunDirectory(folder), step)
