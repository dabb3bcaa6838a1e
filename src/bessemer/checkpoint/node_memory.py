"""The memory of a node that checkpoints lie in, or that holds what a process saves while it is written.

Its files are images of those on a disk, and any process of the machine opens them by their paths. Those of checkpoints in memory
are held by the node's agent, so that they outlive the processes that train. In a folder of the node such a checkpoint is a
manifest and links to these files, and is read as one on a disk:

    memory/files.json                 the paths of the files, by process
    memory/ORIGIN/step-00000140/      manifest.json, links: what the ranks of node ORIGIN hold, this one or a neighbour
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bessemer.checkpoint.files import DTYPES, file_header
from bessemer.checkpoint.format import MANIFEST, PARTS
from bessemer.checkpoint.protocol import LocalTensors, bytes_of
from bessemer.environment import available_memory
from bessemer.errors import BessemerError
from bessemer.interrupt import NODE
from bessemer.parallel.mesh import ProcessMesh
from bessemer.run import checkpoint_name, publish_folder, published, read_json, temporary_folder

FOLDER, HELD = "memory", "files.json"  # in the node's folder; its file that names the files of memory
SETS = 2  # of files that are written in turn; a set has a file for each of a checkpoint's parts
MEMORY_FACTOR = 1.1  # free memory required, as a multiple of the copy
HAS_MEMORY_FILES = hasattr(os, "memfd_create")
PORTABLE = 1  # cudaHostRegisterPortable


@contextmanager
def hold(node: Path, processes: int, replicas: int = 0) -> Iterator[None]:
    """Hold files of memory for the processes of a node while the block runs; they take no memory before they are written.

    Of each process: SETS sets for its own copies, and as many for those of each of `replicas` neighbours.
    """
    if not HAS_MEMORY_FILES:
        yield
        return
    handles = [os.memfd_create("bessemer") for _ in range(processes * (1 + replicas) * SETS * len(PARTS))]
    paths = iter([f"/proc/{os.getpid()}/fd/{one}" for one in handles])
    by_process = [
        [[[next(paths) for _ in PARTS] for _ in range(SETS)] for _ in range(1 + replicas)] for _ in range(processes)
    ]
    (node / FOLDER).mkdir()
    (node / FOLDER / HELD).write_text(json.dumps(by_process))
    try:
        yield
    finally:
        for handle in handles:
            os.close(handle)


@dataclass(frozen=True)
class NodeMemory:
    """The memory that the agent of this process's node holds. folder: of its checkpoints; sets: this process's files, first those
    of its own copies, then those of each neighbour's; local: rank on the node, of num_local in the mesh; node: its number."""

    folder: Path
    sets: list[list[list[str]]]
    local: int
    num_local: int
    node: int

    @classmethod
    def here(cls, mesh: ProcessMesh) -> NodeMemory | None:
        """That of this process; None where no agent of ours has started it, or the system has no files of memory."""
        folder = Path(os.environ[NODE]) / FOLDER if NODE in os.environ else None
        if folder is None or not (folder / HELD).exists():
            return None
        local, node = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("GROUP_RANK", "0"))
        by_process = read_json(folder / HELD)
        num_local = min(len(by_process), mesh.world - (mesh.rank - local))  # the last processes of all may be spare
        return cls(folder, by_process[local], local, num_local, node)

    def checkpoints(self, origin: int) -> Path:
        """The folder of the checkpoints of a node's ranks."""
        return self.folder / str(origin)

    def held(self) -> set[tuple[int, int]]:
        """Step and origin of the checkpoints that are here."""
        origins = [int(path.name) for path in self.folder.iterdir() if path.is_dir()]
        return {(step, origin) for origin in origins for step in published(self.checkpoints(origin))}

    def local_files(self, folder: Path) -> list[Path]:
        """The files of a checkpoint that this process hashes and sends: the node's processes divide those that are here."""
        return sorted(path for path in folder.iterdir() if path.is_symlink())[self.local :: self.num_local]

    def free_set(self, number: int = 0) -> list[str]:
        """The files of this process that no checkpoint consists of, for its own copies or those of neighbour `number` from 1."""
        used = {os.readlink(link) for link in self.folder.glob("*/step-*/*") if link.is_symlink()}
        return next(files for files in self.sets[number] if used.isdisjoint(files))

    def publish(self, origin: int, step: int, manifest: str, links: Mapping[str, str]) -> None:
        """Make a checkpoint of files of memory; of the processes of a node, the first does so. links: name -> path."""
        if self.local:
            return
        target = self.checkpoints(origin) / checkpoint_name(step)
        temporary = temporary_folder(self.checkpoints(origin), step)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        (temporary / MANIFEST).write_text(manifest)
        for name, path in links.items():
            (temporary / name).symlink_to(path)
        publish_folder(temporary, target)

    def forget_others(self, step: int | None = None, own_alone: bool = False) -> None:
        """Forget the checkpoints of all other steps, and with own_alone those of neighbours; the node's first process does so."""
        name = None if step is None else checkpoint_name(step)
        for path in self.folder.glob("*/step-*") if self.local == 0 else ():
            if path.name != name or (own_alone and path.parent != self.checkpoints(self.node)):
                shutil.rmtree(path)


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


def has_memory(missing: int) -> bool:
    """Whether every process of this node can take so many bytes more."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return MEMORY_FACTOR * max(missing, 0) * num_local <= available_memory()


def held_bytes(path: str) -> int:
    """Bytes of memory that a file of memory takes, also where another process has written it. Raises OSError."""
    return os.stat(path).st_blocks * 512


class Staging:
    """Copies of what this process saves, a file of memory for each part."""

    def __init__(self, paths: Sequence[str] | None = None) -> None:
        """paths: of files of memory that another process holds, at least as many as there are parts."""
        self._paths = paths
        self._files: dict[str, MemoryFile] = {}
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._copying: Future[None] | None = None

    def fits(self, own: LocalTensors) -> bool:
        """Whether copies of all processes of this node fit into free memory."""
        needed = sum(tensor.nbytes for named in own.values() for tensor in named.values())
        try:
            held = sum(held_bytes(path) for path in self._paths_of(own).values() if path is not None)
        except OSError:  # `copy` reports it
            held = 0
        return HAS_MEMORY_FILES and has_memory(needed - held)

    def copy(self, own: LocalTensors) -> Callable[[], dict[str, str]]:
        """Begin to copy. Returns a function that waits for the copy and returns the path of each part's file.

        The tensors may change after `wait`. A failure is raised by the returned function, in whose exchange the other ranks
        wait.
        """
        paths: dict[str, str] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        try:
            for part, path in self._paths_of(own).items():
                if part not in self._files:
                    self._files[part] = MemoryFile(path)
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

    def _paths_of(self, own: LocalTensors) -> dict[str, str | None]:
        """The file of each part, in their order; None: one that is not made yet."""
        free = iter(() if self._paths is None else self._paths[len(self._files) :])
        return {part: self._files[part].path if part in self._files else next(free, None) for part in sorted(own)}

    def wait(self) -> None:
        """Wait until the tensors may change. On CUDA they may at once: the next update follows the copies on the same stream."""
        if self._copying is not None:
            wait([self._copying])
            self._copying = None

    def close(self) -> None:
        """Free the memory. Empties also files that another process holds: a copy that should outlive this one is not closed."""
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
