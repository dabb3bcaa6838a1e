"""Saving beside the training: the step waits while the state is copied, and not while it is written.

A thread writes, hashes, verifies and publishes the copy. It speaks to the threads of the other processes over a group
of its own: on the group that the training uses, the two would take each other's messages.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.checkpoint.pieces import Tensors
from bessemer.checkpoint.protocol import Prepared, Shares, prepare, publish
from bessemer.environment import available_memory
from bessemer.errors import BessemerError
from bessemer.parallel import traffic
from bessemer.parallel.team import ALONE, Team

TIMEOUT = timedelta(hours=1)  # that a process waits for the others' writing
MEMORY_FACTOR = 1.1  # memory that must be free, in sizes of the copy
PATIENCE = 10.0  # seconds that a failing run gives the save in hand


class AsyncSaver:
    """Saves one checkpoint at a time. Every process of the team makes one, and calls `save` for the same steps.

    The copy takes as much of the CPU's memory as this process writes (page-locked on CUDA), from the first save on; where
    that is not free, the save is done in the foreground. Use it as a context, or call `finish` before the group ends.
    """

    def __init__(self, folder: Path, keep: int, team: Team = ALONE, branch: int | None = None) -> None:
        """folder, keep, branch: as `protocol.save`."""
        self._folder, self._keep, self.branch = folder, keep, branch
        self._team = team
        if not team.is_alone:
            self._team = replace(team, control=dist.new_group(backend="gloo", timeout=TIMEOUT))
            traffic.count(self._team.control)  # a save is no part of the step that it runs beside
        self._thread: Thread | None = None
        self._failure: BaseException | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def save(self, step: int, tensors: Tensors, facts: dict[str, Any]) -> None:
        """Begin a checkpoint of `step`, as `protocol.save` would write it; the tensors may change when this returns.

        Waits for the save before. When that one failed, its error (BessemerError, on every process) is raised here, once
        the new one is under way.
        """
        before = self._settled()
        try:
            prepared = prepare(self._folder, step, tensors, self._team)
        except Exception as error:
            if before is not None:
                error.add_note(f"(and the save before failed: {before})")
            raise
        values: Callable[[], Shares] | None = None
        in_background = self._fits(prepared.mine)
        if in_background:
            try:
                values = self._copied(prepared.mine)
            except (RuntimeError, MemoryError) as error:  # the others are writing: they learn it where they wait for it
                values = _raises(BessemerError(f"no memory for the copy: {error}"))
        given = copy.deepcopy(facts)
        self._thread = Thread(target=self._publish, args=(prepared, given, values), name="checkpoint", daemon=True)
        self._thread.start()
        after = None if in_background else self._settled()
        try:
            if before or after:
                raise before or after  # type: ignore[misc]
        finally:
            del before, after  # with this frame they would be circles that keep the group alive

    def finish(self) -> None:
        """Wait until the save in hand is published. Raises its error when it failed, on every process."""
        failure = self._settled()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif self._thread is not None:  # what failed may have taken the others with it: do not wait for them for long
            self._thread.join(PATIENCE)

    def _publish(self, prepared: Prepared, facts: dict[str, Any], values: Callable[[], Shares] | None) -> None:
        try:
            publish(prepared, facts, self._keep, self._team, values, self.branch)
        except (BessemerError, OSError) as error:
            self._failure = BessemerError(f"the checkpoint of step {prepared.step} failed: {error}")
            self._failure.__cause__ = error
        except BaseException as error:
            self._failure = error

    def _settled(self) -> BaseException | None:
        """Wait for the save in hand; why it failed, once."""
        if self._thread is not None:
            self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        return failure

    def _fits(self, mine: Shares) -> bool:
        """Whether a copy fits into what memory is free, with those of the other processes of this node."""
        missing = sum(
            tensor.nbytes
            for part, named in mine.items()
            for name, tensor in named.items()
            if not _alike(self._buffers.get((part, name)), tensor)
        )
        return MEMORY_FACTOR * missing * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= available_memory()

    def _copied(self, mine: Shares) -> Callable[[], Shares]:
        """Begin a copy into this process's own memory. The result waits for it, and gives it."""
        buffers: dict[tuple[str, str], Tensor] = {}
        event: torch.cuda.Event | None = None
        for part, named in mine.items():
            for name, tensor in named.items():
                buffer = self._buffers.pop((part, name), None)
                if buffer is None or not _alike(buffer, tensor):
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                buffers[part, name] = buffer.copy_(tensor, non_blocking=tensor.is_cuda)
                if tensor.is_cuda and event is None:
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._buffers = buffers
        if event is not None:  # the next update comes after the copies on the same stream, so the step need not wait
            event.record()  # type: ignore[no-untyped-call]
        shares: Shares = {part: {name: buffers[part, name] for name in named} for part, named in mine.items()}

        def ready() -> Shares:
            if event is not None:
                event.synchronize()  # type: ignore[no-untyped-call]
            return shares

        return ready


def _alike(buffer: Tensor | None, tensor: Tensor) -> bool:
    return buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _raises(error: BessemerError) -> Callable[[], Shares]:
    def give() -> Shares:
        raise error

    return give
