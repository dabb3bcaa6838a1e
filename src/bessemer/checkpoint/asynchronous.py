"""Asynchronous checkpoints: the step waits while the state is copied, and not while it is written.

A thread writes, hashes, verifies and publishes the copy. It communicates with the threads of the other processes over its own
process group: on the training's group the two would receive each other's messages.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.checkpoint.format import Tensors
from bessemer.checkpoint.protocol import LocalTensors, PreparedSave, Retention, prepare, publish
from bessemer.environment import available_memory
from bessemer.errors import BessemerError
from bessemer.parallel import traffic
from bessemer.parallel.mesh import SINGLE_PROCESS, ProcessMesh

TIMEOUT = timedelta(hours=1)  # for the other processes to write
MEMORY_FACTOR = 1.1  # free memory required, as a multiple of the copy
JOIN_SECONDS = 10.0  # that a failing run waits for a running save


class AsyncSaver:
    """Saves one checkpoint at a time. Every process creates one, and calls `save` for the same steps.

    The copy takes as much CPU memory as this process writes (page-locked on CUDA), from the first save on; where that is
    not free, the save runs in the foreground. Use it as a context, or call `finish` before the group ends.
    """

    def __init__(self, folder: Path, keep: Retention | int, mesh: ProcessMesh = SINGLE_PROCESS) -> None:
        """folder, keep: as `protocol.save`; keep may be changed between saves."""
        self._folder, self.keep = folder, keep
        self._mesh = mesh
        if not mesh.is_single:
            self._mesh = replace(mesh, control=dist.new_group(backend="gloo", timeout=TIMEOUT))
            traffic.count(self._mesh.control)  # not part of the concurrent step
        self._thread: Thread | None = None
        self._failure: BaseException | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def save(self, step: int, tensors: Tensors, facts: dict[str, Any]) -> None:
        """Begin a checkpoint of `step`, as `protocol.save`; the tensors may change when this returns.

        Waits for the previous save. If that one failed, its error (BessemerError, on every process) is raised here, after
        the new one has begun.
        """
        before = self._join()
        try:
            prepared = prepare(self._folder, step, tensors, self._mesh)
        except Exception as error:
            if before is not None:
                error.add_note(f"(and the save before failed: {before})")
            raise
        copied: Callable[[], LocalTensors] | None = None
        if in_background := self._fits(prepared.own):
            try:
                copied = self._copy(prepared.own)
            except (RuntimeError, MemoryError) as error:  # raised in the thread, where the other ranks wait
                copied = partial(_fail, BessemerError(f"no memory for the copy: {error}"))
        arguments = prepared, copy.deepcopy(facts), copied, self.keep
        self._thread = Thread(target=self._publish, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        after = None if in_background else self._join()
        try:
            if before or after:
                raise before or after  # type: ignore[misc]
        finally:
            del before, after  # with this frame they would be reference cycles that keep the group alive

    def finish(self) -> None:
        """Wait until the running save is published. Raises its error on every process."""
        failure = self._join()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.finish()
        elif self._thread is not None:  # the other ranks may have failed too: do not wait for them for long
            self._thread.join(JOIN_SECONDS)

    def _publish(
        self, prepared: PreparedSave, facts: dict[str, Any], copied: Callable[[], LocalTensors] | None,
        keep: Retention | int,
    ) -> None:  # fmt: skip
        try:
            publish(prepared, facts, keep, self._mesh, copied)
        except (BessemerError, OSError) as error:
            self._failure = BessemerError(f"the checkpoint of step {prepared.step} failed: {error}")
            self._failure.__cause__ = error
        except BaseException as error:
            self._failure = error

    def _join(self) -> BaseException | None:
        """Wait for the running save. Returns its error, once."""
        if self._thread is not None:
            self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        return failure

    def _fits(self, own: LocalTensors) -> bool:
        """Whether copies of all processes of this node fit into free memory."""
        named = (((part, name), tensor) for part, tensors in own.items() for name, tensor in tensors.items())
        missing = sum(tensor.nbytes for key, tensor in named if not _matches(self._buffers.get(key), tensor))
        return MEMORY_FACTOR * missing * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= available_memory()

    def _copy(self, own: LocalTensors) -> Callable[[], LocalTensors]:
        """Start copying into this process's buffers. Returns a function that waits for the copy and returns it."""
        buffers: dict[tuple[str, str], Tensor] = {}
        event: torch.cuda.Event | None = None
        for part, named in own.items():
            for name, tensor in named.items():
                buffer = self._buffers.pop((part, name), None)
                if buffer is None or not _matches(buffer, tensor):
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                buffers[part, name] = buffer.copy_(tensor, non_blocking=tensor.is_cuda)
                if tensor.is_cuda and event is None:
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._buffers = buffers
        if event is not None:  # the next update follows the copies on the same stream, so the step need not wait
            event.record()  # type: ignore[no-untyped-call]
        copies = {part: {name: buffers[part, name] for name in named} for part, named in own.items()}

        def ready() -> LocalTensors:
            if event is not None:
                event.synchronize()  # type: ignore[no-untyped-call]
            return copies

        return ready


def _matches(buffer: Tensor | None, tensor: Tensor) -> bool:
    return buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _fail(error: BessemerError) -> LocalTensors:
    raise error
