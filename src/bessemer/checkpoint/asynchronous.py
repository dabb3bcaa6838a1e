"""Asynchronous checkpoints: the state is copied into shared memory while the next step computes its gradients, and written
while the training goes on.

A process writes, hashes and reads back the copy (files.py). A thread only sends it requests and communicates with the threads
of the other ranks, over a process group of its own: on the training's group the two would receive each other's messages.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Self

import torch
import torch.distributed as dist

from bessemer import interrupt
from bessemer.checkpoint import files
from bessemer.checkpoint.files import Scan
from bessemer.checkpoint.format import Tensors
from bessemer.checkpoint.protocol import FileWriter, PreparedSave, prepare, publish
from bessemer.checkpoint.retention import Retention
from bessemer.checkpoint.staging import Staging
from bessemer.errors import BessemerError
from bessemer.parallel.mesh import SINGLE_PROCESS, ProcessMesh

TIMEOUT = timedelta(hours=1)  # for the other processes to write
JOIN_SECONDS = 10.0  # that a failing run waits for a running save


class BackgroundFailure(BessemerError):
    """Of work that had begun earlier; its message names the step."""


class WriterProcess:
    """A process of low priority that copies and reads files; started at the first use, and again after it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None  # of the last start

    def start(self) -> None:
        """Start it where it does not run. It ends with the thread that calls this, so not in the thread that sends requests.

        Where it cannot be started `request` raises that: in the exchange in which every rank learns of it.
        """
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-P", files.__file__, str(os.getpid())]
            # Schedulers send stop signals to every process, and the training saves after them: it never receives them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, interrupt.SIGNALS)
            self._process, self._failure = None, None
            try:
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            except OSError as error:
                self._failure = error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def request(self, kind: str, *paths: str | Path) -> Scan:
        """`files.copy_file` or `files.scan` in that process. Raises OSError, and BessemerError where it dies."""
        if self._failure is not None:
            raise BessemerError(f"the process that writes checkpoints cannot be started: {self._failure}")
        process, answer = self._process, b""
        assert process is not None and process.stdin is not None and process.stdout is not None, "started"
        try:
            process.stdin.write(json.dumps([kind, *map(str, paths)]).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:  # of the pipe
            pass
        if not answer.endswith(b"\n"):
            code = process.wait()
            raise BessemerError(f"the process that writes checkpoints ended with {code}")
        result = json.loads(answer)
        if isinstance(result, dict):
            raise OSError(*result["error"], *filter(None, [result["path"]]))
        return Scan(*result)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


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
    much shared memory as this process writes (page-locked on CUDA), from the first save on; where that is not free, the save
    runs in the foreground. Use it as a context, or call `finish` before the group ends.
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
        self.process, self._staging = WriterProcess(), Staging()
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
        writer = self._begin_copy(prepared)
        prepared = replace(prepared, own=prepared.own if writer is None else {})
        facts, keep = copy.deepcopy(facts), self.keep

        def work() -> None:
            try:
                publish(prepared, facts, keep, self.mesh, writer)
                self.on_published()
            except (BessemerError, OSError) as error:
                self._failure = BackgroundFailure(f"the checkpoint of step {step} failed: {error}")
                self._failure.__cause__ = error
            except BaseException as error:
                self._failure = error

        if writer is None:
            work()
            failures.append(self.join())
        else:
            self.process.start()
            self._thread = Thread(target=work, name="checkpoint", daemon=True)
            self._thread.start()
        raise_first(failures)

    def _begin_copy(self, prepared: PreparedSave) -> FileWriter | None:
        """Begin to copy what this process saves. Returns what writes the copy; None without memory for it."""
        if not self._staging.fits(prepared.own):
            return None
        ready = self._staging.copy(prepared.own)
        if self._hook is None:
            self.wait_copied()

        def write(part: str, path: Path) -> Scan:
            return self.process.request("copy", ready()[part], path)

        return FileWriter(write, lambda path: self.process.request("scan", path))

    def wait_copied(self) -> None:
        """Wait until the tensors that are being saved may change."""
        self._staging.wait()

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

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
            self.process.end()
            if self._hook is not None:  # a reference cycle that would keep the group alive
                self._hook.remove()
            self._staging.close()
