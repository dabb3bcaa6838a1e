"""The processes of a node as forks of one that has torch and the training loaded: modules are imported once a node, and not by
every process, and a restart imports nothing. On Linux; elsewhere, where the server ends, and with BESSEMER_FORKS=0 each is a new
interpreter.

The agent loads the modules, and forks the server before it starts a thread. It sends the arguments of Python and the environment
of each process through a pipe, and hears of starts and ends. Nothing here touches a GPU: a fork of a process that has could not.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from time import monotonic
from typing import Any, NoReturn

from bessemer import interrupt
from bessemer.terminal import silence_libraries

MODULES = (
    "torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "torch.nn.parallel.distributed", "torch._dynamo", "bessemer.launch.member", "bessemer.launch.rendezvous",
    "bessemer.train.loop", "bessemer.cli.train",
)  # fmt: skip
# Beginnings of variables that are read when a module above is loaded; a process for which one differs is a new interpreter.
READ_AT_IMPORT = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "LD_", "PYTHON", "TORCH_LOGS", "TORCHDYNAMO_")
STARTED, ENDED = "started", "ended"


class Fork:
    """A process of the server, with what torch's agent uses of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid

    def poll(self) -> int | None:
        """Its exit code, below 0 by a signal; None while it runs."""
        self._server.listen(0.0)
        return self._server.codes.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else monotonic() + timeout
        while (code := self._server.codes.get(self.pid)) is None:
            left = None if deadline is None else deadline - monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            self._server.listen(left)
        return code


class ForkServer:
    """The agent's side. codes: exit codes of the processes that have ended, by process id."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self._pids: list[int] = []
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        silence_libraries()
        for name in MODULES:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # so that collections leave the pages of these modules shared
        self._environment = dict(os.environ)
        self._pipe, theirs = Pipe()
        self.pid = os.fork()
        if not self.pid:
            self._pipe.close()
            _serve(theirs)
        theirs.close()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Fork | None:
        """Start `python ARGUMENTS` with this environment, in a session of its own; None where a new interpreter has to."""
        here = self._environment
        names = [name for name in here.keys() | environment.keys() if name.startswith(READ_AT_IMPORT)]
        if arguments[0] != "-m" or any(here.get(name) != environment.get(name) for name in names):
            return None
        known = len(self._pids)
        try:
            self._pipe.send((list(arguments), dict(environment)))
        except OSError:
            return None
        while len(self._pids) == known and self._is_there():
            self.listen(None)
        return Fork(self, self._pids[-1]) if len(self._pids) > known else None

    def listen(self, seconds: float | None) -> None:
        """Take in what the server has to say, waiting for it at most so long; None: until there is something."""
        try:
            while self._is_there() and self._pipe.poll(seconds):
                what, pid, code = self._pipe.recv()
                if what == STARTED:
                    self._pids.append(pid)
                    self.codes.pop(pid, None)  # of an earlier process with this id
                else:
                    self.codes[pid] = code
                seconds = 0.0
        except (EOFError, OSError):  # with the server its forks are killed
            self._pipe.close()
        if not self._is_there():
            for pid in self._pids:
                self.codes.setdefault(pid, -signal.SIGKILL)

    def close(self) -> None:
        """End the server, and with it what still runs."""
        self._pipe.close()
        os.waitpid(self.pid, 0)

    def _is_there(self) -> bool:
        return not self._pipe.closed


def _serve(pipe: Connection) -> NoReturn:
    """The server: forks, until its parent, the agent, ends."""
    interrupt.end_with_parent(signal.SIGKILL)
    interrupt.name_process("fork server")
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    os.set_blocking(readable, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    running, sources = 0, list[Any]([pipe, readable])
    while True:
        ready, _, _ = select.select(sources, [], [])
        if readable in ready:
            os.read(readable, 4096)
        if pipe in ready:
            try:
                arguments, environment = pipe.recv()
            except (EOFError, OSError):
                os._exit(0)
            leads, is_leading = os.pipe()
            pid = os.fork()
            if not pid:
                pipe.close()
                _become(arguments, environment, (readable, writable, leads, is_leading))
            os.close(is_leading)
            os.read(leads, 1)  # until the fork has closed it: from then on signals to its group reach it
            os.close(leads)
            running += 1
            pipe.send((STARTED, pid, None))
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            running -= 1
            pipe.send((ENDED, ended[0], os.waitstatus_to_exitcode(ended[1])))


def _become(arguments: list[str], environment: dict[str, str], pipes: Sequence[int]) -> NoReturn:
    """Run as `python ARGUMENTS` does, which begin with -m, in the fork."""
    code: Any = 1
    try:
        signal.set_wakeup_fd(-1)
        interrupt.handle(signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        for one in pipes:
            os.close(one)
        os.environ.clear()
        os.environ.update(environment)
        name = arguments[1]
        module = importlib.import_module("bessemer.cli" if name == "bessemer" else name)
        sys.argv = [str(module.__file__), *arguments[2:]]
        module.main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
