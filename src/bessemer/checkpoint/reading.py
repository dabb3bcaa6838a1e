"""Out of a checkpoint: whole tensors, slices of them, or what a process of any layout needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bessemer.checkpoint.pieces import Contents, Source, Stored, gathered
from bessemer.errors import BessemerError
from bessemer.parallel.local import Box, fill


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint whose every byte has been verified. contents: part -> name -> what is stored."""

    folder: Path
    step: int
    facts: dict[str, Any]
    contents: Contents = field(default_factory=dict)

    def __contains__(self, part: str) -> bool:
        """Whether it has a part; before the first update there is no optimizer state, and not every run averages."""
        return part in self.contents

    def tensors(self, part: str) -> dict[str, Tensor]:
        """The tensors of one part ("model", "optimizer", ...), whole, on the CPU."""
        with self.opened() as files:
            return {name: files.whole(part, name) for name in self._named(part)}

    def read(self, part: str, name: str, offset: Box | None = None, shape: Box | None = None) -> Tensor:
        """A slice of one tensor on the CPU, whatever the pieces it lies in; the whole of it when left out.

        Reads the pages of the files that it needs. For many slices, use `opened`. Raises BessemerError when there is no
        such tensor or no such slice of it.
        """
        with self.opened() as files:
            return files.read(part, name, offset, shape)

    def fill(self, part: str, named: Mapping[str, Tensor]) -> None:
        """Put a part's values into tensors or DTensors of any layout, each process into what it holds.

        Raises BessemerError, before anything is changed, when a tensor is missing or has another shape; tensors that
        are only in the checkpoint are left there.
        """
        for name, tensor in named.items():
            found = self._named(part).get(name)
            if found is None or found.shape != tuple(tensor.shape):
                has = list(found.shape) if found else "nothing"
                raise BessemerError(
                    f"{self.folder}: {part} tensor {name} should be {list(tensor.shape)}, the checkpoint has {has}; it "
                    "belongs to another model"
                )
        with self.opened() as files:
            for name, tensor in named.items():
                fill(tensor, lambda offset, shape, name=name: files.read(part, name, offset, shape))  # type: ignore[misc]

    @contextmanager
    def opened(self) -> Iterator[Files]:
        """The files, each opened once while the block lasts, and not longer: a removed checkpoint gives its space back."""
        with ExitStack() as stack:
            yield Files(self, stack)

    def _named(self, part: str) -> dict[str, Stored]:
        if part not in self.contents:
            raise BessemerError(f"{self.folder}: has no part {part!r}, only {', '.join(sorted(self.contents))}")
        return self.contents[part]


class Files:
    """The files of a checkpoint while they are read. stack: what closes them."""

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack) -> None:
        self._checkpoint, self._stack, self._open = checkpoint, stack, dict[str, Any]()

    def whole(self, part: str, name: str) -> Tensor:
        """A whole tensor; one that lies in one piece is mapped from its file and not copied."""
        stored = self._stored(part, name)
        if len(stored.pieces) == 1:
            return self._guarded(stored.pieces[0], lambda file, key: file.get_tensor(key))
        return self.read(part, name)

    def read(self, part: str, name: str, offset: Box | None = None, shape: Box | None = None) -> Tensor:
        """As `Checkpoint.read`."""
        stored = self._stored(part, name)
        offset = (0,) * len(stored.shape) if offset is None else tuple(offset)
        shape = tuple(n - at for n, at in zip(stored.shape, offset, strict=False)) if shape is None else tuple(shape)
        fits = len(offset) == len(shape) == len(stored.shape) and all(
            at >= 0 and n >= 0 and at + n <= whole for at, n, whole in zip(offset, shape, stored.shape, strict=True)
        )
        if not fits:
            raise BessemerError(
                f"{self._checkpoint.folder}: {part} tensor {name} is {list(stored.shape)}; it has no slice {list(shape)} at "
                f"{list(offset)}"
            )
        dtype: torch.dtype = getattr(torch, stored.dtype.removeprefix("torch."))
        return gathered(stored, offset, shape, self._slice, dtype)

    def _slice(self, source: Source, slices: tuple[slice, ...]) -> Tensor:
        return self._guarded(source, lambda file, key: file.get_slice(key)[slices] if slices else file.get_tensor(key))

    def _guarded(self, source: Source, take: Any) -> Tensor:
        path = self._checkpoint.folder / source.file
        try:
            if source.file not in self._open:
                self._open[source.file] = self._stack.enter_context(safe_open(path, framework="pt"))
            file = self._open[source.file]
            if tuple(file.get_slice(source.key).get_shape()) != source.shape:
                raise BessemerError(
                    f"{path}: tensor {source.key} is not the {list(source.shape)} that the manifest says"
                )
            found: Tensor = take(file, source.key)
            return found
        except (SafetensorError, OSError) as error:
            raise BessemerError(f"{path}: tensor {source.key} cannot be read: {error}") from None

    def _stored(self, part: str, name: str) -> Stored:
        named = self._checkpoint._named(part)
        if name not in named:
            raise BessemerError(f"{self._checkpoint.folder}: part {part} has no tensor {name}")
        return named[name]
