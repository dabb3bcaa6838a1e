"""Shared memory that holds what a process saves, as images of the files: any process of the machine opens them by their paths."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bessemer.checkpoint.files import DTYPES, layout
from bessemer.checkpoint.protocol import LocalTensors
from bessemer.environment import available_memory
from bessemer.errors import BessemerError

MEMORY_FACTOR = 1.1  # free memory required, as a multiple of the copy
HAS_MEMORY_FILES = hasattr(os, "memfd_create")
PORTABLE = 1  # cudaHostRegisterPortable


class MemoryFile:
    """A file of memory, mapped into this process. path: by which others open it while the process that made it lives."""

    def __init__(self, path: str | None = None) -> None:
        """path: of one that exists; None: a new one."""
        if path is None:
            self._handle = os.memfd_create("bessemer-checkpoint")
            path = f"/proc/{os.getpid()}/fd/{self._handle}"
        else:
            self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.path = path
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_locked = False

    @property
    def size(self) -> int:
        """Bytes."""
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
        """Give its memory back."""
        self._free()
        os.close(self._handle)

    def _free(self) -> None:
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
        self._bytes, self._is_locked = torch.empty(0, dtype=torch.uint8), False
        os.ftruncate(self._handle, 0)


class Staging:
    """Copies of what this process saves, a file of memory for each part."""

    def __init__(self, paths: Sequence[str] | None = None) -> None:
        """paths: of files of memory that another process holds, at least as many as there are parts."""
        self._paths = paths
        self._files: dict[str, MemoryFile] = {}

    def fits(self, own: LocalTensors) -> bool:
        """Whether copies of all processes of this node fit into free memory."""
        held = sum(file.size for part, file in self._files.items() if part in own)
        missing = sum(tensor.nbytes for named in own.values() for tensor in named.values()) - held
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return HAS_MEMORY_FILES and MEMORY_FACTOR * max(missing, 0) * num_local <= available_memory()

    def copy(self, own: LocalTensors) -> Callable[[], dict[str, str]]:
        """Begin to copy. Returns a function that waits for the copy and returns the path of each part's file.

        A failure is raised by that function, in whose exchange the other ranks wait.
        """
        event: torch.cuda.Event | None = None
        try:
            for number, (part, named) in enumerate(sorted(own.items())):
                if part not in self._files:
                    self._files[part] = MemoryFile(None if self._paths is None else self._paths[number])
                if _copy_into(self._files[part], named) and event is None:
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            if event is not None:  # the next update follows the copies on the same stream, so the step need not wait
                event.record()  # type: ignore[no-untyped-call]
        except (RuntimeError, MemoryError, OSError) as error:
            failure = BessemerError(f"no memory for the copy: {error}")

            def fail() -> dict[str, str]:
                raise failure

            return fail
        paths = {part: self._files[part].path for part in own}

        def ready() -> dict[str, str]:
            if event is not None:
                event.synchronize()  # type: ignore[no-untyped-call]
            return paths

        return ready

    def close(self) -> None:
        """Give the memory back."""
        for file in self._files.values():
            file.close()
        self._files = {}


def _copy_into(file: MemoryFile, named: dict[str, Tensor]) -> bool:
    """Copy tensors into the image of a file. Returns whether copies from CUDA go on when this returns."""
    sizes = {name: (DTYPES[str(one.dtype)], tuple(one.shape), one.nbytes) for name, one in named.items()}
    head, begins = layout(sizes)
    is_cuda = any(tensor.is_cuda for tensor in named.values())
    image = file.resize(len(head) + sum(nbytes for _, _, nbytes in sizes.values()), is_cuda)
    image[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for name, tensor in named.items():
        begin = begins[name]
        target = image[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    return is_cuda
