"""The mean of the last checkpoints' weights: often better than the last one, before the learning rate has decayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bessemer.checkpoint.protocol import Checkpoint, published, verify
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
def mean_weights(checkpoints: list[Checkpoint]) -> dict[str, Tensor]:
    """The mean of each weight over checkpoints of one model (Izmailov et al. 2018), summed in float64, as fp32.

    One checkpoint is in memory at a time. Raises BessemerError when the models differ.
    """
    sums: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        weights = checkpoint.tensors("model")
        for name in sums.keys() | weights.keys() if sums else weights.keys():
            if name not in weights or (sums and (name not in sums or sums[name].shape != weights[name].shape)):
                raise BessemerError(f"{checkpoint.folder}: tensor {name} is not that of the other checkpoints")
        for name, weight in weights.items():
            sums[name] = sums[name].add_(weight.double()) if name in sums else weight.double()
    return {name: total.div_(len(checkpoints)).float() for name, total in sums.items()}
