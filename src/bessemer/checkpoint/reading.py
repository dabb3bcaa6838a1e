"""Reading checkpoints: whole tensors, slices of them, what a process of any layout needs, and means over checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bessemer.checkpoint.format import Contents, StoredShard, StoredTensor, assemble
from bessemer.errors import BessemerError
from bessemer.parallel.dtensors import Box, fill


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that can be read: on disk (protocol.py) or in memory (in_memory.py), its bytes compared with their hashes.
    contents: part -> name -> stored tensor."""

    folder: Path
    step: int
    facts: dict[str, Any]
    contents: Contents = field(default_factory=dict)

    def __contains__(self, part: str) -> bool:
        """Whether it has a part: there is no optimizer state before the first update, and `ema` only with train.ema."""
        return part in self.contents

    def tensors(self, part: str) -> dict[str, Tensor]:
        """The tensors of one part ("model", "optimizer", ...), whole, on the CPU; mapped from the files as by `whole`."""
        with self.opened() as files:
            return {name: files.whole(part, name) for name in self._named(part)}

    def fill(self, part: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a part's values into tensors or DTensors of any layout, each process into its shard.

        named: a name may come twice, as that of a tied matrix with two copies. Raises BessemerError, before anything is
        changed, when a tensor is missing or has another shape; tensors that are only in the checkpoint are ignored.
        """
        targets = list(named)
        for name, tensor in targets:
            stored = self._named(part).get(name)
            if stored is None or stored.shape != tuple(tensor.shape):
                has = list(stored.shape) if stored else "nothing"
                raise BessemerError(
                    f"{self.folder}: {part} tensor {name} should be {list(tensor.shape)}, the checkpoint has {has}; it "
                    "belongs to another model"
                )
        with self.opened() as files:
            for name, tensor in targets:
                fill(tensor, partial(files.read_slice, part, name))

    @contextmanager
    def opened(self) -> Iterator[CheckpointFiles]:
        """Its files, each opened once in the block and closed after it. A removed checkpoint frees its space then, and when the
        tensors that `whole` has mapped are gone."""
        with ExitStack() as stack:
            yield CheckpointFiles(self, stack)

    def _named(self, part: str) -> dict[str, StoredTensor]:
        if part not in self.contents:
            raise BessemerError(f"{self.folder}: has no part {part!r}, only {', '.join(sorted(self.contents))}")
        return self.contents[part]


class CheckpointFiles:
    """The open files of a checkpoint. stack: closes them."""

    def __init__(self, checkpoint: SavedCheckpoint, stack: ExitStack) -> None:
        self._checkpoint, self._stack, self._open = checkpoint, stack, dict[str, Any]()

    def whole(self, part: str, name: str) -> Tensor:
        """A whole tensor; one of a single shard is mapped from its file and not copied, and holds the file's space."""
        shards = self._stored(part, name).shards
        return self._read_shard(shards[0]) if len(shards) == 1 else self.read(part, name)

    def read(self, part: str, name: str) -> Tensor:
        """A copy of a whole tensor on the CPU."""
        shape = self._stored(part, name).shape
        return self.read_slice(part, name, (0,) * len(shape), shape)

    def read_slice(self, part: str, name: str, offset: Box, shape: Box) -> Tensor:
        """A copy of a slice of a tensor, which must lie in it, on the CPU."""
        stored = self._stored(part, name)
        dtype: torch.dtype = getattr(torch, stored.dtype.removeprefix("torch."))
        return assemble(stored, offset, shape, self._read_shard, dtype)

    def _read_shard(self, shard: StoredShard, slices: tuple[slice, ...] = ()) -> Tensor:
        path = self._checkpoint.folder / shard.file
        try:
            if shard.file not in self._open:
                self._open[shard.file] = self._stack.enter_context(safe_open(path, framework="pt"))
            file = self._open[shard.file]
            if tuple(file.get_slice(shard.key).get_shape()) != shard.shape:
                raise BessemerError(f"{path}: tensor {shard.key} is not the {list(shard.shape)} that the manifest says")
            tensor: Tensor = file.get_slice(shard.key)[slices] if slices else file.get_tensor(shard.key)
            return tensor
        except (SafetensorError, OSError) as error:
            raise BessemerError(f"{path}: tensor {shard.key} cannot be read: {error}") from None

    def _stored(self, part: str, name: str) -> StoredTensor:
        named = self._checkpoint._named(part)
        if name not in named:
            raise BessemerError(f"{self._checkpoint.folder}: part {part} has no tensor {name}")
        return named[name]


@torch.no_grad()
def mean_of(opened: list[CheckpointFiles], name: str) -> Tensor:
    """The mean of one weight over checkpoints of one model (Izmailov et al. 2018), summed in float64, as fp32."""
    total = opened[0].read("model", name).double()
    for files in opened[1:]:
        total += files.read("model", name)
    return total.div_(len(opened)).float()


def mean_weights(checkpoints: list[SavedCheckpoint]) -> dict[str, Tensor]:
    """The mean of each weight; one weight of one checkpoint is in memory besides the means.

    Raises BessemerError when the models differ.
    """
    shapes = [{name: one.shape for name, one in each.contents["model"].items()} for each in checkpoints]
    for checkpoint, own in zip(checkpoints, shapes, strict=True):
        for name in sorted(own.keys() | shapes[0].keys()):
            if own.get(name) != shapes[0].get(name):
                raise BessemerError(f"{checkpoint.folder}: tensor {name} is not that of the other checkpoints")
    with ExitStack() as stack:
        opened = [stack.enter_context(checkpoint.opened()) for checkpoint in checkpoints]
        return {name: mean_of(opened, name) for name in shapes[0]}
