"""Asynchronous checkpoints: the state is copied into host memory while the next step computes its gradients, and a thread writes
the copy while the training continues.

The thread communicates with those of the other ranks over a process group of its own: on the training's group the two would
receive each other's messages.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.checkpoint.format import Tensors
from bessemer.checkpoint.protocol import LocalTensors, bytes_of, prepare, publish
from bessemer.checkpoint.retention import Retention
from bessemer.common.environment import available_memory
from bessemer.common.errors import BessemerError
from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh

TIMEOUT = timedelta(hours=1)  # for the other processes to write
JOIN_SECONDS = 10.0  # that a failing run waits for a running save
MEMORY_FACTOR = 1.1  # free memory required, as a multiple of the copy
ALIGNMENT = 16  # bytes: of the widest element
PORTABLE = 1  # cudaHostRegisterPortable


class BackgroundFailure(BessemerError):
    """Of work that had begun earlier; its message names the step."""


class HostCopies:
    """Copies of what this process saves. Their memory is kept from one save to the next, page-locked for tensors on CUDA."""

    def __init__(self) -> None:
        self._memory, self._is_locked = torch.empty(0, dtype=torch.uint8), False
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-copy")
        self._copying: Future[None] | None = None

    def fits(self, own: LocalTensors) -> bool:
        """True if copies of all processes of this node fit into free memory."""
        missing = max(_num_bytes(own) - self._memory.numel(), 0)
        return MEMORY_FACTOR * missing * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= available_memory()

    def begin(self, own: LocalTensors) -> tuple[LocalTensors, Callable[[], object]]:
        """Begin to copy. Returns the copies, and a function that waits for their values; the tensors may change after `wait`.

        A lack of memory is raised by that function, in whose exchange the other ranks wait.
        """
        is_cuda = any(tensor.is_cuda for named in own.values() for tensor in named.values())
        try:
            copies = self._allocate(own, is_cuda)
        except (RuntimeError, MemoryError) as error:
            failure = BessemerError(f"no memory for the copy: {error}")

            def fail() -> None:
                raise failure

            return own, fail
        pairs = [(copies[part][name], tensor) for part, named in own.items() for name, tensor in named.items()]
        if not is_cuda:
            self._copying = self._copier.submit(_copy, pairs)
            return copies, self._copying.result
        for held, tensor in pairs:
            held.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[no-untyped-call]
        return copies, event.synchronize

    def wait(self) -> None:
        """Wait until the tensors may change. On CUDA they may at once: the next update follows the copies on the same stream."""
        if self._copying is not None:
            wait([self._copying])
            self._copying = None

    def close(self) -> None:
        """Free the memory."""
        self._copier.shutdown()
        self._free()

    def _free(self) -> None:
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
        self._memory, self._is_locked = torch.empty(0, dtype=torch.uint8), False

    def _allocate(self, own: LocalTensors, is_locked: bool) -> LocalTensors:
        """Return memory for each tensor: that of the last save where it is enough."""
        if (total := _num_bytes(own)) > self._memory.numel():
            self._free()
            self._memory = torch.empty(total, dtype=torch.uint8)
            if is_locked:  # torch's allocator of page-locked memory would round up to a power of two
                code = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), total, PORTABLE))  # type: ignore[no-untyped-call]
                if code:
                    raise RuntimeError(f"cudaHostRegister returned {code}")
                self._is_locked = True
        copies, at = LocalTensors(), 0
        for part, named in own.items():
            copies[part] = {}
            for name, tensor in named.items():
                copies[part][name] = self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return copies


def _num_bytes(tensors: LocalTensors) -> int:
    """Return the memory that copies take, each aligned."""
    return sum(-(-one.nbytes // ALIGNMENT) * ALIGNMENT for named in tensors.values() for one in named.values())


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for held, tensor in pairs:
        np.copyto(bytes_of(held), bytes_of(tensor))  # without the interpreter's lock and torch's threads


def raise_first(failures: list[BaseException | None]) -> None:
    """Raise the first error of these, with the later ones as its notes, and empty the list: an error in a variable of the frames
    that it passes through is a reference cycle, which would keep the process group alive."""
    errors = [failure for failure in failures if failure is not None]
    failures.clear()
    try:
        if errors:
            for later in errors[1:]:
                errors[0].add_note(f"(and then: {later})")
            raise errors[0]
    finally:
        errors.clear()


class AsyncSaver:
    """Saves one checkpoint at a time. Every process creates one, and calls `save` for the same steps.

    The state is copied while the next step computes its gradients: the optimizer's step waits for the copy. The copy takes as
    much memory as this process writes, from the first save on; where that is not free, the save runs in the foreground. Use it
    as a context, or call `finish` before the group ends.
    """

    def __init__(
        self, folder: Path, keep: Retention | int, mesh: ProcessMesh = SINGLE_PROCESS,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:  # fmt: skip
        """folder, keep: as `protocol.save`; keep may be changed between saves, and `on_published` is called after each.
        optimizer: changes the tensors that are saved; None: `save` returns when they are copied."""
        self._folder, self.keep = folder, keep
        self.on_published: Callable[[], None] = lambda: None
        self._hook = None
        if optimizer is not None:
            self._hook = optimizer.register_step_pre_hook(lambda *_: self.wait_copied())
        self.mesh = mesh
        if not mesh.is_single:
            self.mesh = replace(mesh, control=dist.new_group(backend="gloo", timeout=TIMEOUT))
        self._copies = HostCopies()
        self._thread: Thread | None = None
        self._failure: BaseException | None = None

    def save(self, step: int, tensors: Tensors, facts: dict[str, Any]) -> None:
        """Begin a checkpoint of `step`, as `protocol.save`; the tensors may change after `wait_copied`.

        Waits for the previous save. If that one failed, its error (BessemerError, on every process) is raised here, after
        the new one has begun.
        """
        failures = [self.join()]
        try:
            prepared = prepare(self._folder, step, tensors, self.mesh)
        except Exception as error:
            if failures[0] is not None:
                error.add_note(f"(and before: {failures[0]})")
            raise
        in_background, ready = self._copies.fits(prepared.own), None
        if in_background:
            copies, ready = self._copies.begin(prepared.own)
            prepared = replace(prepared, own=copies)
            if self._hook is None:
                self.wait_copied()
        facts, keep = copy.deepcopy(facts), self.keep

        def work() -> None:
            try:
                publish(prepared, facts, keep, self.mesh, ready)
                self.on_published()
            except (BessemerError, OSError) as error:
                self._failure = BackgroundFailure(f"the checkpoint of step {step} failed: {error}")
                self._failure.__cause__ = error
            except BaseException as error:
                self._failure = error

        if in_background:
            self._thread = Thread(target=work, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            work()
            failures.append(self.join())
        raise_first(failures)

    def wait_copied(self) -> None:
        """Wait until the tensors that are being saved may change."""
        self._copies.wait()

    def join(self) -> BaseException | None:
        """Wait for the save. Returns its error, once."""
        if self._thread is not None:
            self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        return failure

    def finish(self) -> None:
        """Wait for the save. Raises its error on every process."""
        raise_first([self.join()])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self.finish()
            elif self._thread is not None:  # the other ranks may have failed too: do not wait for them for long
                self._thread.join(JOIN_SECONDS)
        finally:
            if self._hook is not None:  # a reference cycle that would keep the group alive
                self._hook.remove()
            self._copies.close()
