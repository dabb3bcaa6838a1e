"""Asynchronous checkpoints.

The state is copied into host memory while the next step computes its gradients, and a thread writes the copy while training
continues. The threads of all ranks communicate over a separate process group: on the training's group, a save could receive
messages of the training and vice versa.
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

TIMEOUT = timedelta(hours=1)  # until all other processes have written their files
JOIN_SECONDS = 10.0  # how long a failing run waits for a running save
MEMORY_FACTOR = 1.1  # free memory required, as a multiple of the copy
ALIGNMENT = 16  # bytes, enough for the widest element type
PORTABLE = 1  # the value of cudaHostRegisterPortable


class BackgroundFailure(BessemerError):
    """An error of an earlier background save; its message names the step."""


class HostCopies:
    """Host copies of the tensors that this process saves.

    Their memory is reused by the next save. It is page-locked for tensors on CUDA.
    """

    def __init__(self) -> None:
        self._memory, self._is_locked = torch.empty(0, dtype=torch.uint8), False
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-copy")
        self._copying: Future[None] | None = None

    def fits(self, own: LocalTensors) -> bool:
        """Return True if the copies of all processes of this node fit into free memory."""
        missing = max(_num_bytes(own) - self._memory.numel(), 0)
        return MEMORY_FACTOR * missing * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= available_memory()

    def begin(self, own: LocalTensors) -> tuple[LocalTensors, Callable[[], object]]:
        """Start to copy the tensors.

        Returns the copies and a function that waits until they are complete. The tensors may change once `HostCopies.wait` has
        returned. If memory is too small, the returned function raises BessemerError instead of this method, so that the error
        reaches the other ranks, which already wait in an exchange that reports errors.
        """
        is_cuda = any(tensor.is_cuda for named in own.values() for tensor in named.values())
        try:
            copies = self._allocate(own, is_cuda)
        except (RuntimeError, MemoryError) as error:
            failure = BessemerError(f"not enough memory to copy the state: {error}")

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
        """Wait until the tensors may change.

        On CUDA this returns at once: the next update is queued after the copies on the same stream.
        """
        if self._copying is not None:
            wait([self._copying])
            self._copying = None

    def close(self) -> None:
        """Stop the copy thread and free the memory."""
        self._copier.shutdown()
        self._free()

    def _free(self) -> None:
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
        self._memory, self._is_locked = torch.empty(0, dtype=torch.uint8), False

    def _allocate(self, own: LocalTensors, is_locked: bool) -> LocalTensors:
        """Return a host tensor for each tensor, in the memory of the last save if that is large enough."""
        if (total := _num_bytes(own)) > self._memory.numel():
            self._free()
            self._memory = torch.empty(total, dtype=torch.uint8)
            if is_locked:  # torch's pinned allocator would round the size up to a power of two
                code = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), total, PORTABLE))  # type: ignore[no-untyped-call]
                if code:
                    raise RuntimeError(f"cudaHostRegister failed with error {code}")
                self._is_locked = True
        copies, at = LocalTensors(), 0
        for part, named in own.items():
            copies[part] = {}
            for name, tensor in named.items():
                copies[part][name] = self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return copies


def _num_bytes(tensors: LocalTensors) -> int:
    """Return the bytes that copies of the tensors need, with alignment."""
    return sum(-(-one.nbytes // ALIGNMENT) * ALIGNMENT for named in tensors.values() for one in named.values())


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for held, tensor in pairs:
        np.copyto(bytes_of(held), bytes_of(tensor))  # numpy releases the GIL and uses none of torch's threads


def raise_first(failures: list[BaseException | None]) -> None:
    """Raise the first error of the list, with the later errors as its notes, and empty the list.

    The list is emptied because an error that is referenced by a frame of its traceback is a reference cycle, which would keep
    the process group alive.
    """
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
    """A saver that writes one checkpoint at a time in the background.

    Every process creates one and calls `save` for the same steps. The state is copied while the next step computes its
    gradients, and the optimizer's step waits for the copy. From the first save on, the copy takes as much memory as this
    process writes. If that is not free, the save runs in the foreground. Use the saver as a context manager, or call `finish`
    before the process group ends.
    """

    def __init__(
        self, folder: Path, keep: Retention | int, mesh: ProcessMesh = SINGLE_PROCESS,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:  # fmt: skip
        """Create a saver and, for several processes, its process group.

        Args:
            folder: The run's checkpoint folder.
            keep: The checkpoints to keep, as in `protocol.save`. It may be changed between saves.
            mesh: The ranks that save together.
            optimizer: The optimizer that updates the saved tensors; its step then waits for the copy. With None, `save` waits
                for it.
        """
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
        """Start to save a checkpoint of `step`; the tensors may change after `wait_copied`.

        The arguments are those of `protocol.save`. Waits for the previous save first. If that one failed, its error
        (BessemerError, on every process) is raised here, after the new save has begun. `on_published` is called after each
        published checkpoint.
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
        """Wait for the running save, and return its error once."""
        if self._thread is not None:
            self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        return failure

    def finish(self) -> None:
        """Wait for the running save, and raise its error on every process."""
        raise_first([self.join()])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self.finish()
            elif self._thread is not None:  # the other ranks may have failed too, so the wait is short
                self._thread.join(JOIN_SECONDS)
        finally:
            if self._hook is not None:  # the hook is part of a reference cycle that would keep the group alive
                self._hook.remove()
            self._copies.close()
