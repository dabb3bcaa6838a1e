"""The mean of the last checkpoints' weights: often better than the last one, before the learning rate has decayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from bessemer.checkpoint.protocol import Checkpoint, published, verify
from bessemer.checkpoint.reading import Files
from bessemer.errors import BessemerError, InputError


def newest(folder: Path, count: int, on_damage: Callable[[str], None] = lambda sentence: None) -> list[Checkpoint]:
    """The `count` newest checkpoints that verify, newest first; a damaged one is passed over.

    on_damage: called with a sentence for each that is. Raises InputError when there are fewer.
    """
    found: list[Checkpoint] = []
    for step in reversed(published(folder)):
        if len(found) == count:
            break
        try:
            found.append(verify(folder / f"step-{step:08d}"))
        except BessemerError as error:
            on_damage(f"{error}; it is left out of the average")
    if len(found) < count:
        raise InputError(
            f"--average: {count} checkpoints are wanted, {folder} has {len(found)} whole ones; ask for fewer, or keep more "
            "with checkpoint.keep and checkpoint.every"
        )
    return found


@torch.no_grad()
def mean_of(opened: list[Files], name: str) -> Tensor:
    """The mean of one weight over checkpoints of one model (Izmailov et al. 2018), summed in float64, as fp32."""
    total = opened[0].read("model", name).double()
    for files in opened[1:]:
        total += files.read("model", name)
    return total.div_(len(opened)).float()


def mean_weights(checkpoints: list[Checkpoint]) -> dict[str, Tensor]:
    """The mean of each weight. One weight of one checkpoint is in memory beside the means. Raises BessemerError when the models
    differ."""
    shapes = [{name: one.shape for name, one in each.contents["model"].items()} for each in checkpoints]
    for checkpoint, found in zip(checkpoints, shapes, strict=True):
        for name in sorted(found.keys() | shapes[0].keys()):
            if found.get(name) != shapes[0].get(name):
                raise BessemerError(f"{checkpoint.folder}: tensor {name} is not that of the other checkpoints")
    with ExitStack() as stack:
        opened = [stack.enter_context(checkpoint.opened()) for checkpoint in checkpoints]
        return {name: mean_of(opened, name) for name in shapes[0]}
