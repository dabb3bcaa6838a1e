"""Copies of the state in shared memory, from which another process writes a checkpoint.

Each copy is the image of a file on a disk, which any process of the machine opens by its path.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from torch import Tensor

from bessemer.checkpoint.files import DTYPES, file_header
from bessemer.checkpoint.protocol import LocalTensors, bytes_of
from bessemer.environment import available_memory
from bessemer.errors import BessemerError

MEMORY_FACTOR = 1.1  # free memory required, as a multiple of the copy
HAS_MEMORY_FILES = hasattr(os, "memfd_create")
PORTABLE = 1  # cudaHostRegisterPortable


class MemoryFile:
    """A file of memory, mapped into this process.

    Attributes:
        path: By which other processes open it while this one lives.
    """

    def __init__(self) -> None:
        self._handle = os.memfd_create("bessemer-checkpoint")
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_locked = False

    @property
    def size(self) -> int:
        return self._bytes.numel()

    def resize(self, size: int, locked: bool) -> Tensor:
        """The bytes of the file, uint8, after it has been given this size. locked: page-locked, for copies from CUDA."""
        if size != self.size or locked != self._is_locked:
            self._free()
            os.ftruncate(self._handle, size)
            self._bytes = torch.frombuffer(mmap.mmap(self._handle, size), dtype=torch.uint8)
            if locked:
                cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                code = int(cuda.cudaHostRegister(self._bytes.data_ptr(), size, PORTABLE))
                if code:
                    raise RuntimeError(f"cudaHostRegister returned {code}")
                self._is_locked = True
        return self._bytes

    def close(self) -> None:
        self._free()
        os.close(self._handle)

    def _free(self) -> None:
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
        self._bytes, self._is_locked = torch.empty(0, dtype=torch.uint8), False
        os.ftruncate(self._handle, 0)


class Staging:
    """Copies of what this process saves, a file of memory for each part."""

    def __init__(self) -> None:
        self._files: dict[str, MemoryFile] = {}
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._copying: Future[None] | None = None

    def fits(self, own: LocalTensors) -> bool:
        """True if copies of all processes of this node fit into free memory."""
        needed = sum(tensor.nbytes for named in own.values() for tensor in named.values())
        missing = max(needed - sum(file.size for file in self._files.values()), 0)
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return HAS_MEMORY_FILES and MEMORY_FACTOR * missing * num_local <= available_memory()

    def copy(self, own: LocalTensors) -> Callable[[], dict[str, str]]:
        """Begin to copy. Returns a function that waits for the copy and returns the path of each part's file.

        The tensors may change after `wait`. A failure is raised by the returned function, in whose exchange the other ranks
        wait.
        """
        paths: dict[str, str] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        try:
            for part in sorted(own):
                if part not in self._files:
                    self._files[part] = MemoryFile()
                paths[part] = self._files[part].path
                copies += _copies(self._files[part], own[part])
            if any(tensor.is_cuda for _, tensor in copies):
                _copy_from_cuda(copies)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()  # type: ignore[no-untyped-call]
                finish: Callable[[], None] = event.synchronize
            else:
                self._copying = self._copier.submit(_copy, copies)
                finish = self._copying.result
        except (RuntimeError, MemoryError, OSError) as error:
            failure = error

            def finish() -> None:
                raise failure

        def ready() -> dict[str, str]:
            try:
                finish()
            except (RuntimeError, MemoryError, OSError) as error:
                raise BessemerError(f"no memory for the copy: {error}") from None
            return paths

        return ready

    def wait(self) -> None:
        """Wait until the tensors may change. On CUDA they may at once: the next update follows the copies on the same stream."""
        if self._copying is not None:
            wait([self._copying])
            self._copying = None

    def close(self) -> None:
        """Free the memory."""
        self._copier.shutdown()
        for file in self._files.values():
            file.close()
        self._files = {}


def _copies(file: MemoryFile, named: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Make a file the image of named tensors without their values. Returns (where its bytes go, tensor) for each."""
    sizes = {name: (DTYPES[str(one.dtype)], tuple(one.shape), one.nbytes) for name, one in named.items()}
    head, begins = file_header(sizes)
    locked = any(tensor.is_cuda for tensor in named.values())
    image = file.resize(len(head) + sum(nbytes for _, _, nbytes in sizes.values()), locked)
    image[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return [(image[begins[name] : begins[name] + one.nbytes], one.detach()) for name, one in named.items()]


def _copy(copies: list[tuple[Tensor, Tensor]]) -> None:
    for target, tensor in copies:
        np.copyto(target.numpy(), bytes_of(tensor))  # without the interpreter's lock and torch's threads


def _copy_from_cuda(copies: list[tuple[Tensor, Tensor]]) -> None:
    for target, tensor in copies:
        target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=tensor.is_cuda)
